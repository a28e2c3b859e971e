"""One admitted request in an RPC handler's hands."""

from __future__ import annotations

from typing import TYPE_CHECKING

from frontend.stream import Finish, Outbox

if TYPE_CHECKING:
    from frontend.dispatcher import Dispatcher
    from frontend.frame_writer import FrameWriter
    from frontend.request import Job
    from frontend.stream import Delta, Queued


class Generation:
    """Entering admits, tokenizes and sends; leaving aborts whatever has not ended.

    Iterating yields deltas, and before them the place in the queue if the job says so;
    `finish` is set when they end well. `deadline` is on the
    dispatcher's clock. Entering raises what Dispatcher.admit, tokenize and launch do,
    iterating the error that ended the request.
    """

    def __init__(self, dispatcher: Dispatcher, job: Job, deadline: float | None) -> None:
        self._dispatcher = dispatcher
        self._job = job
        self._deadline = deadline
        self.finish: Finish | None = None

    async def __aenter__(self) -> Generation:
        dispatcher = self._dispatcher
        self._state = dispatcher.admit(self._job, self._deadline, self._outbox())
        try:
            await dispatcher.tokenize(self._state)
            dispatcher.launch(self._state)
        except BaseException as error:
            dispatcher.end(self._state, error)
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: object
    ) -> None:
        self._dispatcher.end(self._state, error)

    @property
    def prompt_ids(self) -> list[int]:
        """As the engine has them, once entered."""
        return self._state.prompt_ids

    @property
    def num_cached_tokens(self) -> int:
        """Of the prompt, known once the engine has started on it."""
        return self._state.num_cached_tokens

    def _outbox(self) -> Outbox:
        return Outbox()

    def __aiter__(self) -> Generation:
        return self

    async def __anext__(self) -> Delta | Queued:
        item = await self._state.outbox.take()
        if isinstance(item, Finish):
            self.finish = item
            raise StopAsyncIteration
        return item

    async def pour(self, writer: FrameWriter) -> Finish:
        """Has all of it written, in place of iterating; the error that ended it is raised."""
        self.finish = await writer.pour(self._state.outbox)
        return self.finish

    async def whole(self) -> tuple[list[Delta], Finish]:
        """The output of each sequence and the outcome, once it has ended."""
        return await self._state.outbox.take_all()
