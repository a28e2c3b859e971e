"""A second tier of the prefix cache, in the host's memory.

What the device's cache evicts is copied to a host block; a lookup goes on there
where the device has nothing more, and what it finds is copied into fresh device
blocks. Both are moves of the plan that is being made, never done here.

The order that makes it safe, also while the device still runs the plan before:

- The device runs plans in order, and in a plan all offloads, then all restores,
  then the computing. So a block may be handed out and offloaded by the same plan,
  its content is read before anything writes it; and what one plan offloads any
  later plan, or the same one, may restore.
- Only content that an earlier plan computed, or restored, is ever evicted: hashes
  appear in update(), or in admit() for a block that the admitted table holds until
  the plan that restores it has been launched.
- In one plan a host block is written once or read, never both unless written first,
  and no device block is restored twice: what the plan touches is pinned.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine_core.kv.block_pool import IntegrityError
from engine_core.kv.host_pool import HostPool

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine_core.kv.block import Block
    from engine_core.kv.restore_policy import RestorePolicy


@dataclass(frozen=True, slots=True)
class TierStats:
    num_blocks: int = 0
    num_used_blocks: int = 0
    num_queried_tokens: int = 0
    num_hit_tokens: int = 0
    num_offloaded_blocks: int = 0
    num_restored_blocks: int = 0


NO_TIER = TierStats()


class KVOffload:
    """The host tier of one KVManager."""

    def __init__(self, num_host_blocks: int, policy: RestorePolicy) -> None:
        """Raises ValueError."""
        self.pool = HostPool(num_host_blocks)
        self.policy = policy
        self.num_queried_tokens = 0
        """Prompt tokens that the device did not have and that were looked up here."""
        self.num_hit_tokens = 0
        """Prompt tokens whose KV was restored instead of computed."""
        self.num_offloaded_blocks = 0
        self.num_restored_blocks = 0
        self._offloads: list[tuple[int, int]] = []
        self._restores: list[tuple[int, int]] = []

    def evicted(self, block_hash: bytes, block_id: int) -> None:
        """The device's cache forgets a block, whose content is still there."""
        if block_hash in self.pool:
            self.pool.pin(block_hash)
            return
        host_id = self.pool.store(block_hash)
        if host_id is not None:
            self._offloads.append((block_id, host_id))
            self.num_offloaded_blocks += 1

    def choose(self, blocks: Sequence[Block | None]) -> tuple[int, tuple[int, ...], int]:
        """What to take of a run of blocks, None standing for those the host has.

        Returns the length to take, the indices of what is to be restored in it, and
        how many more blocks the host has. Changes nothing.
        """
        on_host = [block is None for block in blocks]
        num_worth = self.policy.num_worth(on_host)
        restores = tuple(index for index in range(num_worth) if on_host[index])
        return num_worth, restores, sum(on_host[num_worth:])

    def pin(self, block_hash: bytes) -> int:
        """The host block of a hit, which the plan in the making will read."""
        return self.pool.pin(block_hash)

    def restore(self, host_id: int, block_id: int) -> None:
        """A pinned block's content is to be copied to a device block."""
        self._restores.append((host_id, block_id))
        self.num_restored_blocks += 1

    def take_moves(self) -> tuple[tuple[tuple[int, int], ...], tuple[tuple[int, int], ...]]:
        """(offloads, restores) for the plan that is sealed now, and is launched."""
        moves = tuple(self._offloads), tuple(self._restores)
        self._offloads.clear()
        self._restores.clear()
        self.pool.unpin_all()
        return moves

    def stats(self) -> TierStats:
        return TierStats(
            self.pool.num_blocks,
            self.pool.num_used_blocks,
            self.num_queried_tokens,
            self.num_hit_tokens,
            self.num_offloaded_blocks,
            self.num_restored_blocks,
        )

    def forget_all(self) -> int:
        """Returns how many blocks held content."""
        assert not self._restores, "a reset between a plan and its launch"
        self._offloads.clear()
        return self.pool.forget_all()

    def check_integrity(self) -> None:
        """Raises IntegrityError."""
        self.pool.check_integrity()
        written = [host_id for _, host_id in self._offloads]
        filled = [block_id for _, block_id in self._restores]
        if len(set(written)) < len(written) or len(set(filled)) < len(filled):
            raise IntegrityError(f"a block is written twice: {self._offloads} {self._restores}")
        if self._restores:
            raise IntegrityError(f"{len(self._restores)} restores are left between plans")
