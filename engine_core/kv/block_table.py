"""The KV blocks of one sequence."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine_core.kv.hashing import BlockHashes

if TYPE_CHECKING:
    from array import array

    from engine_core.kv.block import Block


class BlockTable:
    """Logical block -> Block, only ever appended to until all is freed; under a window
    (kv/window.py) the null block takes the place of leading ones.

    Written by KVManager alone. It lasts as long as its request; preemption
    empties it and leaves the hashes.

        0        num_registered * B        computed         capacity
        | hashed, can be hit |  computed, not  | allocated, not |
        |  by others         |  yet registered | yet computed   |
    """

    __slots__ = (
        "blocks",
        "cache_generation",
        "capacity",
        "donor",
        "hashes",
        "num_computed",
        "num_donated",
        "num_reclaimed",
        "num_registered",
        "reads_cache",
        "token_ids",
        "writes_cache",
    )

    def __init__(
        self,
        token_ids: array[int],
        block_size: int,
        cache_salt: str,
        *,
        adapter: bytes = b"",
        reads_cache: bool = True,
        writes_cache: bool = True,
    ) -> None:
        self.blocks: list[Block] = []
        self.capacity = 0
        """Tokens that the blocks hold: len(blocks) * block_size."""
        self.num_computed = 0
        """Leading tokens whose KV is in these blocks, as far as update() or admission knows."""
        self.num_registered = 0
        """Leading blocks that were hits or have been offered to the prefix cache."""
        self.num_reclaimed = 0
        """Leading blocks that were given back, as no later token sees them."""
        self.cache_generation = -1
        """The prefix cache's generation when these blocks began to be filled."""
        self.hashes = BlockHashes(token_ids, block_size, cache_salt, adapter)
        self.reads_cache = reads_cache
        """Whether cached blocks may take the place of computing."""
        self.writes_cache = writes_cache
        """Whether its full blocks are offered to the prefix cache."""
        self.donor: BlockTable | None = None
        """Another sequence's, whose first num_donated tokens, while it holds their blocks,
        are as good as computed here."""
        self.num_donated = 0
        self.token_ids = token_ids
        """The sequence's own growing array; read here, never written."""

    @property
    def num_tokens(self) -> int:
        """Known ids, computed or not."""
        return len(self.token_ids)

    def block_ids(self) -> tuple[int, ...]:
        return tuple(block.block_id for block in self.blocks)
