"""Load whose every outcome is accounted for: each stream is held against an undisturbed run."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import grpc
from google.rpc import error_details_pb2, status_pb2

from pagewire.v1 import common_pb2, inference_pb2

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.support.stack import Api

DEADLINE_S = 300.0
_RICH = "grpc-status-details-bin"
_REQUEST_ID = "x-request-id"
_TO_TRY_AGAIN = frozenset({"UNAVAILABLE", "RESOURCE_EXHAUSTED"})


def make_requests(count: int, max_tokens: int) -> list[inference_pb2.GenerateStreamRequest]:
    """Mixed lengths; greedy and drawn; some with a stop string, logprobs or two sequences."""
    rng = random.Random(count)
    requests = []
    for index in range(count):
        sampling = common_pb2.SamplingParams(
            max_tokens=rng.randint(max_tokens // 8, max_tokens),
            temperature=index % 2,
            seed=index,
            ignore_eos=True,
        )
        if index % 4 == 1:
            sampling.n = 2
        if index % 4 == 2:
            sampling.stop.append("never to be found")
        if index % 8 == 3:
            sampling.logprobs = 1
        requests.append(
            inference_pb2.GenerateStreamRequest(
                prompt=f"Story {index}: once upon a time. " * rng.randint(1, 8),
                sampling_params=sampling,
                return_token_ids=True,
            )
        )
    return requests


Outputs = dict[int, tuple[str, tuple[int, ...], int]]
"""By sequence: its text, its ids and the number of its logprobs."""


@dataclass
class Brought:
    """What one stream brought, and how it ended."""

    code: str = ""
    message: str = ""
    typed: bool = True
    accepted: bool = False
    num_finals: int = 0
    after_final: int = 0
    outputs: Outputs = field(default_factory=dict)
    ends: tuple[str, ...] = ()

    def add(self, frame: inference_pb2.GenerateStreamResponse) -> None:
        self.after_final += bool(self.num_finals)
        if frame.HasField("final"):
            self.num_finals += 1
            self.ends = tuple(str(output) for output in frame.final.outputs)
            return
        delta = frame.delta
        text, ids, num_logprobs = self.outputs.get(delta.index, ("", (), 0))
        self.outputs[delta.index] = (
            text + delta.text,
            ids + tuple(delta.token_ids),
            num_logprobs + len(delta.logprobs),
        )


async def bring(
    api: Api,
    request: inference_pb2.GenerateStreamRequest,
    *,
    deadline_s: float = DEADLINE_S,
    cancel_after: int | None = None,
) -> Brought:
    """Reads a stream to its end; cancels it after so many frames, if asked to."""
    brought = Brought()
    call: Any = api.inference.GenerateStream(request, timeout=deadline_s)
    num_frames = 0
    try:
        brought.accepted = _REQUEST_ID in dict(await call.initial_metadata() or ())
        async for frame in call:
            brought.add(frame)
            num_frames += 1
            if num_frames == cancel_after:
                call.cancel()
        brought.code = "OK"
    except asyncio.CancelledError:
        if cancel_after is None or num_frames < cancel_after:
            raise
        brought.code = "CANCELLED"
    except grpc.aio.AioRpcError as error:
        brought.code = error.code().name
        brought.message = error.details() or ""
        brought.typed = _is_typed(error)
    return brought


def _is_typed(error: grpc.aio.AioRpcError) -> bool:
    if error.code() in (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED):
        return True  # said by the client's own library
    rich = dict(error.trailing_metadata() or ()).get(_RICH)
    if rich is None:
        return False
    info = error_details_pb2.ErrorInfo()
    details = status_pb2.Status.FromString(rich).details
    return any(detail.Is(info.DESCRIPTOR) for detail in details)


class Load:
    """Clients that ask one request after the other, and count what becomes of each."""

    def __init__(
        self,
        api: Api,
        requests: Sequence[inference_pb2.GenerateStreamRequest],
        *,
        cancelled: float = 0.0,
        late: float = 0.0,
        seed: int = 0,
    ) -> None:
        """cancelled, late: the shares of requests that are cancelled midway, and that have a
        deadline which they cannot meet."""
        self._api = api
        self._requests = requests
        self._cancelled = cancelled
        self._late = late
        self._random = random.Random(seed)
        self._truth: list[Brought] = []
        self._stopping = False
        self.outcomes: Counter[str] = Counter()
        self.faults: list[str] = []
        """What must not be."""
        self.num_tokens = 0

    async def learn(self) -> None:
        """The undisturbed run."""
        self._truth = list(
            await asyncio.gather(*[bring(self._api, request) for request in self._requests])
        )
        for brought in self._truth:
            assert (brought.code, brought.num_finals) == ("OK", 1), brought

    def start(self, num_clients: int) -> None:
        self._stopping = False
        self._clients = [asyncio.ensure_future(self._client()) for _ in range(num_clients)]

    async def stop(self) -> None:
        """Lets what runs go to its end."""
        self._stopping = True
        await asyncio.gather(*self._clients)

    async def _client(self) -> None:
        while not self._stopping:
            index = self._random.randrange(len(self._requests))
            kind = self._random.random()
            deadline_s, cancel_after = DEADLINE_S, None
            if kind < self._cancelled:
                cancel_after = self._random.randint(1, 8)
            elif kind < self._cancelled + self._late:
                deadline_s = self._random.uniform(0.005, 0.05)
            brought = await bring(
                self._api,
                self._requests[index],
                deadline_s=deadline_s,
                cancel_after=cancel_after,
            )
            outcome = self._judge(index, brought, deadline_s < DEADLINE_S, cancel_after is not None)
            self.outcomes[outcome] += 1
            self.num_tokens += sum(len(ids) for _, ids, _ in brought.outputs.values())
            if outcome == "refused":
                await asyncio.sleep(self._random.uniform(0.05, 0.2))

    def _judge(self, index: int, brought: Brought, late: bool, cancelled: bool) -> str:
        if brought.num_finals > 1 or brought.after_final or not brought.typed:
            return self._fault("malformed", index, brought)
        if brought.code == "OK":
            truth = self._truth[index]
            same = (brought.outputs, brought.ends) == (truth.outputs, truth.ends)
            return "ok" if same and brought.num_finals else self._fault("differs", index, brought)
        if brought.num_finals:
            return self._fault("two outcomes", index, brought)
        if brought.code == "CANCELLED" and cancelled:
            return "cancelled"
        if brought.code == "DEADLINE_EXCEEDED" and late:
            return "deadline"
        if brought.code in _TO_TRY_AGAIN and not brought.accepted:
            return "refused"
        return self._fault("lost", index, brought)

    def _fault(self, what: str, index: int, brought: Brought) -> str:
        told = [what, f"request {index}", brought.code, brought.message, *brought.ends]
        for number, (text, ids, num_logprobs) in self._truth[index].outputs.items():
            other_text, other_ids, other_logprobs = brought.outputs.get(number, ("", (), 0))
            told.append(
                f"sequence {number}: {len(other_ids)} of {len(ids)} ids, the first "
                f"{_num_equal(ids, other_ids)} equal; {len(other_text)} of {len(text)} "
                f"characters, the first {_num_equal(text, other_text)} equal; "
                f"{other_logprobs} of {num_logprobs} logprobs"
            )
        self.faults.append("; ".join(" ".join(it.split()) for it in told if it))
        return what


def _num_equal(one: Sequence[Any], other: Sequence[Any]) -> int:
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))
