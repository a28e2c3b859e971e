"""Keeps one process of ours running. Knows nothing of Ray."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

from pagewire.obs.ready import read_ready_file
from pagewire.settings import ENV_PREFIX

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

_MAX_BACKOFF_S = 30.0
_STEADY_S = 5.0
"""A process that served for so long does start: it is not made to wait for its next start."""
_PERMANENT = frozenset({2, 3})
"""A wrong setting, a model that cannot be loaded."""
# The process must not outlive the actor, whose successor wants its port: the kernel kills it
# with the thread that started it (prctl 1 is PR_SET_PDEATHSIG). Not as a preexec_fn: an actor
# has many threads, and Python code between fork and exec can deadlock there.
_BOUND_TO_PARENT = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)
if os.getppid() != int(sys.argv[1]):
    sys.exit(1)
os.execv(sys.executable, [sys.executable, *sys.argv[2:]])
"""


class Supervisor:
    """Starts `python -m MODULE FLAGS...` and starts it again when it ends.

    `flags` is asked before every start; `--ready-file` is added. A first process that ends with
    status 2 or 3 is not started again, unless `proven` says that this configuration did serve.
    """

    def __init__(
        self,
        module: str,
        flags: Callable[[], list[str]],
        ready_file: Path,
        *,
        proven: bool = False,
    ) -> None:
        self.module = module
        self._flags = flags
        self.ready_file = ready_file
        self._proven = proven
        self._process: subprocess.Popen[bytes] | None = None
        self.status: int | None = None
        """Of a process that is not started again."""
        self._stopping = threading.Event()
        self._renewing = False
        # It lives as long as this process, and so does what it starts.
        self._thread = threading.Thread(target=self._run, name=module, daemon=True)
        self._thread.start()

    def facts(self) -> dict[str, Any] | None:
        """What the ready file says, or None while the room does not serve."""
        return None if self.status is not None else read_ready_file(self.ready_file)

    def renew(self) -> None:
        """SIGTERM, and a start with the flags of then once the process has drained."""
        self._renewing = True
        self._signal(signal.SIGTERM)

    def stop(self, patience_s: float) -> int | None:
        """SIGTERM, and after `patience_s` SIGKILL; gives the exit status."""
        self._stopping.set()
        self._signal(signal.SIGTERM)
        self._thread.join(patience_s)
        if self._thread.is_alive():
            self._signal(signal.SIGKILL)
            self._thread.join()
        return None if self._process is None else self._process.returncode

    def _signal(self, number: signal.Signals) -> None:
        # Popen knows whether the process has been waited for: no other gets its signal.
        if self._process is not None:
            self._process.send_signal(number)

    def _run(self) -> None:
        backoff = 0.0
        while not self._stopping.is_set():
            self._start()
            assert self._process is not None
            status = self._process.wait()
            served_s = self._served_s()
            self._proven = self._proven or served_s > 0
            if self._stopping.is_set():
                return
            if status in _PERMANENT and not self._proven:
                self.status = status
                return
            if served_s > _STEADY_S or self._renewing:
                backoff = 0.0
            self._renewing = False
            sys.stderr.write(
                f"{self.module} ended with status {status}; starting it again in {backoff:g} s\n"
            )
            self._stopping.wait(backoff)
            backoff = min(max(1.0, backoff * 2), _MAX_BACKOFF_S)

    def _start(self) -> None:
        self.ready_file.unlink(missing_ok=True)
        environment = {k: v for k, v in os.environ.items() if not k.upper().startswith(ENV_PREFIX)}
        room = ["-P", "-m", self.module, *self._flags(), f"--ready-file={self.ready_file}"]
        self._process = subprocess.Popen(  # noqa: S603 - a room of ours, with checked settings
            [sys.executable, "-P", "-c", _BOUND_TO_PARENT, str(os.getpid()), *room],
            env=environment,
            stdin=subprocess.DEVNULL,
        )

    def _served_s(self) -> float:
        try:
            return time.time() - self.ready_file.stat().st_mtime
        except FileNotFoundError:
            return 0.0
