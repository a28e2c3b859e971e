"""What an answer says of its end and its cost."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import UNSET

from frontend.openai.responses import Usage
from pagewire.types import FinishReason

if TYPE_CHECKING:
    from msgspec import UnsetType

    from frontend.openai.requests import StreamOptions
    from frontend.openai.responses import StopReason
    from frontend.stream import Delta, SequenceEnd
    from pagewire.types import Usage as EngineUsage

_REASONS = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length"}


def finish_reason(end: SequenceEnd) -> str:
    if end.called_tools and end.reason is FinishReason.STOP:
        return "tool_calls"
    return _REASONS[end.reason]


def stop_reason(end: SequenceEnd) -> StopReason:
    """vLLM's: the stop string or the stop token; null for the end of sequence."""
    return end.stop_token_id if end.stop_string is None else end.stop_string


class UsageSum:
    """Over all prompts of a request."""

    def __init__(self, options: StreamOptions | None) -> None:
        self.wanted = options is not None and bool(options.include_usage)
        """At the end of a stream."""
        self._continuous = options is not None and bool(options.continuous_usage_stats)
        self._prompt = self._cached = self._completion = self._streamed = 0

    def begin(self, num_prompt_tokens: int) -> None:
        self._prompt += num_prompt_tokens

    def add(self, usage: EngineUsage) -> None:
        self._cached += usage.cached_tokens
        self._completion += usage.completion_tokens

    def total(self) -> Usage:
        return self._usage(self._completion)

    def so_far(self, delta: Delta | None = None) -> Usage | UnsetType | None:
        """Of a chunk: null where the last one will tell."""
        if self._continuous:
            if delta is not None:
                self._streamed += len(delta.token_ids)
            return self._usage(self._streamed)
        return None if self.wanted else UNSET

    def _usage(self, completion: int) -> Usage:
        return Usage(
            prompt_tokens=self._prompt,
            completion_tokens=completion,
            total_tokens=self._prompt + completion,
            prompt_tokens_details={"cached_tokens": self._cached},
        )
