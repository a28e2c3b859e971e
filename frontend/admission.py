"""Who may enter: bounds on requests in flight and on queued prompt tokens.

A reservation is taken in one step before any work is done for the request, so
neither bound is ever overshot by concurrent arrivals (vllm-project/vllm#58192).
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Literal

from pagewire.errors import QueueFull

if TYPE_CHECKING:
    from collections.abc import Callable

RejectReason = Literal[
    "max_num_queued_reqs", "max_num_queued_tokens", "tenant_requests", "tenant_tokens"
]

_WINDOW = 64
_MIN_RETRY_S = 0.05
_MAX_RETRY_S = 60.0
_UNMEASURED_RETRY_S = 1.0
_STALE_S = 60.0


class CompletionRate:
    """How fast requests have ended lately."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._completions: deque[float] = deque(maxlen=_WINDOW)

    def note(self) -> None:
        self._completions.append(self._clock())

    def seconds_for(self, slots: int) -> float:
        """Until so many more will have ended."""
        now = self._clock()
        recent = [t for t in self._completions if now - t < _STALE_S]
        if len(recent) < 2 or now <= recent[0]:
            return _UNMEASURED_RETRY_S
        rate = len(recent) / (now - recent[0])
        return min(_MAX_RETRY_S, max(_MIN_RETRY_S, slots / rate))


class Reservation:
    """A request's share of the bounds. Tokens count until its first output."""

    __slots__ = ("_admission", "_held", "_tokens")

    def __init__(self, admission: Admission, tokens: int) -> None:
        self._admission = admission
        self._tokens = tokens
        self._held = True

    def correct(self, tokens: int) -> None:
        """Replaces the estimate by the real number of prompt tokens."""
        if self._held:
            self._admission.queued_tokens += tokens - self._tokens
            self._tokens = tokens

    def first_output(self) -> None:
        """The prompt no longer waits."""
        self.correct(0)

    def release(self, *, completed: bool = False) -> None:
        """Gives the share back; idempotent. `completed` feeds the measured rate."""
        if not self._held:
            return
        self.correct(0)
        self._held = False
        self._admission.requests -= 1
        if completed:
            self._admission.rate.note()


class Admission:
    def __init__(
        self,
        max_requests: int,
        max_queued_tokens: int,
        *,
        clock: Callable[[], float],
        on_reject: Callable[[RejectReason], None] = lambda _: None,
    ) -> None:
        self.requests = 0
        self.queued_tokens = 0
        self._max_requests = max_requests
        self._max_queued_tokens = max_queued_tokens
        self.rate = CompletionRate(clock)
        self._on_reject = on_reject

    def reserve(self, tokens: int) -> Reservation:
        """Takes a share for a request of about `tokens` prompt tokens.

        Raises QueueFull. A prompt larger than the token bound enters when
        nothing else waits, since otherwise it never could.
        """
        if self.requests >= self._max_requests:
            self._on_reject("max_num_queued_reqs")
            raise self._full(f"{self.requests} requests are in flight, the most this server takes")
        if self.queued_tokens and self.queued_tokens + tokens > self._max_queued_tokens:
            self._on_reject("max_num_queued_tokens")
            raise self._full(
                f"{self.queued_tokens} prompt tokens wait; with this prompt they "
                f"would exceed {self._max_queued_tokens}"
            )
        self.requests += 1
        self.queued_tokens += tokens
        return Reservation(self, tokens)

    def retry_after(self) -> float:
        """Seconds until a slot is likely free, from the rate of the last completions.

        Every caller that is turned away is told the time in which an eighth of the
        queue drains, so that they do not all come back for the first free slot.
        """
        return self.rate.seconds_for(max(1, self.requests // 8))

    def _full(self, message: str) -> QueueFull:
        return QueueFull(
            message,
            retry_after=self.retry_after(),
            queue_depth=self.requests,
            queued_tokens=self.queued_tokens,
        )
