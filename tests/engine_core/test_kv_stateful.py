"""The KV manager under random lives of sequences, with a model of what each slot
holds: the invariants must hold after every single action."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    rule,
)

from engine_core.kv.hashing import BlockHashes
from engine_core.kv.manager import KVManager
from engine_core.kv.window import KVWindow

if TYPE_CHECKING:
    from engine_core.kv.block_table import BlockTable

# Few values and short prompts, so that prefixes collide all the time.
PROMPTS = st.lists(st.integers(0, 1), min_size=1, max_size=14)
SALTS = st.sampled_from(["", "", "x"])


@dataclass(eq=False)
class Live:
    table: BlockTable
    salt: str
    computed: int = 0
    history: list[tuple[int, ...]] = field(default_factory=list)


class KVMachine(RuleBasedStateMachine):
    live: ClassVar[Bundle[Live]] = Bundle("live")
    waiting: ClassVar[Bundle[Live]] = Bundle("waiting")

    @initialize(num_blocks=st.integers(2, 14), block_size=st.sampled_from([1, 2, 3, 4]))
    def build(self, num_blocks: int, block_size: int) -> None:
        self.manager = KVManager(num_blocks, block_size)
        self.size = block_size
        self.held: list[Live] = []
        self.slots: dict[tuple[int, int], tuple[str, tuple[int, ...]]] = {}
        """(block id, offset) -> the salt and whole prefix whose KV was written."""

    def state(self) -> object:
        pool = self.manager.pool
        return (
            [(block.ref_cnt, block.block_hash) for block in pool.blocks],
            [block.block_id for block in pool._free],
            [one.table.block_ids() for one in self.held],
        )

    def compute(self, one: Live, end: int) -> None:
        """The device runs: makes the copies, then writes the slots of [computed, end)."""
        self.run_copies()
        ids = tuple(one.table.token_ids)
        for position in range(one.computed, end):
            block, offset = divmod(position, self.size)
            slot = (one.table.blocks[block].block_id, offset)
            self.slots[slot] = (one.salt, ids[: position + 1])
        one.computed = end
        self.manager.register_computed(one.table, end)

    def try_admit(self, one: Live, share: float, reserve: int) -> bool:
        hit = self.manager.lookup(one.table)
        num_new = max(1, int((one.table.num_tokens - hit.num_cached_tokens) * share))
        before = self.state()
        granted = self.manager.admit(one.table, hit, num_new, reserve)
        if granted is None:
            assert self.state() == before
            return False
        assert hit.num_cached_tokens < one.table.num_tokens
        assert granted == one.table.block_ids()
        assert self.manager.num_free_blocks >= reserve
        self.held.append(one)
        one.computed = hit.num_cached_tokens
        one.history = [granted]
        self.compute(one, hit.num_cached_tokens + num_new)
        return True

    @rule(
        target=live,
        prompt=PROMPTS,
        salt=SALTS,
        share=st.floats(0.1, 1),
        reserve=st.integers(0, 2),
    )
    def admit(self, prompt: list[int], salt: str, share: float, reserve: int) -> object:
        one = Live(self.manager.new_table(array("i", prompt), salt), salt)
        return one if self.try_admit(one, share, reserve) else multiple()

    @rule(one=live, count=st.integers(1, 6))
    def grow(self, one: Live, count: int) -> None:
        """A chunk of what is known, or a decode that adds a token first."""
        table = one.table
        if one.computed == table.num_tokens:
            table.token_ids.append(count % 2)
        end = min(one.computed + count, table.num_tokens)
        before = self.state()
        added = self.manager.grow(table, end)
        if added is None:
            assert self.state() == before
            return
        one.history.append(added)
        self.compute(one, end)

    def least_fork(self, one: Live) -> int:
        """Tokens that a fork shares at least: all that its next one sees is still held."""
        return 0

    @rule(target=live, one=live, share=st.floats(0, 1), last=st.integers(0, 1))
    def fork(self, one: Live, share: float, last: int) -> object:
        """Another sequence goes on from what is computed of this one."""
        if one.table in self.manager._copies:
            self.run_copies()
        num_tokens = max(self.least_fork(one), int(one.computed * share))
        token_ids = array("i", [*one.table.token_ids[:num_tokens], last])
        twin = Live(self.manager.new_table(token_ids, one.salt), one.salt, computed=num_tokens)
        before = self.state()
        fork = self.manager.fork(one.table, twin.table, num_tokens)
        if fork is None:
            assert num_tokens % self.size
            assert self.manager.num_free_blocks == 0
            assert self.state() == before
            return multiple()
        num_full, rest = divmod(num_tokens, self.size)
        assert fork.block_ids == twin.table.block_ids()
        assert fork.block_ids[:num_full] == one.table.block_ids()[:num_full]
        assert (fork.copy is not None) == (rest > 0)
        self.held.append(twin)
        twin.history = [fork.block_ids]
        return twin

    @rule()
    def seal(self) -> None:
        """The plan is launched: the device makes the copies, and reads first."""
        self.run_copies()

    def run_copies(self) -> None:
        copies = self.manager.take_moves().copy
        read = [
            (target, offset, self.slots[source, offset])
            for source, target in copies
            for offset in range(self.size)
            if (source, offset) in self.slots
        ]
        self.slots.update({(target, offset): content for target, offset, content in read})

    @rule(one=live, count=st.integers(1, 6))
    def grow_and_never_run(self, one: Live, count: int) -> None:
        """Room is taken, but the chunk does not get to run."""
        end = min(one.computed + count, one.table.num_tokens)
        added = self.manager.grow(one.table, end)
        one.history.append(added or ())

    @rule(one=consumes(live))
    def finish(self, one: Live) -> None:
        self.manager.free(one.table)
        self.held.remove(one)

    @rule(target=waiting, one=consumes(live))
    def preempt(self, one: Live) -> Live:
        self.manager.free(one.table)
        self.held.remove(one)
        one.computed = 0
        return one

    @rule(target=live, one=consumes(waiting), share=st.floats(0.1, 1))
    def resume(self, one: Live, share: float) -> object:
        return one if self.try_admit(one, share, 0) else multiple()

    @rule()
    def evict_by_pressure(self) -> None:
        """Somebody takes all free blocks for a moment."""
        free = self.manager.num_free_blocks
        if not free:
            return
        flood = Live(self.manager.new_table(array("i", [7] * (free * self.size)), "flood"), "flood")
        assert self.try_admit(flood, 0.01, 0) or self.manager.lookup(flood.table).blocks
        if flood in self.held:
            self.manager.grow(flood.table, flood.table.num_tokens)
            self.finish(flood)

    @rule()
    def reset(self) -> None:
        self.manager.reset_prefix_cache()
        assert self.manager.pool.num_cached_blocks == 0

    @invariant()
    def bookkeeping_is_sound(self) -> None:
        self.manager.check_integrity()
        assert self.manager.num_tables == len(self.held)

    def first_seen(self, one: Live) -> int:
        """The first position that its next token sees."""
        return 0

    @invariant()
    def every_sequence_reads_its_own_kv(self) -> None:
        # What is yet to be copied is still to be read where it comes from.
        read_at = {dst.block_id: src.block_id for src, dst in self.manager._copies.values()}
        for one in self.held:
            ids = tuple(one.table.token_ids)
            for position in range(self.first_seen(one), one.computed):
                block, offset = divmod(position, self.size)
                block_id = one.table.blocks[block].block_id
                slot = (read_at.get(block_id, block_id), offset)
                assert self.slots[slot] == (one.salt, ids[: position + 1])

    @invariant()
    def tables_are_append_only(self) -> None:
        for one in self.held:
            taken = tuple(i for part in one.history for i in part)
            num_reclaimed = one.table.num_reclaimed
            assert one.table.block_ids()[num_reclaimed:] == taken[num_reclaimed:]
            assert not any(one.table.block_ids()[:num_reclaimed])
            # Whole blocks only, that no later token sees.
            assert num_reclaimed * self.size <= self.first_seen(one)

    @invariant()
    def hashes_name_what_blocks_hold(self) -> None:
        for block_hash, block in self.manager.pool._cached.items():
            salt, prefix = self.slots[block.block_id, self.size - 1]
            assert len(prefix) % self.size == 0
            count = len(prefix) // self.size
            assert BlockHashes(array("i", prefix), self.size, salt).first(count)[-1] == block_hash
            for offset in range(self.size):
                cut = len(prefix) - self.size + offset + 1
                assert self.slots[block.block_id, offset] == (salt, prefix[:cut])

    @invariant()
    def blocks_are_shared_only_as_full_equal_prefixes(self) -> None:
        owners: dict[int, tuple[str, tuple[int, ...]]] = {}
        for one in self.held:
            ids = tuple(one.table.token_ids)
            for index, block_id in enumerate(one.table.block_ids()):
                if index < one.table.num_reclaimed:
                    continue
                end = (index + 1) * self.size
                mine = (one.salt, ids[:end])
                if block_id in owners:
                    assert owners[block_id] == mine
                    assert end <= one.computed
                owners[block_id] = mine

    def teardown(self) -> None:
        if hasattr(self, "manager"):
            for one in list(self.held):
                self.finish(one)
            self.manager.check_integrity()
            self.manager.check_all_free()


class WindowedKVMachine(KVMachine):
    """Every layer has a window, so leading blocks are given back."""

    @initialize(
        num_blocks=st.integers(2, 14),
        block_size=st.sampled_from([1, 2, 3, 4]),
        window=st.integers(1, 8),
    )
    def build(self, num_blocks: int, block_size: int, window: int) -> None:
        super().build(num_blocks, block_size)
        self.manager.window = KVWindow(window, max_chunk=14)
        self.window = window

    def first_seen(self, one: Live) -> int:
        return max(0, one.computed + 1 - self.window)

    def least_fork(self, one: Live) -> int:
        num_reclaimed = one.table.num_reclaimed
        return num_reclaimed * self.size + self.window - 1 if num_reclaimed else 0


MACHINE_SETTINGS = settings(
    max_examples=150,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    derandomize=True,
)
TestKVMachine = KVMachine.TestCase
TestKVMachine.settings = MACHINE_SETTINGS
TestWindowedKVMachine = WindowedKVMachine.TestCase
TestWindowedKVMachine.settings = settings(MACHINE_SETTINGS, max_examples=60)
