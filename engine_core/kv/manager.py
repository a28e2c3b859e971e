"""KV policy per sequence: what to reuse, what to take, when to make it known."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine_core.kv.block_pool import BlockPool, IntegrityError
from engine_core.kv.block_table import BlockTable
from engine_core.sched.plan import NO_MOVES, BlockMoves

if TYPE_CHECKING:
    from array import array
    from collections.abc import Sequence

    from engine_core.kv.block import Block
    from engine_core.kv.offload import KVOffload
    from engine_core.kv.window import KVWindow
    from engine_core.sched.plan import StepPlan, StepResult

__all__ = ["IntegrityError", "KVManager", "PrefixHit"]


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """The cached blocks that a sequence may begin with; taken only by admit()."""

    blocks: tuple[Block, ...]
    """Those on the device."""
    num_cached_tokens: int
    restores: tuple[int, ...] = ()
    """Which of the leading blocks are to be copied back from the host, ascending; the
    others are `blocks`."""
    partial: Block | None = None
    """A donor's block after these, of which the hit's last tokens are to be copied."""
    num_declined: int = 0
    """Blocks after these that the host has and that are computed, which is cheaper."""

    @property
    def num_blocks(self) -> int:
        return len(self.blocks) + len(self.restores)

    @property
    def num_free(self) -> int:
        """How many of the blocks no table holds, so that taking them uses room."""
        return sum(block.ref_cnt == 0 for block in self.blocks)


NO_HIT = PrefixHit((), 0)


@dataclass(frozen=True, slots=True)
class Fork:
    """What a table was given of another's."""

    block_ids: tuple[int, ...]
    copy: tuple[int, int] | None
    """(source, target) of the block that is to be copied, the last of block_ids."""


class KVManager:
    """The block tables of all sequences over one block pool.

    Out of room is a value (None), never an exception, and leaves everything as
    it was: only the scheduler decides who has to go.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        enable_prefix_caching: bool = True,
        offload: KVOffload | None = None,
        window: KVWindow | None = None,
    ) -> None:
        """num_blocks counts the null block. offload: where evicted content goes; it is
        lost by default. window: what all layers are limited to, if all are. Raises
        ValueError."""
        if block_size < 1:
            raise ValueError(f"block_size is {block_size}, must be at least 1")
        self.pool = BlockPool(num_blocks, offload.evicted if offload is not None else None)
        self.offload = offload
        self.block_size = block_size
        self.window = window
        self.enable_prefix_caching = enable_prefix_caching
        self.num_queried_tokens = 0
        """Prompt tokens looked up in the prefix cache since the start."""
        self.num_hit_tokens = 0
        """Prompt tokens found there, on the device."""
        self._copies: dict[BlockTable, tuple[Block, Block]] = {}
        """(source, target) by the target's table: of the plan in the making."""
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

    def blocks_ahead(self, table: BlockTable) -> int:
        """Blocks that its known ids will take beyond those it has, at most."""
        return self._at_once(self.blocks_for(table.num_tokens) - len(table.blocks))

    def _at_once(self, num_blocks: int) -> int:
        """How many of the blocks that a sequence will take it holds at the same time, at most."""
        if self.window is None:
            return num_blocks
        return min(num_blocks, self.window.max_blocks(self.block_size))

    def new_table(
        self,
        token_ids: array[int],
        cache_salt: str = "",
        *,
        adapter: bytes = b"",
        reads_cache: bool = True,
        writes_cache: bool = True,
    ) -> BlockTable:
        """An empty table for a sequence whose ids (type code "i") will grow. adapter: the
        digest of the one that computes its KV, empty for the base model."""
        return BlockTable(
            token_ids,
            self.block_size,
            cache_salt,
            adapter=adapter,
            reads_cache=reads_cache and self.enable_prefix_caching,
            writes_cache=writes_cache and self.enable_prefix_caching,
        )

    def share(self, donor: BlockTable, table: BlockTable, num_tokens: int) -> None:
        """From now on lookups of `table` find what `donor` holds of their first
        num_tokens ids, which must be the same; with or without a prefix cache."""
        table.donor = donor
        table.num_donated = num_tokens

    def lookup(self, table: BlockTable) -> PrefixHit:
        """The longest cached (or donated) prefix of full blocks, never the whole sequence:
        the last known token is always computed, since its logits are needed.

            0                num_cached                      num_tokens
            | full blocks, hit | computed: at least 1 token     |

        Changes nothing: the hit is only good until the pool changes.
        """
        limit = (table.num_tokens - 1) // self.block_size
        hit = NO_HIT
        if table.reads_cache:
            hit = self._find_cached(table.hashes.first(limit), limit)
        if table.donor is not None:
            donated = self._donated(table, table.donor)
            if donated.num_cached_tokens > hit.num_cached_tokens:
                hit = donated
        return hit

    def _find_cached(self, hashes: Sequence[bytes], limit: int) -> PrefixHit:
        """On the device first, and on the host where it has nothing (more)."""
        blocks = self.pool.lookup(hashes, limit)
        if self.offload is None or len(blocks) == limit:
            return PrefixHit(tuple(blocks), len(blocks) * self.block_size) if blocks else NO_HIT
        run: list[Block | None] = list(blocks)
        for block_hash in hashes[len(blocks) : limit]:
            block = self.pool.find(block_hash)
            if block is None and block_hash not in self.offload.pool:
                break
            run.append(block)
        num_taken, restores, num_declined = self.offload.choose(run)
        return PrefixHit(
            tuple(block for block in run[:num_taken] if block is not None),
            num_taken * self.block_size,
            restores=restores,
            num_declined=num_declined,
        )

    def _donated(self, table: BlockTable, donor: BlockTable) -> PrefixHit:
        """Only what is computed, but that to the token."""
        # KV from before a reset must not come back under the hashes of new blocks. What the
        # donor has given back, the prefix cache may still have.
        if donor.cache_generation != self._generation or donor.num_reclaimed:
            return NO_HIT
        num_tokens = min(donor.num_computed, table.num_donated, table.num_tokens - 1)
        num_full, rest = divmod(num_tokens, self.block_size)
        partial = donor.blocks[num_full] if rest else None
        return PrefixHit(tuple(donor.blocks[:num_full]), num_tokens, partial=partial)

    def count_lookup(
        self,
        table: BlockTable,
        num_prompt_tokens: int,
        num_cached_tokens: int,
        hit: PrefixHit = NO_HIT,
    ) -> None:
        """Counts a lookup whose request was admitted, once a request.

        num_cached_tokens: of the prompt's, restored ones among them."""
        if not table.reads_cache:
            return
        num_restored = min(len(hit.restores) * self.block_size, num_cached_tokens)
        self.num_queried_tokens += num_prompt_tokens
        self.num_hit_tokens += num_cached_tokens - num_restored
        if self.offload is not None:
            num_missed = num_prompt_tokens - num_cached_tokens + num_restored
            self.offload.num_queried_tokens += num_missed
            self.offload.num_hit_tokens += num_restored

    def admit(
        self, table: BlockTable, hit: PrefixHit, num_new_tokens: int, reserve: int
    ) -> tuple[int, ...] | None:
        """Takes the hit and room for a first chunk.

            0          num_cached        +num_new             num_tokens
            | hit: touch | new: allocate   | later: must fit too  |

        What the hit has on the host gets fresh blocks too, to be restored into, and so
        does a donor's partial block, to be copied.

        reserve: blocks that would have to stay free if all known ids, not only
        this chunk, were given room. Nothing is set aside for the later ids.

        Returns the ids of the blocks now in the table, or None if short.
        """
        assert not table.blocks, "admitted twice"
        num_tokens = hit.num_cached_tokens + num_new_tokens
        assert num_tokens <= table.num_tokens, (num_tokens, table.num_tokens)
        num_first = self.blocks_for(num_tokens) - len(hit.blocks)
        num_all = self._at_once(self.blocks_for(table.num_tokens) - len(hit.blocks))
        num_all = max(num_first, num_all)
        if num_all + hit.num_free + reserve > self.pool.num_free_blocks:
            return None
        # The hit leaves the free list before anything is taken from it, so that
        # allocation can't evict it.
        self.pool.touch(hit.blocks)
        sources = self._pin(table, hit)
        fresh = self.pool.allocate(num_first)
        assert fresh is not None, (num_all, hit.num_free, self.pool.num_free_blocks)
        table.blocks.extend(hit.blocks)
        for index, host_id in zip(hit.restores, sources, strict=True):
            table.blocks.insert(index, self._restore(table, index, host_id, fresh.pop()))
        table.blocks.extend(fresh)
        if hit.partial is not None:
            self._copy(hit.partial, table, table.blocks[hit.num_blocks])
        table.capacity = len(table.blocks) * self.block_size
        table.num_computed = hit.num_blocks * self.block_size
        table.num_registered = hit.num_blocks
        table.cache_generation = self._generation
        self._tables.add(table)
        return table.block_ids()

    def fork(self, parent: BlockTable, child: BlockTable, num_tokens: int) -> Fork | None:
        """Gives an empty table the first num_tokens tokens' KV of another, whose ids there
        are the same and are computed, or will be by the plans made so far.

            0                          num_full * B      num_tokens
            | full blocks: one more reference | partial: copied into a new block |

        Returns what the child begins with, or None if short.
        """
        assert not child.blocks, "forked twice"
        # Copies of a plan are made at the same time.
        assert parent not in self._copies, "a copy of what is yet to be copied"
        assert num_tokens <= parent.capacity, (num_tokens, parent.capacity)
        num_full, rest = divmod(num_tokens, self.block_size)
        num_reclaimed = parent.num_reclaimed
        if num_reclaimed:
            assert self.window is not None
            first_seen = num_tokens + 1 - self.window.num_tokens
            assert num_reclaimed * self.block_size <= first_seen, (num_reclaimed, num_tokens)
        fresh = self.pool.allocate(1 if rest else 0)
        if fresh is None:
            return None
        shared = parent.blocks[:num_full]
        self.pool.touch(shared[num_reclaimed:])
        child.blocks.extend(shared)
        child.blocks.extend(fresh)
        child.capacity = len(child.blocks) * self.block_size
        child.num_computed = num_full * self.block_size
        # Those that are not, the parent will register.
        child.num_registered = num_full
        child.num_reclaimed = num_reclaimed
        child.cache_generation = parent.cache_generation
        child.hashes.adopt(parent.hashes, num_full)
        self._tables.add(child)
        copy = self._copy(parent.blocks[num_full], child, fresh[0]) if fresh else None
        return Fork(child.block_ids(), copy)

    def _copy(self, source: Block, table: BlockTable, target: Block) -> tuple[int, int]:
        """Plans a copy of a block into one that `table` alone holds.

        Whoever got the source next, by a restore of the same plan say, would overwrite
        it before it is read. So it is held until the plan is sealed; later plans run
        later, also those that are made before this one has run.
        """
        self.pool.touch([source])
        self._copies[table] = (source, target)
        return source.block_id, target.block_id

    def _release_copy(self, table: BlockTable) -> None:
        """Of a table that gives up its blocks before the copy was made."""
        copy = self._copies.pop(table, None)
        if copy is not None:
            self.pool.release([copy[0]])

    def _pin(self, table: BlockTable, hit: PrefixHit) -> list[int]:
        """Host blocks of what is to be restored, which allocation could replace too."""
        if self.offload is None:
            return []
        self.offload.policy.admitted(len(hit.restores), hit.num_declined)
        hashes = table.hashes.first(hit.num_blocks)
        return [self.offload.pin(hashes[index]) for index in hit.restores]

    def _restore(self, table: BlockTable, index: int, host_id: int, block: Block) -> Block:
        """Known to the cache from now on: whoever hits it computes after this plan's moves."""
        assert self.offload is not None
        self.offload.restore(host_id, block.block_id)
        self.pool.register(block, table.hashes.first(index + 1)[index])
        return block

    def take_moves(self) -> BlockMoves:
        """The blocks to copy before anything that was planned since the last call computes.

        The plan that takes them must be launched.
        """
        copies = tuple((src.block_id, dst.block_id) for src, dst in self._copies.values())
        self.pool.release(source for source, _ in self._copies.values())
        self._copies.clear()
        offloads, restores = ((), ()) if self.offload is None else self.offload.take_moves()
        return (
            BlockMoves(offloads, restores, copies) if offloads or restores or copies else NO_MOVES
        )

    def observe_step(self, plan: StepPlan, result: StepResult, step_s: float) -> None:
        """A step took step_s seconds in all: what recomputing or restoring costs."""
        if self.offload is None:
            return
        policy = self.offload.policy
        if plan.moves.restore:
            policy.observe_restore(len(plan.moves.restore), result.restore_s)
        # Verifying draft tokens is no prefill: logits of each are wanted.
        if not plan.has_drafts and any(seq.num_new_tokens > 1 for seq in plan.seqs):
            compute_s = max(0.0, step_s - result.restore_s - result.offload_s)
            policy.observe_prefill(plan.num_tokens, compute_s)

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
        table.num_computed = num_computed_tokens
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
        if self.window is not None:
            self._reclaim(table, self.window.num_unseen_blocks(table, self.block_size))

    def _reclaim(self, table: BlockTable, num_blocks: int) -> None:
        """Gives back the leading num_blocks, of which the cache keeps what it can."""
        start = table.num_reclaimed
        if num_blocks <= start:
            return
        unseen = table.blocks[start:num_blocks]
        table.blocks[start:num_blocks] = [self.pool.null_block] * len(unseen)
        table.num_reclaimed = num_blocks
        self.pool.release(reversed(unseen))

    def free(self, table: BlockTable) -> None:
        """Gives back all blocks, tail first. A table without blocks is fine."""
        self._release_copy(table)
        self.pool.release(reversed(table.blocks[table.num_reclaimed :]))
        table.blocks.clear()
        table.capacity = 0
        table.num_computed = 0
        table.num_registered = 0
        table.num_reclaimed = 0
        self._tables.discard(table)

    def reset_prefix_cache(self) -> int:
        """Forgets all cached content, also what running sequences have begun.

        They go on undisturbed; their later blocks are not registered. Returns
        the number of blocks that could have been hit, on the device and on the host.
        """
        self._generation += 1
        num_forgotten = self.pool.forget_all()
        return num_forgotten + (self.offload.forget_all() if self.offload is not None else 0)

    def check_integrity(self) -> None:
        """Compares tables and pool. O(num_blocks). Raises IntegrityError."""
        held: Counter[int] = Counter(source.block_id for source, _ in self._copies.values())
        for table in self._tables:
            block_ids, num_reclaimed = table.block_ids(), table.num_reclaimed
            held.update(block_ids[num_reclaimed:])
            if any(block_ids[:num_reclaimed]) or num_reclaimed > table.num_registered:
                raise IntegrityError(
                    f"{num_reclaimed} blocks are given back of {table.num_registered} that are "
                    f"registered: {block_ids}"
                )
            if table.capacity != len(table.blocks) * self.block_size:
                raise IntegrityError(
                    f"a table of {len(table.blocks)} blocks says it holds {table.capacity} tokens"
                )
            if table.num_computed > table.capacity:
                raise IntegrityError(
                    f"{table.num_computed} tokens are computed in room for {table.capacity}"
                )
            if table.num_registered > len(table.blocks):
                raise IntegrityError(
                    f"{table.num_registered} of {len(table.blocks)} blocks are registered"
                )
        self.pool.check_integrity(held)
        if self.offload is not None:
            self.offload.check_integrity()

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
