"""One DetokenizeStream: its sequences, spread over the workers.

A sequence stays with the worker it was opened on. Each request message becomes at
most one message to each worker, and their answers become one response.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pagewire.errors import InvalidRequest
from tokenizer_svc.messages import Lost, Step, StepDone, Stop
from tokenizer_svc.pool import WorkerGone

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Iterable

    from tokenizer_svc.messages import Open
    from tokenizer_svc.pool import Worker, WorkerPool

WORKER_DIED = "the tokenizer worker died"
_MAX_ENDED = 65_536


@dataclass(frozen=True, slots=True)
class StepRequest:
    """DetokenizeStreamRequest; see detokenizer.proto."""

    step: int
    opens: list[Open]
    sequences: list[int]
    counts: list[int]
    token_ids: list[int]
    finished: list[bool]
    closes: list[int]


@dataclass(frozen=True, slots=True)
class StepResponse:
    """DetokenizeStreamResponse; see detokenizer.proto."""

    step: int
    sequences: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    stops: list[Stop] = field(default_factory=list)
    errors: list[Lost] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class PendingStep:
    """A step that the workers have and whose response is not made yet."""

    step: int
    parts: list[tuple[Step, asyncio.Future[StepDone]]]
    """For each worker, what it was sent and its answer."""


class DetokenizeSession:
    """Steps go through submit, then result, both in the order of the requests."""

    def __init__(self, pool: WorkerPool) -> None:
        self._pool = pool
        self._stream = pool.new_id()
        self._owners: dict[int, Worker] = {}
        # Stopped or lost, and the frontend may not know yet: its ids are passed over.
        self._ended: OrderedDict[int, None] = OrderedDict()
        self._errors: list[Lost] = []
        self._seen_deaths = pool.deaths
        self.num_pending = 0
        """Steps submitted whose result is not out."""

    @property
    def num_sequences(self) -> int:
        return len(self._owners)

    async def submit(self, request: StepRequest) -> PendingStep:
        """Sends each worker its share.

        Raises InvalidRequest if the columns do not fit together, Unavailable if there
        are sequences to open and no worker comes up.
        """
        _check_columns(request)
        self._collect_lost()
        shares: dict[Worker, Step] = {}
        for opening in request.opens:
            await self._open(opening, shares)
        self._route_tokens(request, shares)
        for sequence in request.closes:
            worker = self._forget(sequence)
            if worker is not None:
                self._share(shares, worker).closes.append(sequence)
        self.num_pending += 1
        return PendingStep(
            request.step,
            [
                (share, worker.send(share, share.call, len(share.token_ids)))
                for worker, share in shares.items()
            ],
        )

    async def result(self, pending: PendingStep) -> StepResponse:
        """The one response to a step. A worker that died leaves its sequences in
        `errors`. Raises InternalError for a bug in a worker."""
        self.num_pending -= 1
        response = StepResponse(pending.step)
        for share, future in pending.parts:
            try:
                done = await future
            except WorkerGone:
                # Those that end with this step or one after it have no owner any more.
                self._errors += [
                    Lost(sequence, WORKER_DIED)
                    for sequence in share.sequences
                    if sequence not in self._owners and sequence not in self._ended
                ]
                continue
            self._add(response, done)
        self._collect_lost()
        response.errors.extend(self._errors)
        self._errors.clear()
        return response

    def close(self) -> None:
        """Forgets all sequences, here and in the workers."""
        for sequence in list(self._owners):
            self._forget(sequence)
        self._pool.drop_stream(self._stream)

    async def _open(self, opening: Open, shares: dict[Worker, Step]) -> None:
        former = self._forget(opening.sequence)
        if former is not None:
            # Opened anew: the step that carries the new opening must find the old one gone.
            former.post(self._new_share(closes=[opening.sequence]))
        worker = await self._pool.live_worker(lambda worker: worker.num_sequences)
        self._owners[opening.sequence] = worker
        worker.num_sequences += 1
        self._share(shares, worker).opens.append(opening)

    def _route_tokens(self, request: StepRequest, shares: dict[Worker, Step]) -> None:
        owners = {self._owners.get(sequence) for sequence in request.sequences}
        if len(owners) == 1 and (owner := owners.pop()) is not None and not any(request.finished):
            # As nearly every step is: one worker takes the columns as they are.
            share = self._share(shares, owner)
            share.sequences.extend(request.sequences)
            share.counts.extend(request.counts)
            share.token_ids.extend(request.token_ids)
            share.finished.extend(request.finished)
            return
        start = 0
        for sequence, count, finished in zip(
            request.sequences, request.counts, request.finished, strict=True
        ):
            end = start + count
            worker = self._owners.get(sequence)
            if worker is not None:
                share = self._share(shares, worker)
                share.sequences.append(sequence)
                share.counts.append(count)
                share.token_ids.extend(request.token_ids[start:end])
                share.finished.append(finished)
            elif sequence not in self._ended:
                self._errors.append(Lost(sequence, "the sequence is not open on this stream"))
            start = end
            if finished:
                self._forget(sequence)

    def _share(self, shares: dict[Worker, Step], worker: Worker) -> Step:
        share = shares.get(worker)
        if share is None:
            share = shares[worker] = self._new_share()
        return share

    def _new_share(self, closes: Iterable[int] = ()) -> Step:
        return Step(self._pool.new_id(), self._stream, [], [], [], [], [], list(closes))

    def _add(self, response: StepResponse, done: StepDone) -> None:
        first_row = len(response.sequences)
        response.sequences.extend(done.sequences)
        response.texts.extend(done.texts)
        for stop in done.stops:
            row = first_row + stop.row
            response.stops.append(Stop(row, stop.stop_index, stop.num_tokens))
            self._end(response.sequences[row])
        for lost in done.errors:
            response.errors.append(lost)
            self._end(lost.sequence)

    def _collect_lost(self) -> None:
        """Finds the sequences whose worker has died, each once."""
        if self._seen_deaths == self._pool.deaths:
            return
        self._seen_deaths = self._pool.deaths
        for sequence, worker in list(self._owners.items()):
            if not worker.live:
                self._end(sequence)
                self._errors.append(Lost(sequence, WORKER_DIED))

    def _end(self, sequence: int) -> None:
        """It has ended before the frontend said so."""
        worker = self._owners.pop(sequence, None)
        if worker is None:
            return
        worker.num_sequences -= 1
        self._ended[sequence] = None
        if len(self._ended) > _MAX_ENDED:
            self._ended.popitem(last=False)

    def _forget(self, sequence: int) -> Worker | None:
        """The frontend is done with it; returns the worker that has it."""
        self._ended.pop(sequence, None)
        worker = self._owners.pop(sequence, None)
        if worker is not None:
            worker.num_sequences -= 1
        return worker


def _check_columns(request: StepRequest) -> None:
    rows = len(request.sequences)
    if len(request.counts) != rows:
        raise InvalidRequest("counts", f"{len(request.counts)} entries for {rows} sequences")
    if len(request.finished) != rows:
        raise InvalidRequest("finished", f"{len(request.finished)} entries for {rows} sequences")
    if sum(request.counts) != len(request.token_ids):
        raise InvalidRequest(
            "token_ids",
            f"{len(request.token_ids)} ids, but the counts add up to {sum(request.counts)}",
        )
