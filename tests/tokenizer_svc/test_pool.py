"""What a pool does when its workers are busy, dying or cannot come back."""

from __future__ import annotations

import asyncio
import signal
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import psutil
import pytest

from pagewire.errors import ModelLoadError, QueueFull, Unavailable
from tokenizer_svc import pool as pool_module
from tokenizer_svc.messages import Encode, Load, StepDone, encode_frame, unpack_ids
from tokenizer_svc.pool import WorkerPool

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path

    from tokenizer_svc.loader import LoadedTokenizer


@asynccontextmanager
async def running_pool(
    path: Path, num_workers: int = 1, max_waiting_bytes: int = 1 << 20
) -> AsyncIterator[WorkerPool]:
    load = Load(str(path), None, "warning", "text")
    pool = WorkerPool(load, num_workers, max_waiting_bytes=max_waiting_bytes)
    try:
        await pool.connect()
        yield pool
    finally:
        for process_id in pool.process_ids:
            if psutil.pid_exists(process_id):
                psutil.Process(process_id).send_signal(signal.SIGCONT)
        await pool.close()


def text(content: str) -> Callable[[int], Encode]:
    return lambda call: Encode(call, content, True)


def kill(process_id: int, number: signal.Signals = signal.SIGKILL) -> None:
    psutil.Process(process_id).send_signal(number)


async def test_too_much_waiting_text_is_refused(embedded_gguf: Path) -> None:
    async with running_pool(embedded_gguf, max_waiting_bytes=100) as pool:
        kill(pool.process_ids[0], signal.SIGSTOP)
        waiting = asyncio.ensure_future(pool.call(text("alpha"), 1000))  # alone: never refused
        await asyncio.sleep(0)
        with pytest.raises(QueueFull) as raised:
            await pool.call(text("alpha"), 1)
        assert raised.value.queue_depth == 1
        kill(pool.process_ids[0], signal.SIGCONT)
        assert list(unpack_ids((await waiting).token_ids)) == [13433]
        assert (await pool.call(text("alpha"), 1)).token_ids


async def test_a_call_that_outlives_two_workers_fails(embedded_gguf: Path) -> None:
    async with running_pool(embedded_gguf, num_workers=2) as pool:
        deaths: asyncio.Queue[None] = asyncio.Queue()
        pool.on_change = lambda live: deaths.put_nowait(None)
        first, second = pool.process_ids
        for process_id in (first, second):
            kill(process_id, signal.SIGSTOP)
        call = asyncio.ensure_future(pool.call(text("alpha"), 5))
        await asyncio.sleep(0)
        kill(first)
        await deaths.get()
        kill(second)
        with pytest.raises(Unavailable) as raised:
            await call
        assert raised.value.reason == "tokenizer_dead"


async def test_a_cancelled_call_is_forgotten(embedded_gguf: Path) -> None:
    async with running_pool(embedded_gguf) as pool:
        call = asyncio.ensure_future(pool.call(text("alpha"), 5))
        await asyncio.sleep(0)
        assert pool.num_calls == 1
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        assert (await pool.call(text("alpha"), 5)).token_ids
        assert pool.num_calls == 0


async def test_a_model_that_is_gone_when_a_worker_must_come_back(
    tmp_path: Path, embedded: LoadedTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_module, "LIVE_TIMEOUT", 0.5)
    embedded.tokenizer.save(str(tmp_path / "tokenizer.json"))
    async with running_pool(tmp_path) as pool:
        changes: asyncio.Queue[bool] = asyncio.Queue()
        pool.on_change = changes.put_nowait
        (tmp_path / "tokenizer.json").rename(tmp_path / "away")
        kill(pool.process_ids[0])
        assert await changes.get() is False
        with pytest.raises(Unavailable) as raised:
            await pool.call(text("alpha"), 5)
        assert raised.value.reason == "tokenizer_dead"
        (tmp_path / "away").rename(tmp_path / "tokenizer.json")
        # Tried again and again, with growing pauses.
        assert await asyncio.wait_for(changes.get(), 30) is True
        assert (await pool.call(text("alpha"), 5)).token_ids


async def test_a_model_that_cannot_be_loaded(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"tokenizer\.json: missing"):
        async with running_pool(tmp_path):
            pass


async def test_a_worker_with_many_steps_ahead_of_a_ping_does_not_hang(embedded_gguf: Path) -> None:
    async with running_pool(embedded_gguf) as pool:
        (worker,) = pool._workers
        kill(worker.process.pid, signal.SIGSTOP)
        assert [worker.ping() for _ in range(4)] == [0, 1, 2, 3]
        worker.data_received(bytes(encode_frame(StepDone(1, [], [], [], []))))
        assert [worker.ping() for _ in range(4)] == [1, 2, 3, 4]
