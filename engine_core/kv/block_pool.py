"""Who owns which block, and which content the free ones still hold."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine_core.kv.block import Block, FreeList

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

NULL_BLOCK_ID = 0
"""Block 0 pads block tables: never handed out, cached or freed."""


class IntegrityError(RuntimeError):
    """The bookkeeping contradicts itself: our bug. The message has the figures."""


class BlockPool:
    """All KV blocks: allocation, reference counts, and the map of cached content.

    A block is either free (ref_cnt 0, in the free list) or held by ref_cnt
    tables. A free block with a hash can be hit; it is evicted, least recently
    freed first, when no unhashed block is left.
    """

    def __init__(
        self, num_blocks: int, on_evict: Callable[[bytes, int], None] | None = None
    ) -> None:
        """num_blocks counts the null block, so it is at least 2. on_evict: told the hash
        and the id of each block that is handed out while its content could be hit."""
        if num_blocks < 2:
            raise ValueError(f"num_blocks is {num_blocks}, at least 2 are needed (one is null)")
        self.blocks = [Block(block_id) for block_id in range(num_blocks)]
        self._free = FreeList()
        for block in self.blocks[1:]:
            self._free.append(block)
        self._cached: dict[bytes, Block] = {}
        self._num_free_cached = 0
        self._on_evict = on_evict

    @property
    def null_block(self) -> Block:
        return self.blocks[NULL_BLOCK_ID]

    @property
    def num_blocks(self) -> int:
        """All blocks, the null block among them."""
        return len(self.blocks)

    @property
    def num_usable_blocks(self) -> int:
        return len(self.blocks) - 1

    @property
    def num_free_blocks(self) -> int:
        """Blocks that no table holds, cached or not."""
        return len(self._free)

    @property
    def num_cached_blocks(self) -> int:
        """Blocks whose content can be hit, held or free."""
        return len(self._cached)

    @property
    def num_free_cached_blocks(self) -> int:
        """Blocks that no table holds and whose content can be hit."""
        return self._num_free_cached

    def allocate(self, num_blocks: int) -> list[Block] | None:
        """Hands out blocks with ref_cnt 1 and no hash; all of them or None.

        None leaves the pool as it was.
        """
        if num_blocks > len(self._free):
            return None
        taken = []
        for _ in range(num_blocks):
            block = self._free.pop()
            self._forget(block)
            block.ref_cnt = 1
            taken.append(block)
        return taken

    def touch(self, blocks: Iterable[Block]) -> None:
        """One more table holds each of these blocks, which are held or cached."""
        for block in blocks:
            assert block.ref_cnt or block.block_hash is not None, block
            if block.ref_cnt == 0:
                self._free.remove(block)
                self._num_free_cached -= 1
            block.ref_cnt += 1

    def release(self, blocks_tail_first: Iterable[Block]) -> None:
        """One table less holds each of these blocks.

        The order makes a sequence's tail be evicted before its head, which
        every longer prefix needs. Unhashed blocks are of no use to anyone and
        are handed out first.
        """
        for block in blocks_tail_first:
            assert block.ref_cnt > 0, block
            block.ref_cnt -= 1
            if block.ref_cnt == 0:
                if block.block_hash is None:
                    self._free.prepend(block)
                else:
                    self._free.append(block)
                    self._num_free_cached += 1

    def lookup(self, hashes: Sequence[bytes], limit: int) -> list[Block]:
        """The cached blocks of the longest run of hashes[:limit], from the first."""
        hits = []
        for index in range(limit):
            block = self._cached.get(hashes[index])
            if block is None:
                break
            hits.append(block)
        return hits

    def find(self, block_hash: bytes) -> Block | None:
        """The block whose content can be hit under this hash."""
        return self._cached.get(block_hash)

    def cached_items(self) -> list[tuple[bytes, int]]:
        """(hash, block id) of all content that can be hit."""
        return [(block_hash, block.block_id) for block_hash, block in self._cached.items()]

    def register(self, block: Block, block_hash: bytes) -> bool:
        """Makes a held block's content known; its KV must have been computed.

        False if another block already stands for the same content: tables are
        append-only, so the two are not merged, and this one stays unhashed.
        """
        assert block.ref_cnt > 0, block
        assert block.block_hash is None, block
        if block_hash in self._cached:
            return False
        self._cached[block_hash] = block
        block.block_hash = block_hash
        return True

    def forget_all(self) -> int:
        """Drops every hash, of held blocks too. Returns how many."""
        num_forgotten = len(self._cached)
        for block in self._cached.values():
            block.block_hash = None
        self._cached.clear()
        self._num_free_cached = 0
        return num_forgotten

    def _forget(self, block: Block) -> None:
        """Evicts a free block: its content can no longer be hit."""
        if block.block_hash is not None:
            if self._on_evict is not None:
                self._on_evict(block.block_hash, block.block_id)
            del self._cached[block.block_hash]
            block.block_hash = None
            self._num_free_cached -= 1

    def check_integrity(self, held: Mapping[int, int]) -> None:
        """Compares all the bookkeeping with itself. O(num_blocks).

        held: block id -> number of tables that hold it.
        Raises IntegrityError.
        """
        self._check_counts(held)
        self._check_free_list()
        self._check_cached()

    def _check_counts(self, held: Mapping[int, int]) -> None:
        null = self.blocks[NULL_BLOCK_ID]
        if null.ref_cnt or null.linked or null.block_hash is not None or held.get(NULL_BLOCK_ID):
            raise IntegrityError(
                f"the null block is in use: {null}, linked {null.linked}, "
                f"in {held.get(NULL_BLOCK_ID, 0)} tables"
            )
        astray = [
            block
            for block in self.blocks[1:]
            if block.ref_cnt != held.get(block.block_id, 0) or block.linked != (block.ref_cnt == 0)
        ]
        if astray:
            shown = ", ".join(
                f"{block} in {held.get(block.block_id, 0)} tables, linked {block.linked}"
                for block in astray[:4]
            )
            raise IntegrityError(
                f"{len(astray)} of {self.num_usable_blocks} blocks astray "
                f"({self.num_free_blocks} free): {shown}"
            )

    def _check_free_list(self) -> None:
        walked = 0
        last_id = -1
        for block in self._free:
            walked += 1
            if walked > self.num_usable_blocks:
                raise IntegrityError(f"the free list has a cycle near block {last_id}")
            last_id = block.block_id
        linked = sum(block.linked for block in self.blocks)
        if not walked == linked == len(self._free):
            raise IntegrityError(
                f"the free list counts {len(self._free)}, "
                f"walks {walked}, and {linked} blocks are linked"
            )

    def _check_cached(self) -> None:
        hashed = sum(block.block_hash is not None for block in self.blocks)
        wrong = [
            block for block_hash, block in self._cached.items() if block.block_hash != block_hash
        ]
        if wrong or hashed != len(self._cached):
            raise IntegrityError(
                f"{len(self._cached)} hashes are mapped, {hashed} blocks carry one, "
                f"{len(wrong)} disagree: {wrong[:4]}"
            )
        num_free = sum(block.ref_cnt == 0 for block in self._cached.values())
        if num_free != self._num_free_cached:
            raise IntegrityError(
                f"{num_free} cached blocks are free, {self._num_free_cached} are counted"
            )
