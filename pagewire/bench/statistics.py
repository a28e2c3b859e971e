"""From records to figures."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pagewire.bench.record import UNFINISHED

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from pagewire.bench.record import Record

PERCENTILES = (50, 90, 95, 99)
ENOUGH_FOR_P99 = 1000

DEFINITIONS = {
    "ttft": "Time to first token: from sending the request to the first message with output.",
    "tpot": "Time per output token: (last output - first output) / (output tokens - 1), one value "
    "a request; requests of fewer than 2 output tokens have none.",
    "itl_chunk": "Inter-token latency by chunk: gaps between a stream's consecutive messages with "
    "output, all requests pooled.",
    "itl_token": "Inter-token latency by token: a message of k tokens that comes after a gap of g "
    "counts as k gaps of g/k; only where the server tells the tokens of each message.",
    "e2e": "From sending the request to the end of its answer.",
    "throughput": "Tokens of successful requests over the time from the first request sent to the "
    "last answer's end. Tokens are counted by the server (usage), never by messages.",
    "goodput": "Successful requests that meet every given objective, a second.",
    "rejected": "Turned away before any output: RESOURCE_EXHAUSTED, UNAVAILABLE, HTTP 429 or 503. "
    "All other failures are errors.",
    "percentiles": f"Linear interpolation. p99 of fewer than {ENOUGH_FOR_P99:,} values is one of "
    "the few largest.",
    "warm_up": "Requests sent and awaited before the measured time; they are not counted.",
}


@dataclass(frozen=True, slots=True)
class Objectives:
    """Upper bounds in seconds that a good request meets; None is no bound."""

    ttft: float | None = None
    tpot: float | None = None
    e2e: float | None = None

    @property
    def given(self) -> dict[str, float]:
        bounds = {"ttft": self.ttft, "tpot": self.tpot, "e2e": self.e2e}
        return {name: bound for name, bound in bounds.items() if bound is not None}

    def met(self, record: Record) -> bool:
        """A request without a TPOT (one token) meets any bound on it."""
        measured = {"ttft": record.ttft, "tpot": record.tpot, "e2e": record.e2e}
        return record.ok and all(
            (value := measured[name]) is None or value <= bound
            for name, bound in self.given.items()
        )


def percentile(ordered: Sequence[float], q: float) -> float:
    """The q-th percentile, 0 to 100, of ascending values; at least one is needed."""
    place = (len(ordered) - 1) * q / 100
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def describe(values: Iterable[float]) -> dict[str, float] | None:
    """count, mean, percentiles and max; None for no values."""
    ordered = sorted(values)
    if not ordered:
        return None
    figures: dict[str, float] = {
        "count": len(ordered),
        "mean": math.fsum(ordered) / len(ordered),
    }
    figures |= {f"p{q}": percentile(ordered, q) for q in PERCENTILES}
    return figures | {"max": ordered[-1]}


def summarize(records: Sequence[Record], objectives: Objectives) -> dict[str, Any]:
    """All figures of a run; latencies in seconds, of successful requests only."""
    good = [record for record in records if record.ok]
    failed = [record for record in records if not record.ok]
    began = min((record.sent_at for record in records), default=0.0)
    duration = max((record.ended_at for record in records), default=0.0) - began
    prompt = sum(record.prompt_tokens for record in good)
    output = sum(record.output_tokens for record in good)
    chunks = sum(len(record.chunk_times) for record in good)
    cached = [record.cached_tokens for record in good if record.cached_tokens is not None]

    def rate(count: float) -> float:
        return count / duration if duration > 0 else 0.0

    return {
        "requests": len(records),
        "successful": len(good),
        "rejected": Counter(r.error for r in failed if r.rejected),
        "errors": Counter(r.error for r in failed if not r.rejected and r.error != UNFINISHED),
        "unfinished": sum(record.error == UNFINISHED for record in failed),
        "first_error": next((r.message for r in failed if r.message), None),
        "duration_s": duration,
        "prompt_tokens": prompt,
        "output_tokens": output,
        "cached_tokens": sum(cached) if cached else None,
        "cache_hit_rate": sum(cached) / prompt if cached and prompt else None,
        "requests_per_s": rate(len(good)),
        "output_tokens_per_s": rate(output),
        "prompt_tokens_per_s": rate(prompt),
        "total_tokens_per_s": rate(prompt + output),
        "tokens_per_chunk": output / chunks if chunks else None,
        "goodput_per_s": rate(sum(map(objectives.met, good))) if objectives.given else None,
        "objectives_s": objectives.given,
        "ttft_s": describe(r.ttft for r in good if r.ttft is not None),
        "tpot_s": describe(r.tpot for r in good if r.tpot is not None),
        "itl_chunk_s": describe(gap for r in good for gap in r.chunk_gaps()),
        "itl_token_s": describe(token_gaps(good)),
        "e2e_s": describe(r.e2e for r in good),
        "send_lag_s": describe(r.sent_at - r.scheduled_at for r in records),
    }


def token_gaps(records: Iterable[Record]) -> list[float]:
    """Pooled; empty if any request's are not known."""
    pooled: list[float] = []
    for record in records:
        gaps = record.token_gaps()
        if gaps is None:
            return []
        pooled += gaps
    return pooled


def output_rate(records: Sequence[Record], buckets: int = 60) -> list[tuple[float, float]]:
    """Output tokens a second over the run: (seconds from its beginning, rate), by bucket.

    The tokens of a request whose server tells none by chunk are spread evenly over its chunks.
    """
    events: list[tuple[float, float]] = []
    for record in records:
        if not record.chunk_times:
            continue
        if len(record.chunk_tokens) == len(record.chunk_times):
            events += zip(record.chunk_times, record.chunk_tokens, strict=True)
        else:
            share = record.output_tokens / len(record.chunk_times)
            events += [(time, share) for time in record.chunk_times]
    if not events:
        return []
    began = min(record.sent_at for record in records)
    width = max(max(time for time, _ in events) - began, 1e-9) / buckets
    tokens = [0.0] * buckets
    for time, count in events:
        tokens[min(int((time - began) / width), buckets - 1)] += count
    return [((index + 0.5) * width, count / width) for index, count in enumerate(tokens)]
