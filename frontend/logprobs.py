"""A request's log probabilities on their way from the engine to its deltas."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pagewire.errors import InvalidRequest
from pagewire.types import MAX_LOGPROBS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from frontend.request import SamplingCall
    from pagewire.wire.messages import PositionLogprobs, RequestLogprobs


def check_logprobs(call: SamplingCall) -> None:
    """Raises InvalidRequest."""
    for name in ("logprobs", "prompt_logprobs"):
        count = getattr(call, name)
        if count is not None and not 0 <= count <= MAX_LOGPROBS:
            raise InvalidRequest(
                f"sampling_params.{name}", f"{name} is {count}, must be in [0, {MAX_LOGPROBS}]"
            )


class LogprobsRecord:
    """Of one request: positions come with their ids, and leave with their ids' text."""

    __slots__ = ("_output", "_prompt")

    def __init__(self) -> None:
        self._output: list[PositionLogprobs] = []
        """Parallel to the request's output_ids, if they are wanted."""
        self._prompt: tuple[PositionLogprobs, ...] = ()
        """Until the first delta takes them."""

    def add(self, logprobs: RequestLogprobs) -> None:
        """Takes in what came with the newest ids."""
        self._output += logprobs.output
        if logprobs.prompt:
            self._prompt = logprobs.prompt

    def output(self, begin: int, end: int) -> Sequence[PositionLogprobs]:
        """Of output tokens [begin, end)."""
        return self._output[begin:end]

    def take_prompt(self) -> tuple[PositionLogprobs, ...]:
        """The prompt's, once."""
        prompt, self._prompt = self._prompt, ()
        return prompt
