"""The tokenizer's processes are killed while streams run: no byte of any of them changes.

The engine is a fake that says what it is told, over real frontend and tokenizer processes.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from typing import TYPE_CHECKING, Any

import msgspec
import psutil
import pytest

from pagewire.config import EMBEDDED_MODEL
from pagewire.model_source import resolve_model
from pagewire.types import FinishReason
from pagewire.v1 import common_pb2
from pagewire.wire.codec import pack_ids
from pagewire.wire.messages import Beam
from tests.frontend.conftest import Collected, Stack
from tests.frontend.test_tool_calls import chat, tool
from tests.support.fake_engine import FakeEngine
from tests.tokenizer_svc.service import Service
from tokenizer_svc.loader import load_tokenizer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator
    from pathlib import Path

    from pagewire.wire.messages import Ready
    from tests.support.fake_engine import FakeRequest
    from tokenizer_svc.loader import LoadedTokenizer

pytestmark = pytest.mark.timeout(300)

EOS = 2
BEAMS_END = 30
RESTART_S = 60.0
"""A worker that follows several that died soon is started 10 s later, and then has to load."""
# Four-byte characters are several tokens each, and so is the woman with the laptop.
TEXT = "héllo 世界 👩🏽‍💻 naïve — 🜁🜂 e\u0301 ᚠᚢᚦ the quick 🦊 jumps over 🐕‍🦺, "
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "北京 🌧"}}\n</tool_call>'


class ScriptedEngine(FakeEngine):
    """Every request's tokens are those of one text, for ever or up to the end of it."""

    def __init__(self, loaded: LoadedTokenizer) -> None:
        super().__init__(auto=False, next_token=self._next)
        self._vocab_size = loaded.vocab_size
        self._encode = lambda text: loaded.tokenizer.encode(text, add_special_tokens=False).ids
        self.text_ids = self._encode(TEXT * 3)
        self._call_ids = [*self._encode(CALL), EOS]

    def ready(self) -> Ready:
        return msgspec.structs.replace(
            super().ready(), vocab_size=self._vocab_size, eos_token_ids=(EOS,)
        )

    def _next(self, request: FakeRequest) -> int:
        if request.add.cache_salt == "call":
            return int(self._call_ids[len(request.output)])
        # Each of several sequences says it from another place on.
        start = 7 * request.add.sample_index + len(request.output)
        return int(self.text_ids[start % len(self.text_ids)])


class RealTokenizer:
    """Takes a fake's place in a Stack."""

    def __init__(self, path: Path, *flags: str) -> None:
        self._flags = ("--tokenizer-bind", f"unix:{path}", *flags)
        self.address = f"unix:{path}"
        self._stack = contextlib.ExitStack()

    async def start(self) -> None:
        self.service = await asyncio.to_thread(
            lambda: self._stack.enter_context(Service(*self._flags))
        )

    async def close(self) -> None:
        await asyncio.to_thread(self._stack.close)

    def workers(self) -> list[psutil.Process]:
        return self.service.workers()


@pytest.fixture(scope="module")
def loaded() -> LoadedTokenizer:
    return load_tokenizer(resolve_model(EMBEDDED_MODEL).path)


@pytest.fixture
def engine(loaded: LoadedTokenizer) -> Iterator[ScriptedEngine]:
    yield ScriptedEngine(loaded)


@pytest.fixture
async def stack(engine: ScriptedEngine, tmp_path: Path) -> AsyncIterator[Stack]:
    template = tmp_path / "template.jinja"
    template.write_text("{{ tools | tojson }}{% for m in messages %}{{ m.content }}{% endfor %}")
    flags = (
        *("--tokenizer-workers", "2", "--tool-call-parser", "hermes"),
        *("--chat-template", str(template)),
        *("--tokenizer-hang-timeout", "2"),
    )
    tokenizer: Any = RealTokenizer(tmp_path / "tokenizer", *flags)
    stack = Stack(engine, tokenizer)
    try:
        await stack.start()
        yield stack
    finally:
        await stack.close()


def jobs() -> list[dict[str, Any]]:
    """What is asked, each in another way of being cut in two."""

    def ids(**fields: Any) -> dict[str, Any]:
        return {
            "prompt_token_ids": common_pb2.TokenIds(ids=[1, 2, 3]),
            "return_token_ids": True,
            **fields,
        }

    def sampling(**fields: Any) -> common_pb2.SamplingParams:
        return common_pb2.SamplingParams(**{"max_tokens": 90, "ignore_eos": True, **fields})

    return [
        ids(sampling_params=sampling()),
        # Held back for long, and never completed.
        ids(sampling_params=sampling(stop=["🦊 jumps over 🐕‍🦺, hello"])),
        # Over several characters of several tokens.
        ids(sampling_params=sampling(stop=["nothing", "ᚢᚦ the quick 🦊 j"])),
        ids(sampling_params=sampling(stop=["界 👩🏽‍💻 n"], include_stop_str_in_output=True)),
        ids(sampling_params=sampling(n=3, max_tokens=60)),
        ids(sampling_params=sampling(logprobs=2, max_tokens=70)),
        ids(sampling_params=sampling(), echo=False, cache_salt="plain"),
        {
            "chat": chat(tool()),
            "sampling_params": sampling(stop_token_ids=[EOS]),
            "cache_salt": "call",
        },
        ids(sampling_params=sampling(beam_search=common_pb2.BeamSearch(beam_width=2), n=2)),
    ]


def in_short(collected: Collected) -> dict[str, Any]:
    """All that a client can see but for how it was cut into frames, and times."""
    seen: dict[str, Any] = {}
    for delta in collected.deltas:
        text, ids, logprobs, calls = seen.setdefault(delta.index, ["", [], [], ["", ""]])
        seen[delta.index] = [
            text + delta.text,
            ids + list(delta.token_ids),
            logprobs + [str(position) for position in delta.logprobs],
            [
                calls[0] + "".join(call.name for call in delta.tool_calls),
                calls[1] + "".join(call.arguments for call in delta.tool_calls),
            ],
        ]
    seen["outputs"] = [str(output) for output in collected.final.outputs]
    seen["usage"] = str(collected.final.usage)
    return seen


class Run:
    """All jobs at once, stepped by hand."""

    def __init__(self, stack: Stack, engine: ScriptedEngine) -> None:
        self._stack = stack
        self._engine = engine
        self._text_stream = stack.frontend.dispatcher.text_stream

    async def all(self, disturb: dict[int, Any]) -> list[dict[str, Any]]:
        """What each job's client saw; `disturb` are coroutine functions by step, called in
        place of it: they step themselves."""
        streams = [
            asyncio.ensure_future(self._stack.stream(deadline_s=120, **job)) for job in jobs()
        ]
        count = len(streams) + 2
        # The first chat waits for what renders it to be imported.
        await self._engine.wait_for(lambda: len(self._engine.running) >= count, RESTART_S)
        step = 0
        while self._engine.running or self._engine.waiting:
            if step in disturb:
                await disturb[step]()
            self.step(step)
            step += 1
            await self.caught_up()
        return [in_short(collected) for collected in await asyncio.gather(*streams)]

    def step(self, number: int) -> None:
        for request in list(self._engine.running.values()):
            if request.add.sampling.beam is None:
                continue
            if number == BEAMS_END:
                beams = [self._engine.text_ids[at : at + 25] for at in (0, 5)]
                self._engine.end_search(
                    request.id,
                    *(Beam(pack_ids(b), -i / 8, FinishReason.LENGTH) for i, b in enumerate(beams)),
                )
        running = self._engine.running.values()
        rows = {r.id: [self._engine.next_token(r)] for r in running if not r.add.sampling.beam}
        self._engine.emit(rows)

    async def caught_up(self) -> None:
        """Until the frontend knows the step and the tokenizer has answered, if it is there."""
        await self._until(lambda: self._stack.engine_client.last_step == self._engine.step_number)
        await self._until(lambda: not self._text_stream.num_waiting)

    async def _until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(RESTART_S):
            while not condition():  # noqa: ASYNC110
                await asyncio.sleep(0.002)

    async def kill_a_worker(self, index: int, step: int) -> None:
        """With steps on their way to it that it has not read."""
        tokenizer: Any = self._stack.tokenizer
        workers = tokenizer.workers()
        victim = workers[index % len(workers)]
        victim.send_signal(signal.SIGSTOP)
        num_sent = self._text_stream._number
        self.step(step)
        # One that has just been started has no part in it, and the answer comes at once.
        await self._until(lambda: self._text_stream._number > num_sent)
        self.step(-1)
        # On a slow machine it may have been taken for one that hangs.
        with contextlib.suppress(psutil.NoSuchProcess):
            victim.send_signal(signal.SIGKILL)

    async def hang_a_worker(self) -> None:
        """It lives, and answers no more."""
        tokenizer: Any = self._stack.tokenizer
        victim = tokenizer.workers()[0]
        victim.send_signal(signal.SIGSTOP)
        self.step(-1)
        await self._until(lambda: victim.pid not in {it.pid for it in tokenizer.workers()})

    async def kill_the_service(self) -> None:
        """And start it again, while the engine goes on."""
        tokenizer: Any = self._stack.tokenizer
        tokenizer.service.process.kill()
        await asyncio.to_thread(tokenizer.service.process.wait)
        await self._until(lambda: not self._text_stream.up)
        for _ in range(3):
            self.step(-1)
        await tokenizer.start()
        await self._until(lambda: self._text_stream.up)


async def test_no_byte_changes(stack: Stack, engine: ScriptedEngine) -> None:
    run = Run(stack, engine)
    undisturbed = await run.all({})
    texts = [seen.get(0, [""])[0] for seen in undisturbed]
    assert texts[0].startswith("héllo 世界 👩🏽‍💻 naïve")
    assert texts[2].endswith("🜁🜂 e\u0301 ᚠ")
    assert texts[3].endswith("世界 👩🏽‍💻 n")
    assert undisturbed[7][0][3] == ["weather", '{"city": "北京 🌧"}']
    # Each kill comes with two steps of its own, so the last three fall on the ends of the
    # beams and of those with 60 and 90 tokens. A worker's start takes longer than a step:
    # some find one worker only.
    kills = {
        step: lambda index=index, step=step: run.kill_a_worker(index, step)
        for index, step in enumerate((4, 20, 21, BEAMS_END, 51, 79))
    }
    assert await run.all(kills) == undisturbed
    assert await run.all({11: run.kill_the_service, 33: run.kill_the_service}) == undisturbed
    # By the two that met their stop strings, in each run.
    assert len(engine.aborted) == 2 * 3
    assert stack.frontend.dispatcher.admission.requests == 0


async def test_a_worker_that_hangs_costs_no_byte(
    stack: Stack, engine: ScriptedEngine, loaded: LoadedTokenizer
) -> None:
    num_tokens = 30
    streams = [
        asyncio.ensure_future(
            stack.stream(
                prompt_token_ids=common_pb2.TokenIds(ids=[1, 2, 3]),
                sampling_params=common_pb2.SamplingParams(max_tokens=num_tokens, ignore_eos=True),
                deadline_s=120,
            )
        )
        for _ in range(4)
    ]
    await engine.wait_running(len(streams))
    run = Run(stack, engine)
    for step in range(num_tokens - 1):
        if step == 10:
            await run.hang_a_worker()
        run.step(step)
        await run.caught_up()
    text = loaded.tokenizer.decode(engine.text_ids[:num_tokens], skip_special_tokens=True)
    for collected in await asyncio.gather(*streams):
        assert "".join(delta.text for delta in collected.deltas) == text
