"""Who cannot get a first token before its deadline any more, whatever is done.

The estimate is the least that was measured, never what is likely: a request is
given up only if it would be late even if it started now, alone, at the best
speed that the device has shown lately.
"""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

from engine_core.request import Status
from engine_core.sched.queue import RequestHeap

if TYPE_CHECKING:
    from collections.abc import Callable

    from engine_core.request import Request

WINDOW = 64
"""Steps of a size after which the oldest measurements of that size are forgotten."""
MIN_STEPS = 4
"""Steps of a size that must be measured before it counts: the first are slow."""
MIN_RECHECK_S = 0.05
RECHECK_SHARE = 1 / 8
"""A request is looked at again after this share of the time that it has left,
because speed and prefix cache may have changed."""


class _SizeClass:
    """The fastest of the last WINDOW to 2 * WINDOW steps of about one size."""

    __slots__ = ("_before", "_now", "_num_steps", "fastest_s", "settled")

    def __init__(self) -> None:
        self._before = self._now = inf
        self._num_steps = 0
        self.fastest_s = inf
        self.settled = False

    def observe(self, step_s: float) -> None:
        if self._num_steps == WINDOW:
            self._before, self._now, self._num_steps = self._now, inf, 0
        self._num_steps += 1
        self._now = min(self._now, step_s)
        self.fastest_s = min(self._before, self._now)
        self.settled |= self._num_steps >= MIN_STEPS


class SpeedEstimate:
    """Lower bounds on the time that prefills take, from steps that were measured.

    Steps are sorted by size into (2^(i-1), 2^i] tokens. That a step costs no less
    than a smaller one is all that is assumed: n tokens take as many full steps as
    the largest chunk makes of them, each at least as long as the fastest measured
    step of the nearest class that holds no larger steps.
    """

    def __init__(self, max_num_batched_tokens: int, max_chunk: int) -> None:
        """max_chunk: most tokens that one prompt gets in a step."""
        self._max_chunk = max_chunk
        self._max_tokens = max_num_batched_tokens
        self._classes = [_SizeClass() for _ in range((max_num_batched_tokens - 1).bit_length() + 1)]

    def observe(self, num_tokens: int, step_s: float) -> None:
        """A step of num_tokens > 0 took step_s seconds from plan to result."""
        self._classes[(num_tokens - 1).bit_length()].observe(step_s)

    def first_token_s(self, num_tokens: int) -> float:
        """Seconds that pass at least until num_tokens > 0 are computed."""
        num_full, rest = divmod(num_tokens, self._max_chunk)
        seconds = num_full * self._step_s(self._max_chunk) if num_full else 0.0
        return seconds + self._step_s(rest) if rest else seconds

    def _step_s(self, num_tokens: int) -> float:
        bound = 0.0
        for index, size in enumerate(self._classes):
            # No step is larger than the budget, so the last class ends there.
            if min(1 << index, self._max_tokens) > num_tokens:
                break
            if size.settled:
                bound = max(bound, size.fastest_s)
        return bound


class DeadlineWatch:
    """Requests with a deadline, by when they have to be looked at next.

    All operations are O(log n), but for prefix lookups when it is getting late.
    """

    def __init__(self, speed: SpeedEstimate, count_uncached: Callable[[Request], int]) -> None:
        """count_uncached: tokens that a waiting request would have to compute."""
        self._speed = speed
        self._count_uncached = count_uncached
        self._heap = RequestHeap()

    def __len__(self) -> int:
        return len(self._heap)

    def watch(self, request: Request, now: float) -> None:
        """A request without a deadline is fine, and not watched."""
        if request.deadline_at is not None:
            self._push(request, now)

    def forget(self, request: Request) -> None:
        """Idempotent."""
        self._heap.discard(request)

    def next_late(self, now: float) -> Request | None:
        """One that is late or bound to be; it is watched until it is forgotten. None
        when there is no other."""
        while self._heap and self._heap.peek_key()[0] <= now:
            request = self._heap.peek()
            if self._give_up_at(request, now) <= now:
                return request
            self._heap.remove(request)
            self._push(request, now)
        return None

    def _push(self, request: Request, now: float) -> None:
        assert request.deadline_at is not None
        again = now + max(MIN_RECHECK_S, RECHECK_SHARE * (request.deadline_at - now))
        look_at = min(again, self._give_up_at(request, now))
        self._heap.push(request, (look_at, request.arrival_index))

    def _give_up_at(self, request: Request, now: float) -> float:
        """The last moment at which a start would do, or an earlier one that is
        still to come."""
        deadline_at = request.deadline_at
        assert deadline_at is not None
        # One that was admitted before goes on to the deadline itself.
        if request.status is not Status.WAITING:
            return deadline_at
        give_up_at = deadline_at - self._speed.first_token_s(request.num_tokens)
        if give_up_at <= now < deadline_at:
            # The prefix cache may save it.
            give_up_at = deadline_at - self._speed.first_token_s(self._count_uncached(request))
        return give_up_at
