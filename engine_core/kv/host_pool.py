"""Which evicted content the host's memory still holds."""

from __future__ import annotations

from collections import OrderedDict

from engine_core.kv.block_pool import IntegrityError


class HostPool:
    """KV blocks in host memory by chain hash, the least recently used one replaced first.

    Bookkeeping only. Blocks that the plan in the making reads or writes are pinned
    until it is sealed: within one plan all offloads come before all restores, so a
    block may play but one part in it.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_host_blocks is {num_blocks}, must be at least 1")
        self.num_blocks = num_blocks
        self._ids: OrderedDict[bytes, int] = OrderedDict()
        """Least recently used first; so pinned ones, just used, are all at the end."""
        self._free = list(range(num_blocks - 1, -1, -1))
        self._pinned: set[bytes] = set()

    def __contains__(self, block_hash: bytes) -> bool:
        return block_hash in self._ids

    @property
    def num_used_blocks(self) -> int:
        return len(self._ids)

    @property
    def num_pinned_blocks(self) -> int:
        return len(self._pinned)

    def settled_items(self) -> list[tuple[bytes, int]]:
        """(hash, host block) of content that no plan in the making touches."""
        return [item for item in self._ids.items() if item[0] not in self._pinned]

    def pin(self, block_hash: bytes) -> int:
        """The host block of content that must be there; it stays until unpin_all()."""
        self._ids.move_to_end(block_hash)
        self._pinned.add(block_hash)
        return self._ids[block_hash]

    def store(self, block_hash: bytes) -> int | None:
        """The host block to write new content to, pinned; None if all are pinned."""
        assert block_hash not in self._ids, "stored twice"
        if self._free:
            host_id = self._free.pop()
        else:
            oldest = next(iter(self._ids))
            if oldest in self._pinned:
                return None
            host_id = self._ids.pop(oldest)
        self._ids[block_hash] = host_id
        self._pinned.add(block_hash)
        return host_id

    def unpin_all(self) -> None:
        self._pinned.clear()

    def forget_all(self) -> int:
        """Drops all content. Returns how many blocks held some."""
        num_forgotten = len(self._ids)
        self._free.extend(self._ids.values())
        self._ids.clear()
        self._pinned.clear()
        return num_forgotten

    def check_integrity(self) -> None:
        """Raises IntegrityError. O(num_blocks)."""
        owned = [*self._free, *self._ids.values()]
        if sorted(owned) != list(range(self.num_blocks)):
            raise IntegrityError(
                f"{len(self._free)} free and {len(self._ids)} used host blocks are not "
                f"the {self.num_blocks} there are, each once"
            )
        if not self._pinned <= self._ids.keys():
            raise IntegrityError("a host block without content is pinned")
