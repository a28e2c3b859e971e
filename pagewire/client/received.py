"""What a stream has brought, and how it goes on after a lost connection. No I/O."""

from __future__ import annotations

import random
import time
from typing import TYPE_CHECKING, Any

from pagewire.client.convert import resume_request, to_dict
from pagewire.client.errors import AlreadyExists, NotFound

if TYPE_CHECKING:
    from collections.abc import Callable

    from pagewire.client.errors import CallFailed
    from pagewire.v1 import inference_pb2

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 2.0


class Received:
    """Of one sequence."""

    def __init__(self) -> None:
        self.num_chars = 0
        """Unicode code points of text."""
        self.final: dict[str, Any] | None = None
        self.tool_calls: list[dict[str, Any]] = []

    def take(self, response: inference_pb2.GenerateStreamResponse) -> str:
        """The new text of a frame, which may be empty."""
        if response.WhichOneof("frame") == "final":
            self.final = to_dict(response.final)
        # One that came just before a connection was lost may come again.
        known = {call["id"] for call in self.tool_calls}
        calls = response.delta.tool_calls
        self.tool_calls += [to_dict(call) for call in calls if call.id not in known]
        text: str = response.delta.text
        self.num_chars += len(text)
        return text


class Resumption:
    """What to ask next, over at most `attempts` failures in a row; frames end a row.

    `timeout` is in seconds and for all calls together. `id_is_ours` says that nobody else can
    have a request of this id.
    """

    def __init__(
        self,
        request: inference_pb2.GenerateStreamRequest,
        received: Received,
        timeout: float | None,
        attempts: int,
        *,
        id_is_ours: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.next = request
        """The request of the call that is to be made."""
        self._request = request
        self._received = received
        self._clock = clock
        self._deadline = None if timeout is None else clock() + timeout
        self._attempts = attempts
        self._id_is_ours = id_is_ours
        self._failures = 0
        self._heard = False

    @property
    def request_id(self) -> str:
        return self._request.request_id

    def timeout(self) -> float | None:
        """What is left, in seconds; not positive once it is over."""
        return None if self._deadline is None else self._deadline - self._clock()

    def heard(self) -> None:
        """A frame came."""
        self._heard = True
        self._failures = 0

    def after(self, failure: CallFailed) -> float:
        """How long to wait before the call that `next` is now for, in seconds. Raises
        `failure` where it is meant."""
        if self._failures >= self._attempts or not self._can_go_on(failure):
            raise failure
        pause = 0.0
        if self._failures:
            longest = min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2**self._failures)
            pause = longest * random.uniform(0.5, 1.0)  # noqa: S311  # no secret
        self._failures += 1
        return pause

    def _can_go_on(self, failure: CallFailed) -> bool:
        starting = self.next is self._request
        # gRPC may have sent it before, and lost the answer; an id that was made up here is
        # no other request's.
        was_there = starting and self._id_is_ours and isinstance(failure, AlreadyExists)
        if failure.lost or was_there:
            self.next = resume_request(self.request_id, self._received.num_chars)
            return True
        if isinstance(failure, NotFound) and not starting and not self._heard:
            # The server never got it.
            self.next = self._request
            return True
        return False
