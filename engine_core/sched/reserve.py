"""Blocks that an admission leaves for those who run already."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine_core.sched.beam_group import num_forks

if TYPE_CHECKING:
    from engine_core.kv.manager import KVManager
    from engine_core.request import Request


def owed(request: Request, kv_manager: KVManager) -> int:
    """Blocks that its known ids, and the beams to come, will take beyond those it has."""
    return kv_manager.blocks_ahead(request.table) + num_forks(request)


def reserve(request: Request, num_owed: int, num_running: int, kv_manager: KVManager) -> int:
    """Blocks that stay free when a request is admitted beside others, who are owed num_owed.

    Room for a whole prompt is asked for, beside what the prompts in chunks are still owed: no
    two ever count on the same blocks. So that the admission does not force a preemption a
    moment later, 1% of the pool stays free too, or what those who run will take on average in
    the next four steps.
    """
    if not num_running:
        return 0
    soon = kv_manager.blocks_for(4 * num_running)
    return num_owed + num_forks(request) + max(kv_manager.num_usable_blocks // 100, soon)
