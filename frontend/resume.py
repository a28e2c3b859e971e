"""Requests whose client may lose its connection, come back and get the rest.

    attached --connection lost--> parked --resume--> attached     nothing is repeated
       |                            +------ttl, deadline, Cancel--> ended, all is freed
       +--final frame written--> kept: for ttl, one that did not arrive can be had again

A parked request runs on or is paused as it asked. It stays admitted, so that parked
requests count against the bound on requests in flight; what is kept after the final
frame holds no place, and the oldest goes when there are too many. grpc.aio shows a
client's own cancel and a lost connection as the same thing, so both park.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from typing import TYPE_CHECKING

from frontend.auth import current_principal
from frontend.branches import branches_of
from frontend.generation import Generation
from frontend.request import WhenLost
from frontend.transcript import Transcript
from frontend.validate import check_request_id
from pagewire.errors import Cancelled, DeadlineExceeded, FeatureDisabled, InvalidRequest, NotFound

if TYPE_CHECKING:
    from collections.abc import Callable

    from frontend.dispatcher import Dispatcher
    from frontend.frame_writer import FrameWriter
    from frontend.request import Job, RequestState, ResumeCall
    from frontend.stream import Delta, Finish, Outbox, Queued

logger = logging.getLogger(__name__)


class Held:
    """A resumable request. `reader` is whoever may read it now."""

    def __init__(self, state: RequestState, transcript: Transcript, reader: Generation) -> None:
        self.state = state
        self.transcript = transcript
        self.reader: Generation | None = reader
        self.admitted = True
        """Until its outcome is settled and its place given back."""
        self.expiry: asyncio.TimerHandle | None = None
        """Runs while nobody reads."""
        self.deadline: asyncio.TimerHandle | None = None
        """Runs once the call whose deadline it is is gone."""


class Resumables:
    """`ttl` is in seconds; 0 switches it all off. At most `max_kept` are kept after
    their end."""

    def __init__(
        self, dispatcher: Dispatcher, ttl: float, max_kept: int, *, clock: Callable[[], float]
    ) -> None:
        self._dispatcher = dispatcher
        self._ttl = ttl
        self._max_kept = max_kept
        self._clock = clock
        self._held: dict[str, Held] = {}
        """By request id: attached, parked and kept."""
        self._kept: OrderedDict[str, Held] = OrderedDict()
        """Those that have ended, the one that ended first at the front."""

    def close(self) -> None:
        """Ends what is parked, as its outcome says or with the error it has."""
        for held in list(self._held.values()):
            if held.reader is None:
                self._end(held, held.state.error)

    def start(self, job: Job, deadline: float | None) -> Generation:
        """A new request. Raises FeatureDisabled."""
        self._check_on("resumable")
        return _Resumable(self, self._dispatcher, job, deadline)

    def resume(self, call: ResumeCall) -> Generation:
        """The rest of a request, for one reader. Raises FeatureDisabled or InvalidRequest;
        entering raises NotFound or InvalidRequest, and then nothing has changed."""
        self._check_on("resume_from")
        if not call.request_id:
            raise InvalidRequest("request_id", "request_id is not set: it says what to resume")
        check_request_id(call.request_id)
        return _Resumed(self, self._dispatcher, call)

    def cancel(self, request_id: str) -> None:
        """Ends any request, resumable or not, and forgets it. Raises NotFound for one that
        has ended and was fetched."""
        held = self._held.get(request_id)
        if held is None or held.reader is not None or not _may_have(held):
            self._dispatcher.cancel(request_id)
            return
        was_admitted = held.admitted
        self._end(held, held.state.error or Cancelled("cancelled by a Cancel call"))
        if not was_admitted:
            raise NotFound("request", request_id, field="request_id")

    def _check_on(self, field: str) -> None:
        if not self._ttl:
            message = f"{field} is set, and this server keeps no requests (--resume-ttl is 0)"
            raise FeatureDisabled(message, field=field)

    # What readers do.

    def hold(self, held: Held) -> None:
        """A new request was handed over."""
        older = self._held.get(held.state.job.request_id)
        if older is not None:
            self._forget(older)
        self._held[held.state.job.request_id] = held

    def attach(self, call: ResumeCall, reader: Generation) -> Held:
        held = self._held.get(call.request_id)
        if held is None or not _may_have(held):
            raise NotFound("request", call.request_id, field="request_id")
        held.transcript.check(call.received)
        if held.reader is not None:
            logger.info("another client goes on with request %r", call.request_id)
            held.transcript.evict(Cancelled("another client has taken the stream over"))
        held.reader = reader
        _stop(held.expiry)
        held.expiry = None
        held.transcript.rewind(call.received)
        if held.admitted:
            self._dispatcher.engine_side.go_on(*branches_of(held.state))
        return held

    def leave(self, held: Held, reader: Generation, error: BaseException | None) -> None:
        """The reader is done, well or not, or its connection is."""
        if held.reader is not reader:
            return  # another one has taken over
        held.reader = None
        if error is None:
            self._keep(held)
        elif held.admitted and not self._is_lost(held, error):
            self._end(held, error)
        else:
            self._park(held)

    def _is_lost(self, held: Held, error: BaseException) -> bool:
        """Whether it is the connection that ended, and not the request."""
        deadline = held.state.deadline
        if deadline is not None and deadline <= self._clock():
            return False
        cancelled = isinstance(error, asyncio.CancelledError)
        return cancelled or (isinstance(error, Cancelled) and held.state.error is None)

    def _park(self, held: Held) -> None:
        state, loop = held.state, asyncio.get_running_loop()
        held.expiry = loop.call_later(self._ttl, self._expire, held)
        if not held.admitted:
            return
        logger.info("request %r lost its client", state.job.request_id)
        if state.deadline is not None and held.deadline is None:
            left_s = max(0.0, state.deadline - self._clock())
            held.deadline = loop.call_later(left_s, self._miss_deadline, held)
        if state.job.resumable is WhenLost.PAUSE:
            self._dispatcher.engine_side.pause(*branches_of(state))

    def _keep(self, held: Held) -> None:
        """The final frame was written, which does not mean that it has arrived."""
        request_id = held.state.job.request_id
        if self._held.get(request_id) is not held:
            return
        if held.admitted:
            held.admitted = False
            _stop(held.deadline)
            self._dispatcher.end(held.state, None)
        self._kept[request_id] = held
        self._kept.move_to_end(request_id)
        held.expiry = asyncio.get_running_loop().call_later(self._ttl, self._expire, held)
        if len(self._kept) > self._max_kept:
            self._forget(next(iter(self._kept.values())))

    # Ends.

    def _miss_deadline(self, held: Held) -> None:
        error = DeadlineExceeded("the deadline passed")
        if held.reader is None:
            self._end(held, error)
        elif not held.state.outbox.ended:
            self._dispatcher.fail(held.state, error)

    def _expire(self, held: Held) -> None:
        self._end(held, held.state.error or Cancelled("its client did not come back in time"))

    def _end(self, held: Held, error: BaseException | None) -> None:
        if held.admitted:
            held.admitted = False
            self._dispatcher.end(held.state, error)
        self._forget(held)

    def _forget(self, held: Held) -> None:
        request_id = held.state.job.request_id
        _stop(held.expiry)
        _stop(held.deadline)
        if self._held.get(request_id) is held:
            del self._held[request_id]
        if self._kept.get(request_id) is held:
            del self._kept[request_id]


class _Reader(Generation):
    """Reads as long as nobody else does."""

    _held: Held
    _desk: Resumables

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: object
    ) -> None:
        self._desk.leave(self._held, self, error)

    async def __anext__(self) -> Delta | Queued:
        self._check_held()
        return await super().__anext__()

    async def pour(self, writer: FrameWriter) -> Finish:
        self._check_held()
        return await super().pour(writer)

    def _check_held(self) -> None:
        if self._held.reader is not self:
            raise Cancelled("another client has taken the stream over")


class _Resumable(_Reader):
    def __init__(
        self, desk: Resumables, dispatcher: Dispatcher, job: Job, deadline: float | None
    ) -> None:
        super().__init__(dispatcher, job, deadline)
        self._desk = desk
        self._transcript = Transcript(job)

    def _outbox(self) -> Outbox:
        return self._transcript

    async def __aenter__(self) -> Generation:
        await super().__aenter__()
        self._held = Held(self._state, self._transcript, self)
        self._desk.hold(self._held)
        return self


class _Resumed(_Reader):
    def __init__(self, desk: Resumables, dispatcher: Dispatcher, call: ResumeCall) -> None:
        self._dispatcher = dispatcher
        self._desk = desk
        self._call = call
        self.finish = None

    async def __aenter__(self) -> Generation:
        self._held = self._desk.attach(self._call, self)
        self._state = self._held.state
        return self


def _may_have(held: Held) -> bool:
    return current_principal().acts_for(held.state.job.tenant)


def _stop(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()
