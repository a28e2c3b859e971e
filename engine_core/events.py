"""What the input and output threads tell the loop, in order, through one queue."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pagewire.wire.messages import Abort, Add, LoadAdapter, ResetPrefixCache, UnloadAdapter


@dataclass(frozen=True, slots=True)
class Received:
    """A command from a frontend with a session."""

    frontend_id: int
    command: Add | Abort | ResetPrefixCache | LoadAdapter | UnloadAdapter
    received_at: float
    """Monotonic seconds."""


@dataclass(frozen=True, slots=True)
class Opened:
    """A session began: it has no requests, and Ready is on its way to it."""

    frontend_id: int


@dataclass(frozen=True, slots=True)
class Lost:
    """A session ended: nobody will read what its requests still produce."""

    frontend_id: int


@dataclass(frozen=True, slots=True)
class Stop:
    """The process is asked to end."""

    reason: str


@dataclass(frozen=True, slots=True)
class Crashed:
    """A thread of ours died, or a process that we cannot be without."""

    error: BaseException
    told: str = "a thread of the engine died, see its log"


@dataclass(frozen=True, slots=True)
class Woken:
    """Something outside of the queue has to be looked at."""


Event = Received | Opened | Lost | Stop | Crashed | Woken
