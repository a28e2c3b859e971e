"""KV policy per sequence: what to reuse, what to take, when to make it known."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine_core.kv.block_pool import BlockPool, IntegrityError
from engine_core.kv.block_table import BlockTable

if TYPE_CHECKING:
    from array import array
    from collections.abc import Sequence

    from engine_core.kv.block import Block

__all__ = ["IntegrityError", "KVManager", "PrefixHit"]


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """The cached blocks that a sequence may begin with; taken only by admit()."""

    blocks: tuple[Block, ...]
    num_cached_tokens: int

    @property
    def num_free(self) -> int:
        """How many of the blocks no table holds, so that taking them uses room."""
        return sum(block.ref_cnt == 0 for block in self.blocks)


NO_HIT = PrefixHit((), 0)


class KVManager:
    """The block tables of all sequences over one block pool.

    Out of room is a value (None), never an exception, and leaves everything as
    it was: only the scheduler decides who has to go.
    """

    def __init__(
        self, num_blocks: int, block_size: int, enable_prefix_caching: bool = True
    ) -> None:
        """num_blocks counts the null block. Raises ValueError."""
        if block_size < 1:
            raise ValueError(f"block_size is {block_size}, must be at least 1")
        self.pool = BlockPool(num_blocks)
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.num_queried_tokens = 0
        """Prompt tokens looked up in the prefix cache since the start."""
        self.num_hit_tokens = 0
        """Prompt tokens found there."""
        self._tables: set[BlockTable] = set()
        self._generation = 0

    @property
    def num_blocks(self) -> int:
        """All blocks, the null block among them."""
        return self.pool.num_blocks

    @property
    def num_free_blocks(self) -> int:
        """Blocks that no sequence holds, cached or not."""
        return self.pool.num_free_blocks

    @property
    def num_usable_blocks(self) -> int:
        return self.pool.num_usable_blocks

    @property
    def num_tables(self) -> int:
        """Sequences that hold blocks."""
        return len(self._tables)

    @property
    def max_tokens(self) -> int:
        """Tokens that the whole pool can hold."""
        return self.pool.num_usable_blocks * self.block_size

    @property
    def usage(self) -> float:
        """Share of the usable blocks that sequences hold, 0 to 1."""
        return 1.0 - self.pool.num_free_blocks / self.pool.num_usable_blocks

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that num_tokens take: the quotient, rounded up."""
        return -(-num_tokens // self.block_size)

    def new_table(
        self,
        token_ids: array[int],
        cache_salt: str = "",
        *,
        reads_cache: bool = True,
        writes_cache: bool = True,
    ) -> BlockTable:
        """An empty table for a sequence whose ids (type code "i") will grow."""
        return BlockTable(
            token_ids,
            self.block_size,
            cache_salt,
            reads_cache=reads_cache and self.enable_prefix_caching,
            writes_cache=writes_cache and self.enable_prefix_caching,
        )

    def share(self, donor: BlockTable, table: BlockTable, num_tokens: int) -> None:
        """From now on lookups of `table` find what `donor` holds of their first
        num_tokens ids, which must be the same; with or without a prefix cache."""
        table.donor = donor
        table.num_donated = num_tokens // self.block_size

    def lookup(self, table: BlockTable) -> PrefixHit:
        """The longest cached (or donated) prefix of full blocks, never the whole sequence:
        the last known token is always computed, since its logits are needed.

            0                num_cached                      num_tokens
            | full blocks, hit | computed: at least 1 token     |

        Changes nothing: the hit is only good until the pool changes.
        """
        limit = (table.num_tokens - 1) // self.block_size
        blocks: Sequence[Block] = ()
        if table.reads_cache:
            blocks = self.pool.lookup(table.hashes.first(limit), limit)
        if table.donor is not None and len(blocks) < limit:
            blocks = max(blocks, self._donated(table, table.donor)[:limit], key=len)
        return PrefixHit(tuple(blocks), len(blocks) * self.block_size) if blocks else NO_HIT

    def _donated(self, table: BlockTable, donor: BlockTable) -> Sequence[Block]:
        """Only those that are computed: register_computed() has passed them."""
        # KV from before a reset must not come back under the hashes of new blocks.
        if donor.cache_generation != self._generation:
            return ()
        return donor.blocks[: min(donor.num_registered, table.num_donated)]

    def count_lookup(
        self, table: BlockTable, num_prompt_tokens: int, num_cached_tokens: int
    ) -> None:
        """Counts a lookup whose request was admitted, once a request."""
        if table.reads_cache:
            self.num_queried_tokens += num_prompt_tokens
            self.num_hit_tokens += num_cached_tokens

    def admit(
        self, table: BlockTable, hit: PrefixHit, num_new_tokens: int, reserve: int
    ) -> tuple[int, ...] | None:
        """Takes the hit and room for a first chunk.

            0          num_cached        +num_new             num_tokens
            | hit: touch | new: allocate   | later: must fit too  |

        reserve: blocks that would have to stay free if all known ids, not only
        this chunk, were given room. Nothing is set aside for the later ids.

        Returns the ids of the blocks now in the table, or None if short.
        """
        assert not table.blocks, "admitted twice"
        num_all = self.blocks_for(table.num_tokens) - len(hit.blocks)
        if num_all + hit.num_free + reserve > self.pool.num_free_blocks:
            return None
        num_tokens = hit.num_cached_tokens + num_new_tokens
        assert num_tokens <= table.num_tokens, (num_tokens, table.num_tokens)
        # The hit leaves the free list before anything is taken from it, so that
        # allocation can't evict it.
        self.pool.touch(hit.blocks)
        fresh = self.pool.allocate(self.blocks_for(num_tokens) - len(hit.blocks))
        assert fresh is not None, (num_all, hit.num_free, self.pool.num_free_blocks)
        table.blocks.extend(hit.blocks)
        table.blocks.extend(fresh)
        table.capacity = len(table.blocks) * self.block_size
        table.num_registered = len(hit.blocks)
        table.cache_generation = self._generation
        self._tables.add(table)
        return table.block_ids()

    def grow(self, table: BlockTable, num_tokens: int) -> tuple[int, ...] | None:
        """Gives the table room for its first num_tokens ids.

            0              capacity          num_tokens
            | blocks in table | new: allocate   |

        Returns the ids of the blocks appended (often none), or None if short.
        """
        if num_tokens <= table.capacity:
            return ()
        fresh = self.pool.allocate(self.blocks_for(num_tokens) - len(table.blocks))
        if fresh is None:
            return None
        table.blocks.extend(fresh)
        table.capacity = len(table.blocks) * self.block_size
        return tuple(block.block_id for block in fresh)

    def register_computed(self, table: BlockTable, num_computed_tokens: int) -> None:
        """Makes the blocks that have become full known to the prefix cache.

            0       num_registered * B              num_computed
            | known already |  full: register | partial |

        To be called once the KV of these tokens is in the cache, and only then.
        """
        if num_computed_tokens < (table.num_registered + 1) * self.block_size:
            return
        num_full = num_computed_tokens // self.block_size
        assert num_full <= len(table.blocks), (num_full, len(table.blocks))
        # After a reset, KV that was begun before it must not come back as a hit.
        if table.writes_cache and table.cache_generation == self._generation:
            hashes = table.hashes.first(num_full)
            for index in range(table.num_registered, num_full):
                self.pool.register(table.blocks[index], hashes[index])
        table.num_registered = num_full

    def free(self, table: BlockTable) -> None:
        """Gives back all blocks, tail first. A table without blocks is fine."""
        self.pool.release(reversed(table.blocks))
        table.blocks.clear()
        table.capacity = 0
        table.num_registered = 0
        self._tables.discard(table)

    def reset_prefix_cache(self) -> int:
        """Forgets all cached content, also what running sequences have begun.

        They go on undisturbed; their later blocks are not registered. Returns
        the number of blocks that could have been hit.
        """
        self._generation += 1
        return self.pool.forget_all()

    def check_integrity(self) -> None:
        """Compares tables and pool. O(num_blocks). Raises IntegrityError."""
        held: Counter[int] = Counter()
        for table in self._tables:
            held.update(table.block_ids())
            if table.capacity != len(table.blocks) * self.block_size:
                raise IntegrityError(
                    f"a table of {len(table.blocks)} blocks says it holds {table.capacity} tokens"
                )
            if table.num_registered > len(table.blocks):
                raise IntegrityError(
                    f"{table.num_registered} of {len(table.blocks)} blocks are registered"
                )
        self.pool.check_integrity(held)

    def check_all_free(self) -> None:
        """That no block is held, in O(1), for use when no request is left.

        Raises IntegrityError.
        """
        num_held = self.num_usable_blocks - self.num_free_blocks
        if num_held or self._tables:
            raise IntegrityError(
                f"{num_held} of {self.num_usable_blocks} blocks are held by "
                f"{len(self._tables)} tables while no request is left"
            )
