"""Wakes a thread that sleeps in poll()."""

from __future__ import annotations

import contextlib
import socket


class Doorbell:
    """ring() from any thread or signal handler; one thread polls fileno()."""

    def __init__(self) -> None:
        self._button, self._bell = socket.socketpair()
        self._button.setblocking(False)
        self._bell.setblocking(False)

    def fileno(self) -> int:
        return self._bell.fileno()

    def ring(self) -> None:
        # A full buffer means that it rings already; a closed one, that nobody sleeps.
        with contextlib.suppress(OSError):
            self._button.send(b"\0")

    def silence(self) -> None:
        """Call it before looking at what it announces, or a ring may be lost."""
        with contextlib.suppress(BlockingIOError):
            while len(self._bell.recv(4096)) == 4096:
                pass

    def close(self) -> None:
        self._button.close()
        self._bell.close()
