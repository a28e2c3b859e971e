"""The processes of the ranks but the first, from their start to their end. No torch: they
load theirs while rank 0 loads its own."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from typing import IO, TYPE_CHECKING

from engine_core.parallel.messages import Start, encode_start, write_frame

if TYPE_CHECKING:
    from collections.abc import Callable

    from pagewire.config import EngineConfig

_log = logging.getLogger(__name__)

_PERMANENT = frozenset({2, 3})
"""Statuses of a process that cannot start as it is configured."""
_GRACE_S = 5.0
"""Between a rank's end and ours, if a collective never returns; and for a rank to end."""


class RankProcesses:
    """Ranks 1 to config.tensor_parallel_size - 1, each waiting for start().

    If one ends, so must this process: until watch() is called it does at once, with the
    rank's status where that says that it cannot start; later it may take a few seconds.
    """

    def __init__(self, config: EngineConfig, module: str = "engine_core.parallel.worker") -> None:
        self.size = config.tensor_parallel_size
        self.config = config
        # A file without a name: it is gone with the last process that has it open.
        self.store_file = os.memfd_create("pagewire-ranks", 0)
        self._closing = threading.Event()
        self._lock = threading.Lock()
        self._lost: str | None = None
        self._has_started = False
        self._on_death: Callable[[str], None] | None = None
        self._processes = [_start(module, self.store_file) for _ in range(1, self.size)]
        self._threads = [
            threading.Thread(target=self._wait, args=(rank,), name=f"rank-{rank}", daemon=True)
            for rank in range(1, self.size)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def pipes(self) -> list[IO[bytes]]:
        """Of each, where its plans go."""
        return [_pipe(process) for process in self._processes]

    def start(self) -> None:
        """Tells each what it is to be."""
        self._has_started = True
        config = self.config.model_dump_json().encode()
        for rank, pipe in enumerate(self.pipes, 1):
            start = Start(config, rank, self.store_file, os.getpid())
            write_frame(pipe, encode_start(start))

    def watch(self, on_death: Callable[[str], None]) -> None:
        """on_death: told, from another thread, of the first rank that ended, in words."""
        with self._lock:
            self._on_death = on_death
            lost = self._lost
        if lost is not None:
            on_death(lost)

    def close(self) -> None:
        """Ends them all: between two steps they see that their pipe is closed. They are killed
        after a while, or at once where one is lost and others wait for it, or none has begun."""
        if self._closing.is_set():
            return
        self._closing.set()
        os.close(self.store_file)
        for process in self._processes:
            try:
                _pipe(process).close()
            except OSError:  # what was not yet written finds nobody
                _log.debug("the pipe of process %d is broken", process.pid)
        are_busy = self._has_started and self._lost is None
        deadline = time.monotonic() + (_GRACE_S if are_busy else 0.0)
        for process, thread in zip(self._processes, self._threads, strict=True):
            thread.join(max(0.0, deadline - time.monotonic()))
            if thread.is_alive():
                process.kill()
                thread.join()

    def _wait(self, rank: int) -> None:
        status = self._processes[rank - 1].wait()
        if self._closing.is_set():
            return
        how = f"status {status}" if status >= 0 else signal.Signals(-status).name
        told = f"rank {rank} of {self.size} ended with {how}, see its log"
        with self._lock:
            if self._lost is not None:
                return
            self._lost = told
            on_death = self._on_death
        _log.error("%s", told)
        if on_death is None:
            # The main thread reads weights, or waits for that rank and has no other way out.
            os._exit(status if status in _PERMANENT else 1)
        on_death(told)
        if not self._closing.wait(_GRACE_S):
            _log.error("a collective still waits for rank %d: the engine ends", rank)
            os._exit(1)


def _start(module: str, store_file: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen(  # noqa: S603  # our own interpreter and module
        # -P: a folder named kernels in the user's own directory is not ours.
        [sys.executable, "-P", "-m", module],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        pass_fds=(store_file,),
    )


def _pipe(process: subprocess.Popen[bytes]) -> IO[bytes]:
    assert process.stdin is not None
    return process.stdin
