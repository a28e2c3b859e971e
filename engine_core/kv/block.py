"""A KV block and the list of free ones."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


class Block:
    """Bookkeeping of one KV block; the KV itself lives on the device.

    A block is linked in the free list exactly when its ref_cnt is 0 (the null
    block excepted, which is neither). It keeps its hash while it is free, so
    that its content can be hit until it is handed out again.
    """

    __slots__ = ("block_hash", "block_id", "next_free", "prev_free", "ref_cnt")

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.ref_cnt = 0
        self.block_hash: bytes | None = None
        self.prev_free: Block | None = None
        self.next_free: Block | None = None

    @property
    def linked(self) -> bool:
        """Whether the block is in the free list."""
        return self.next_free is not None

    def __repr__(self) -> str:
        hashed = "hashed" if self.block_hash is not None else "unhashed"
        return f"Block({self.block_id}, ref_cnt={self.ref_cnt}, {hashed})"


class FreeList:
    """Free blocks in order of eviction: the front is handed out first.

    Doubly linked through the blocks themselves, between two sentinels, so that
    pop, append, prepend and removal from the middle are O(1) and make no
    objects.
    """

    def __init__(self) -> None:
        self._front = Block(-1)
        self._back = Block(-1)
        self._front.next_free = self._back
        self._back.prev_free = self._front
        self._len = 0

    def __len__(self) -> int:
        return self._len

    def __iter__(self) -> Iterator[Block]:
        """From the front. The list must not change meanwhile."""
        block = self._front.next_free
        while block is not None and block is not self._back:
            yield block
            block = block.next_free

    def append(self, block: Block) -> None:
        """Puts a block where it is handed out last."""
        before = self._back.prev_free
        assert before is not None
        self._link(before, block, self._back)

    def prepend(self, block: Block) -> None:
        """Puts a block where it is handed out next."""
        after = self._front.next_free
        assert after is not None
        self._link(self._front, block, after)

    def pop(self) -> Block:
        """Takes the front block. The list must not be empty."""
        block = self._front.next_free
        assert block is not None
        assert block is not self._back, "pop from an empty free list"
        self.remove(block)
        return block

    def remove(self, block: Block) -> None:
        """Takes a block from wherever it is."""
        before, after = block.prev_free, block.next_free
        assert before is not None, block
        assert after is not None, block
        before.next_free = after
        after.prev_free = before
        block.prev_free = block.next_free = None
        self._len -= 1

    def _link(self, before: Block, block: Block, after: Block) -> None:
        assert block.next_free is None, f"{block} is free already"
        before.next_free = after.prev_free = block
        block.prev_free = before
        block.next_free = after
        self._len += 1
