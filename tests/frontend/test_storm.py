"""Everything at once: engines that die, drain and give back, clients that come and go."""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING, Any

import grpc

from frontend.replay import _cleared
from pagewire.v1 import admin_pb2, common_pb2, inference_pb2
from tests.frontend.several_engines import SeveralEngines
from tests.frontend.test_replay import hashed, prompt, undisturbed
from tests.support.fake_engine import FakeEngine
from tests.support.fake_tokenizer import FakeTokenizer

if TYPE_CHECKING:
    from random import Random

    from frontend.request import RequestState

OPTIONS: dict[str, Any] = {"step_s": 0.003, "max_num_seqs": 8, "next_token": hashed}
NUM_CLIENTS = 40
LENGTH = 60
LOSS = 0.04
"""Of frames: they do not arrive, and the connection is gone."""


class Client:
    """Has all of its output in the end, each token once."""

    def __init__(self, stack: SeveralEngines, number: int, rng: Random) -> None:
        self._stack = stack
        self._number = number
        self._rng = rng
        self._ids: list[list[int]] = [[] for _ in range(rng.choice((1, 1, 2)))]
        self._text = [""] * len(self._ids)

    async def run(self) -> int:
        """The number of connections that it took."""
        call, count = self._start(), 1
        while not await self._reads_to_the_end(call):
            call.cancel()
            await asyncio.sleep(self._rng.choice((0.0, 0.05)))
            call, count = self._resume(), count + 1
        whole = undisturbed(prompt(self._number), LENGTH)
        for ids, text in zip(self._ids, self._text, strict=True):
            assert ids == whole
            assert text == bytes(whole).decode()
        return count

    async def _reads_to_the_end(self, call: Any) -> bool:
        while True:
            frame = await call.read()
            assert frame is not grpc.aio.EOF
            if frame.HasField("final"):
                assert frame.final.usage.completion_tokens == LENGTH * len(self._ids)
                return True
            if self._rng.random() < LOSS:
                return False
            if frame.HasField("delta"):
                self._ids[frame.delta.index] += frame.delta.token_ids
                self._text[frame.delta.index] += frame.delta.text

    def _start(self) -> Any:
        when_lost = self._rng.choice(("WHEN_LOST_RUN_ON", "WHEN_LOST_PAUSE"))
        return self._stack.open(
            prompt_token_ids=common_pb2.TokenIds(ids=prompt(self._number)),
            sampling_params=common_pb2.SamplingParams(max_tokens=LENGTH, n=len(self._ids)),
            return_token_ids=True,
            request_id=f"client-{self._number}",
            resumable=inference_pb2.ResumeOptions(when_lost=when_lost),
            report_queue=self._rng.random() < 0.3,
            deadline_s=60.0,
        )

    def _resume(self) -> Any:
        received = [
            inference_pb2.ReceivedSequence(index=index, num_tokens=len(ids))
            for index, ids in enumerate(self._ids)
        ]
        return self._stack.open(
            request_id=f"client-{self._number}",
            resume_from=inference_pb2.ResumePoint(sequences=received),
            deadline_s=60.0,
        )


def _is_well(state: RequestState) -> bool:
    return _cleared(state) or not (state.num_deaths or state.num_returns)


async def disturb(stack: SeveralEngines, rng: Random) -> None:
    while True:
        await asyncio.sleep(rng.random() * 0.2)
        index = rng.randrange(len(stack.engines))
        engine, link = stack.engines[index], stack.links[index]
        # Who is struck again before it has gone on is taken for the cause.
        await stack.until(lambda link=link: all(map(_is_well, link.live.values())))  # type: ignore[misc]
        what = rng.choice(("killed", "dead", "drained", "given back"))
        if what == "given back":
            for engine_id in list(engine.running)[:3]:
                engine.abort_now(engine_id)
            continue
        if what == "drained":
            request = admin_pb2.DrainRequest(engine=engine.address)
            assert (await stack.admin.Drain(request)).num_unfinished == 0
        elif what == "dead":
            engine.die()
        await stack.restart(index, **OPTIONS)


async def test_a_storm() -> None:
    rng = random.Random(5)
    engines = [FakeEngine(**OPTIONS) for _ in range(3)]
    stack = SeveralEngines(engines, FakeTokenizer(), resume_ttl=30.0)
    await stack.start()
    storm = asyncio.ensure_future(disturb(stack, rng))
    try:
        clients = [Client(stack, number, rng) for number in range(NUM_CLIENTS)]
        counts = await asyncio.gather(*[client.run() for client in clients])
        assert sum(counts) > 2 * NUM_CLIENTS
        assert not storm.done(), storm.exception()
        storm.cancel()
        await asyncio.gather(storm, return_exceptions=True)
        dispatcher = stack.frontend.dispatcher
        side = dispatcher.engine_side
        await stack.until(lambda: dispatcher.admission.requests == 0 and not side.aborted)
        assert (side.live, side.paused, side.replay.waiting) == ({}, {}, {})
        await stack.until(lambda: not any(stack.requests()))
        await stack.tokenizer.wait_for(lambda: not stack.tokenizer.sequences)
    finally:
        storm.cancel()
        await stack.close()
