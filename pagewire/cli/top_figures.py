"""What `pagewire top` shows, made of two samples of a server."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pagewire.cli.top_source import Page, Sample

LATENCIES = {
    "ttft": "vllm:time_to_first_token_seconds",
    "itl": "pagewire_inter_token_latency_seconds",
    "e2e": "vllm:e2e_request_latency_seconds",
    "detokenize": "pagewire_detokenize_seconds",
}
_QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}


class Latency(msgspec.Struct):
    """Seconds; None of no observations, inf beyond the last bucket (null in JSON)."""

    count: int
    p50: float | None
    p90: float | None
    p99: float | None


class Happened(msgspec.Struct):
    recent: int
    """In the interval."""
    total: int
    """Since the server's start."""


class Tenant(msgspec.Struct):
    """Of requests that have ended: their tokens are counted then."""

    tenant: str
    ended: Happened
    prompt_tokens_per_s: float
    output_tokens_per_s: float
    output_tokens: int


class Figures(msgspec.Struct):
    """Rates, percentiles and `recent` are of the interval; the rest is of now."""

    server: str
    model: str
    serving: bool
    draining: bool
    interval_s: float
    in_flight: int
    running: int
    waiting: int
    max_num_seqs: int
    block_size: int
    blocks: dict[str, int]
    """total, used, cached and free."""
    output_tokens_per_s: float
    prompt_tokens_per_s: float
    prefix_cache_hit_rate: float | None
    """Share of the prompt tokens; None where none was looked up."""
    preemptions: Happened
    ended: dict[str, Happened]
    """By finish reason."""
    refused: dict[str, Happened]
    """Before the engine was asked, by our code."""
    errors: dict[str, Happened]
    """Calls at any door that did not end well, by gRPC's code."""
    latency_s: dict[str, Latency]
    """By the keys of LATENCIES."""
    tenants: list[Tenant]
    """The busiest first."""
    engines: list[dict[str, Any]]
    tokenizer: dict[str, Any]


def figures(server: str, now: Sample, before: Sample) -> Figures:
    """Over the time between two samples of the same life of a server."""
    live = now.live
    seconds = live["at"] - before.live["at"]
    totals, old_totals = live["totals"], before.live["totals"]
    grown = {name: value - old_totals[name] for name, value in totals.items()}

    def per_second(amount: float) -> float:
        return amount / seconds if seconds > 0 else 0.0

    def happened(name: str, label: str) -> dict[str, Happened]:
        return _happened(now.page, before.page, name, label)

    queries = grown["prefix_cache_queries"]
    return Figures(
        server=server,
        model=live["model"],
        serving=live["serving"],
        draining=live["draining"],
        interval_s=seconds,
        in_flight=live["in_flight"],
        running=live["running"],
        waiting=live["waiting"],
        max_num_seqs=live["max_num_seqs"],
        block_size=live["block_size"],
        blocks=live["blocks"],
        output_tokens_per_s=per_second(grown["output_tokens"]),
        prompt_tokens_per_s=per_second(grown["prompt_tokens"]),
        prefix_cache_hit_rate=grown["prefix_cache_hits"] / queries if queries > 0 else None,
        preemptions=Happened(grown["preemptions"], totals["preemptions"]),
        ended=happened("vllm:request_success_total", "finished_reason"),
        refused=happened("pagewire_requests_refused_total", "code"),
        errors={
            code: counted
            for code, counted in happened("pagewire_rpcs_handled_total", "code").items()
            if code != "OK"
        },
        latency_s={
            key: latency(now.page.buckets(name), before.page.buckets(name))
            for key, name in LATENCIES.items()
        },
        tenants=_tenants(now.page, before.page, per_second),
        engines=live["engines"],
        tokenizer=live["tokenizer"],
    )


def latency(now: Sequence[tuple[float, float]], before: Sequence[tuple[float, float]]) -> Latency:
    """Of what came between two states of a histogram: (upper bound, count so far)."""
    old = dict(before)
    grown = [(bound, count - old.get(bound, 0.0)) for bound, count in now]
    count = int(grown[-1][1]) if grown else 0
    return Latency(count, **{name: quantile(grown, q) for name, q in _QUANTILES.items()})


def quantile(buckets: Sequence[tuple[float, float]], q: float) -> float | None:
    """As Prometheus' histogram_quantile reads it: on a straight line between two bounds."""
    total = buckets[-1][1] if buckets else 0
    if total <= 0:
        return None
    rank, low, below = q * total, 0.0, 0.0
    for bound, count in buckets:
        if count >= rank and count > below:
            if bound == math.inf:
                return math.inf
            return low + (bound - low) * (rank - below) / (count - below)
        low, below = bound, count
    return math.inf


def _happened(now: Page, before: Page, name: str, label: str) -> dict[str, Happened]:
    old = before.by(name, label)
    return {
        key[0]: Happened(int(total - old.get(key, 0.0)), int(total))
        for key, total in now.by(name, label).items()
        if total
    }


def _tenants(now: Page, before: Page, per_second: Any) -> list[Tenant]:
    ended = _happened(now, before, "pagewire_tenant_requests_total", "tenant")
    prompt = _happened(now, before, "pagewire_tenant_prompt_tokens_total", "tenant")
    output = _happened(now, before, "pagewire_tenant_generation_tokens_total", "tenant")
    none = Happened(0, 0)
    tenants = [
        Tenant(
            tenant=name,
            ended=counted,
            prompt_tokens_per_s=per_second(prompt.get(name, none).recent),
            output_tokens_per_s=per_second(output.get(name, none).recent),
            output_tokens=output.get(name, none).total,
        )
        for name, counted in ended.items()
    ]
    tenants.sort(key=lambda it: (-it.output_tokens_per_s, -it.output_tokens, it.tenant))
    return tenants
