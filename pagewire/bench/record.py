"""What is known of one request after it was sent."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

REJECTIONS = frozenset({"RESOURCE_EXHAUSTED", "UNAVAILABLE", "HTTP 429", "HTTP 503"})
"""Codes by which a server turns a request away that it could serve at another time."""
UNFINISHED = "UNFINISHED"
"""Code of a request that was still running when the run's time was over."""


@dataclass(slots=True)
class Record:
    """Times are seconds on one monotonic clock."""

    scheduled_at: float = 0.0
    """When the load wanted it sent."""
    sent_at: float = 0.0
    ended_at: float = 0.0
    chunk_times: list[float] = field(default_factory=list)
    """Arrival of each message with new output."""
    chunk_tokens: list[int] = field(default_factory=list)
    """Output tokens in each of them, where the server tells; else empty."""
    prompt_tokens: int = 0
    output_tokens: int = 0
    """As the server counts them."""
    cached_tokens: int | None = None
    error: str | None = None
    """A gRPC status, "HTTP 4xx", an exception's name or UNFINISHED; None is success."""
    message: str = ""
    """Of the error."""

    @property
    def ok(self) -> bool:
        return self.error is None

    @property
    def rejected(self) -> bool:
        return self.error in REJECTIONS and not self.chunk_times

    @property
    def ttft(self) -> float | None:
        """From sending to the first output; None if none came."""
        return self.chunk_times[0] - self.sent_at if self.chunk_times else None

    @property
    def e2e(self) -> float:
        """From sending to the end of the answer."""
        return self.ended_at - self.sent_at

    @property
    def tpot(self) -> float | None:
        """Time per output token after the first: (last output - first) / (tokens - 1)."""
        if self.output_tokens < 2 or not self.chunk_times:
            return None
        return (self.chunk_times[-1] - self.chunk_times[0]) / (self.output_tokens - 1)

    def chunk_gaps(self) -> list[float]:
        times = self.chunk_times
        return [after - before for before, after in itertools.pairwise(times)]

    def token_gaps(self) -> list[float] | None:
        """A gap for each token after the first chunk's: a chunk of k tokens after a gap of g
        is k gaps of g / k. None where the server does not tell the tokens of its chunks."""
        if len(self.chunk_tokens) != len(self.chunk_times):
            return None
        gaps: list[float] = []
        for gap, tokens in zip(self.chunk_gaps(), self.chunk_tokens[1:], strict=True):
            if tokens:
                gaps += [gap / tokens] * tokens
        return gaps
