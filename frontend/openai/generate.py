"""From calls to an answer: the same admission, dispatcher and outbox as behind gRPC."""

from __future__ import annotations

import asyncio
import secrets
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

from frontend.generation import Generation
from frontend.request import IdsPrompt, TextPrompt
from frontend.stream import Delta
from frontend.validate import validate
from pagewire.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterable, Iterator, Sequence

    from frontend.dispatcher import Dispatcher
    from frontend.openai.exchange import Exchange
    from frontend.request import GenerateCall, Job
    from frontend.stream import Finish


class Answer(Protocol):
    """How one API words what was generated. `place` is the prompt's, among the request's."""

    def begin(self, place: int, prompt_ids: Sequence[int]) -> None:
        """The prompt was admitted and has these tokens."""

    async def whole(self, place: int, outputs: Sequence[Delta], finish: Finish) -> None:
        """Takes in one prompt's outcome."""

    def encode(self) -> bytes:
        """The answer, once all are there."""

    async def chunk(self, place: int, delta: Delta) -> bytes:
        """Of a stream."""

    def ends(self, place: int, finish: Finish) -> list[bytes]:
        """One chunk with a finish reason for each of the prompt's sequences."""

    def usage_chunk(self) -> bytes | None:
        """The last one, if it was asked for."""


async def generate(
    exchange: Exchange,
    dispatcher: Dispatcher,
    calls: Sequence[GenerateCall],
    answer: Answer,
) -> None:
    """Answers, unary or as a stream, once all prompts are admitted.

    Raises what ends the first of them that fails, and ends the others.
    """
    jobs = make_jobs(exchange, dispatcher, calls)
    deadline, several = exchange.deadline, len(jobs) > 1
    if not calls[0].streams:
        await _each(
            _named(_whole(dispatcher, job, deadline, answer, at), at, several)
            for at, job in enumerate(jobs)
        )
        await exchange.reply(200, answer.encode())
        return
    start = _Start(exchange, len(jobs))
    await _each(
        _named(_stream(dispatcher, job, deadline, answer, at, start), at, several)
        for at, job in enumerate(jobs)
    )
    usage = answer.usage_chunk()
    if usage is not None:
        await exchange.event(usage)
    await exchange.close_events()


def make_jobs(
    exchange: Exchange, dispatcher: Dispatcher, calls: Sequence[GenerateCall]
) -> list[Job]:
    """Raises what validate() does."""
    limits = dispatcher.limits()
    several = len(calls) > 1
    if several and calls[0].request_id is not None:
        calls = [replace(call, request_id=f"{call.request_id}-{i}") for i, call in enumerate(calls)]
    default_id = exchange.request_id
    # One x-request-id may cover several calls; their own ids must differ.
    if several or dispatcher.is_in_flight(default_id):
        default_id = f"{default_id[:100]}-{secrets.token_hex(8)}"
    jobs = []
    for place, call in enumerate(calls):
        with _naming(place, several):
            own_id = f"{default_id}-{place}" if several else default_id
            jobs.append(validate(call, limits, own_id, exchange.tenant))
    return jobs


@contextmanager
def _naming(place: int, several: bool) -> Iterator[None]:
    """Says which prompt an error is about."""
    try:
        yield
    except InvalidRequest as error:
        if several and error.field in (TextPrompt.field, IdsPrompt.field):
            raise InvalidRequest(f"prompt[{place}]", error.message) from None
        raise


async def _named(work: Coroutine[Any, Any, None], place: int, several: bool) -> None:
    with _naming(place, several):
        await work


async def _whole(
    dispatcher: Dispatcher, job: Job, deadline: float | None, answer: Answer, place: int
) -> None:
    async with Generation(dispatcher, job, deadline) as generation:
        answer.begin(place, generation.prompt_ids)
        outputs, finish = await generation.whole()
    await answer.whole(place, outputs, finish)


async def _stream(
    dispatcher: Dispatcher,
    job: Job,
    deadline: float | None,
    answer: Answer,
    place: int,
    start: _Start,
) -> None:
    exchange = start.exchange
    async with Generation(dispatcher, job, deadline) as generation:
        answer.begin(place, generation.prompt_ids)
        await start.ready()
        async for item in generation:
            assert isinstance(item, Delta)
            # While this waits for a slow client, the outbox merges what comes.
            await exchange.event(await answer.chunk(place, item))
        assert generation.finish is not None
        for chunk in answer.ends(place, generation.finish):
            await exchange.event(chunk)


class _Start:
    """Until every prompt is admitted, a failure is an answer with a status of its own."""

    def __init__(self, exchange: Exchange, num_prompts: int) -> None:
        self.exchange = exchange
        self._missing = num_prompts
        self._all = asyncio.Event()

    async def ready(self) -> None:
        self._missing -= 1
        if not self._missing:
            await self.exchange.open_events()
            self._all.set()
        await self._all.wait()


async def _each(work: Iterable[Coroutine[Any, Any, None]]) -> None:
    """All of it at the same time, in this task where it is one. Raises the first failure."""
    first, *others = work
    if not others:
        await first
        return
    try:
        async with asyncio.TaskGroup() as group:
            for coroutine in (first, *others):
                group.create_task(coroutine)
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from None
