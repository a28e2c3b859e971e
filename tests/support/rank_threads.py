"""The ranks of one engine as threads of this process: real collectives (gloo over loopback)
and real pipes, without a process and an import of torch for each."""

from __future__ import annotations

import os
import threading
from types import SimpleNamespace
from typing import IO, TYPE_CHECKING, Any, Self

import torch
from torch.distributed import HashStore

from engine_core.parallel.group import RankGroup, open_collectives
from engine_core.parallel.leader import LeadingRunner
from engine_core.parallel.worker import follow
from engine_core.runner.kv_caches import allocate_kv_caches
from engine_core.runner.model_runner import ModelRunner
from engine_core.runner.offload import HostKV
from tests.parity.harness import MAX_SAMPLED, Engine, Loaded, load

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

_PATIENCE_S = 120.0


class RankThreads:
    """A model divided among `size` ranks. options are those of harness.load.

    Use it as a context manager. A rank that failed fails the test when it ends.
    """

    def __init__(self, path: str, size: int, **options: Any) -> None:
        self.size = size
        self._errors: list[BaseException] = []
        self._jobs: list[list[Callable[[Loaded], None] | None]] = [[] for _ in range(size)]
        self._wake = [threading.Semaphore(0) for _ in range(size)]
        self._loaded: list[Loaded | None] = [None] * size
        self._groups: list[RankGroup | None] = [None] * size
        self._ready = threading.Barrier(size, timeout=_PATIENCE_S)
        store = HashStore()

        def run(rank: int) -> None:
            try:
                collectives = open_collectives(store, rank, size, torch.device("cpu"))
                group = self._groups[rank] = RankGroup(collectives, rank, size, is_ordered=True)
                loaded = self._loaded[rank] = load(path, group=group, **options)
                self._ready.wait()
                while rank:
                    assert self._wake[rank].acquire(timeout=_PATIENCE_S)
                    job = self._jobs[rank].pop(0)
                    if job is None:
                        return
                    job(loaded)
            except BaseException as error:  # raised where the test is
                self._errors.append(error)
                self._ready.abort()

        self._threads = [
            threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)
        ]
        for thread in self._threads:
            thread.start()
        self._threads[0].join(_PATIENCE_S)
        self._raise()

    @property
    def first(self) -> Loaded:
        return self.loaded(0)

    def loaded(self, rank: int) -> Loaded:
        loaded = self._loaded[rank]
        assert loaded is not None
        return loaded

    def on_others(self, job: Callable[[Loaded], None]) -> None:
        """Runs it in the threads of all ranks but the first, once each is free."""
        for rank in range(1, self.size):
            self._jobs[rank].append(job)
            self._wake[rank].release()

    def engine(self, **options: Any) -> RanksEngine:
        """options are those of harness.Engine."""
        return RanksEngine(self, options)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for rank in range(1, self.size):
            self._jobs[rank].append(None)
            self._wake[rank].release()
        for thread in self._threads:
            # Ranks that the first has left alone wait in a collective for ever.
            thread.join(_PATIENCE_S if error is None else 0.1)
        if error is None:
            assert not any(thread.is_alive() for thread in self._threads), "a rank goes on"
            self._raise()
            for group in self._groups:
                assert group is not None
                group.close()

    def _raise(self) -> None:
        if self._errors:
            raise self._errors[0]


class RanksEngine:
    """A harness.Engine on rank 0, and runners that follow it. A context manager: at the end
    the others have run all plans."""

    def __init__(self, ranks: RankThreads, options: dict[str, Any]) -> None:
        self._pipes: list[IO[bytes]] = []
        sizes = {
            "max_num_seqs": options.get("max_num_seqs", 32),
            "max_num_batched_tokens": options.get("max_num_batched_tokens", 512),
        }
        max_sampled = max(sizes["max_num_seqs"], MAX_SAMPLED)
        block_size, num_blocks = options.get("block_size", 16), options.get("num_blocks", 400)
        readers: list[IO[bytes]] = []
        for _ in range(1, ranks.size):
            reading, writing = os.pipe()
            readers.append(os.fdopen(reading, "rb"))
            self._pipes.append(os.fdopen(writing, "wb"))
        num_host_blocks = options.get("num_host_blocks", 0)
        lock = threading.Lock()

        def run(loaded: Loaded) -> None:
            kv_dtype = loaded.kv_dtype or loaded.dtype
            kv_caches = allocate_kv_caches(
                loaded.model, loaded.device, num_blocks, block_size, kv_dtype
            )
            host_kv = None
            if num_host_blocks:
                host_kv = HostKV(loaded.device, kv_caches, num_host_blocks)
            runner = ModelRunner(
                loaded.model,
                loaded.ops,
                loaded.device,
                kv_caches,
                max_model_len=loaded.max_model_len,
                host_kv=host_kv,
                max_sampled_tokens=max_sampled,
                **sizes,
            )
            with lock:
                plans = readers.pop()
            with plans:
                follow(SimpleNamespace(runner=runner), plans)  # type: ignore[arg-type]

        ranks.on_others(run)
        self.engine = Engine(
            ranks.first, lead=lambda runner: LeadingRunner(runner, self._pipes), **options
        )

    def __enter__(self) -> Engine:
        return self.engine

    def __exit__(self, *_error: object) -> None:
        for pipe in self._pipes:
            pipe.close()
