"""What engines say of themselves, added up."""

from __future__ import annotations

from itertools import zip_longest
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pagewire.wire.messages import StepStats


_NOT_SUMS = {
    *("step_s", "abort_to_free_s", "total_accepted_per_position", "max_mixed_prefill_tokens")
}


def total_stats(all_stats: Iterable[StepStats]) -> StepStats | None:
    """The sums of what several engines say; None of none."""
    total: StepStats | None = None
    for stats in all_stats:
        if total is None:
            total = stats
            continue
        sums: dict[str, Any] = {
            name: getattr(total, name) + getattr(stats, name)
            for name in stats.__struct_fields__
            if name not in _NOT_SUMS
        }
        sums["max_mixed_prefill_tokens"] = max(
            total.max_mixed_prefill_tokens, stats.max_mixed_prefill_tokens
        )
        positions = zip_longest(
            total.total_accepted_per_position, stats.total_accepted_per_position, fillvalue=0
        )
        sums["total_accepted_per_position"] = tuple(map(sum, positions))
        total = msgspec.structs.replace(total, **sums)
    return total


def counted_totals(stats: StepStats) -> tuple[int, ...]:
    """What only grows, in a fixed order."""
    return (
        stats.total_preemptions,
        stats.prefix_cache_queries,
        stats.prefix_cache_hits,
        stats.host_cache_queries,
        stats.host_cache_hits,
        stats.total_offloaded_blocks,
        stats.total_restored_blocks,
        stats.total_drafts,
        stats.total_draft_tokens,
        stats.total_accepted_tokens,
        *stats.total_accepted_per_position,
    )


def kv_cache_usage(stats: StepStats) -> float:
    """Share of KV blocks that requests hold, 0 to 1."""
    if stats.num_blocks == 0:
        return 0.0
    return min(1.0, max(0.0, 1 - stats.num_free_blocks / stats.num_blocks))
