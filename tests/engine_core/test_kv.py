from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

import pytest

from engine_core.kv.block import Block, FreeList
from engine_core.kv.block_pool import BlockPool, IntegrityError
from engine_core.kv.hashing import DIGEST_BYTES, BlockHashes, block_hash, root_hash
from engine_core.kv.manager import Fork, KVManager

if TYPE_CHECKING:
    from engine_core.kv.block_table import BlockTable


def ids(*values: int) -> array[int]:
    return array("i", values)


def compute(manager: KVManager, table: BlockTable) -> int:
    """Admits a whole sequence, computes it, and returns the tokens that were hit."""
    hit = manager.lookup(table)
    granted = manager.admit(table, hit, table.num_tokens - hit.num_cached_tokens, reserve=0)
    assert granted is not None
    manager.register_computed(table, table.num_tokens)
    manager.check_integrity()
    return hit.num_cached_tokens


def run_and_free(manager: KVManager, token_ids: array[int], salt: str = "") -> int:
    table = manager.new_table(token_ids, salt)
    hit = compute(manager, table)
    manager.free(table)
    manager.check_integrity()
    return hit


class TestFreeList:
    def test_order(self) -> None:
        blocks = [Block(number) for number in range(4)]
        free = FreeList()
        for block in blocks[:3]:
            free.append(block)
        free.prepend(blocks[3])
        assert [block.block_id for block in free] == [3, 0, 1, 2]
        free.remove(blocks[1])
        assert [block.block_id for block in free] == [3, 0, 2]
        assert len(free) == 3
        assert not blocks[1].linked
        assert [free.pop().block_id for _ in range(3)] == [3, 0, 2]
        assert len(free) == 0
        assert list(free) == []

    def test_refuses_a_block_twice(self) -> None:
        free = FreeList()
        block = Block(1)
        free.append(block)
        with pytest.raises(AssertionError, match="free already"):
            free.append(block)

    def test_refuses_to_pop_from_nothing(self) -> None:
        with pytest.raises(AssertionError, match="empty"):
            FreeList().pop()


class TestHashing:
    def test_same_block_after_another_prefix_hashes_differently(self) -> None:
        one = BlockHashes(ids(1, 2, 9, 9), 2, "").first(2)
        two = BlockHashes(ids(3, 4, 9, 9), 2, "").first(2)
        assert one[1] != two[1]

    def test_grows_with_the_ids(self) -> None:
        token_ids = ids(1, 2, 3)
        hashes = BlockHashes(token_ids, 2, "")
        assert len(hashes.first(1)) == 1
        token_ids.append(4)
        grown = list(hashes.first(2))
        assert grown == BlockHashes(ids(1, 2, 3, 4), 2, "").first(2)

    def test_never_covers_a_partial_block(self) -> None:
        with pytest.raises(AssertionError):
            BlockHashes(ids(1, 2, 3), 2, "").first(2)

    def test_digests_are_long_enough_to_resist_constructed_collisions(self) -> None:
        assert len(block_hash(root_hash(""), b"\0" * 64)) == DIGEST_BYTES >= 32

    def test_salt_is_tagged(self) -> None:
        # A salt must not be able to stand for another key: not for no salt, not
        # for another root, not for a block's hash (vllm-project/vllm#17045, #44701).
        salts = ["", "a", "b", "ab", "cache_salt", "smollm2-135m-instruct", "\0", "a\0"]
        roots = [root_hash(salt) for salt in salts]
        assert len(set(roots)) == len(salts)
        raw = b"cache_salt" + (1).to_bytes(8, "little") + b"a"
        assert block_hash(b"", raw) != root_hash("a")


class TestBlockPool:
    def test_null_block_is_never_handed_out(self) -> None:
        pool = BlockPool(5)
        assert pool.num_usable_blocks == 4
        taken = pool.allocate(4)
        assert taken is not None
        assert sorted(block.block_id for block in taken) == [1, 2, 3, 4]
        assert pool.allocate(1) is None

    def test_too_small(self) -> None:
        with pytest.raises(ValueError, match="num_blocks is 1"):
            BlockPool(1)

    def test_all_or_nothing(self) -> None:
        pool = BlockPool(4)
        before = [block.block_id for block in pool._free]
        assert pool.allocate(4) is None
        assert [block.block_id for block in pool._free] == before
        pool.check_integrity({})

    def test_touch_takes_a_block_out_of_the_free_list(self) -> None:
        pool = BlockPool(4)
        taken = pool.allocate(1)
        assert taken is not None
        assert pool.register(taken[0], b"h")
        pool.release(taken)
        assert (pool.num_free_blocks, pool.num_free_cached_blocks) == (3, 1)
        pool.touch(taken)
        pool.touch(taken)
        assert (pool.num_free_blocks, taken[0].ref_cnt) == (2, 2)
        assert pool.num_free_cached_blocks == 0
        pool.release(taken)
        assert (pool.num_free_blocks, pool.num_free_cached_blocks) == (2, 0)
        pool.release(taken)
        assert (pool.num_free_blocks, pool.num_free_cached_blocks) == (3, 1)
        assert pool.lookup([b"h"], 1) == taken
        pool.check_integrity({})

    def test_unhashed_blocks_go_first_and_hashed_ones_by_age(self) -> None:
        pool = BlockPool(5)
        a, b, c, d = pool.allocate(4) or []
        for block, name in ((a, b"a"), (b, b"b"), (d, b"d")):
            pool.register(block, name)
        pool.release([b])
        pool.release([a])
        pool.release([c])
        pool.release([d])
        order = [pool.allocate(1) for _ in range(4)]
        assert order == [[c], [b], [a], [d]]
        assert pool.num_cached_blocks == 0

    def test_eviction_forgets_the_hash(self) -> None:
        pool = BlockPool(2)
        taken = pool.allocate(1)
        assert taken is not None
        pool.register(taken[0], b"h")
        pool.release(taken)
        assert pool.allocate(1) == taken
        assert pool.lookup([b"h"], 1) == []
        assert taken[0].block_hash is None

    def test_second_block_of_the_same_content_stays_unhashed(self) -> None:
        pool = BlockPool(3)
        one, two = pool.allocate(2) or []
        assert pool.register(one, b"h")
        assert not pool.register(two, b"h")
        assert two.block_hash is None
        assert pool.lookup([b"h"], 1) == [one]

    def test_lookup_stops_at_the_first_gap(self) -> None:
        pool = BlockPool(4)
        one, two, three = pool.allocate(3) or []
        pool.register(one, b"1")
        pool.register(three, b"3")
        assert pool.lookup([b"1", b"2", b"3"], 3) == [one]
        assert pool.lookup([b"1", b"3"], 1) == [one]
        assert two.block_hash is None


class TestIntegrityCheck:
    """The check itself must see each kind of damage."""

    def make(self) -> KVManager:
        manager = KVManager(8, 2)
        compute(manager, manager.new_table(ids(1, 2, 3, 4, 5)))
        manager.check_integrity()
        return manager

    def held(self, manager: KVManager) -> Block:
        return next(block for block in manager.pool.blocks if block.ref_cnt)

    def test_count_too_high(self) -> None:
        manager = self.make()
        self.held(manager).ref_cnt += 1
        with pytest.raises(IntegrityError, match="1 of 7 blocks astray"):
            manager.check_integrity()

    def test_held_block_in_the_free_list(self) -> None:
        manager = self.make()
        manager.pool._free.append(self.held(manager))
        with pytest.raises(IntegrityError, match="astray"):
            manager.check_integrity()

    def test_free_block_lost(self) -> None:
        manager = self.make()
        manager.pool._free.pop()
        with pytest.raises(IntegrityError, match="astray"):
            manager.check_integrity()

    def test_free_list_length(self) -> None:
        manager = self.make()
        manager.pool._free._len += 1
        with pytest.raises(IntegrityError, match="counts 5"):
            manager.check_integrity()

    def test_free_list_cycle(self) -> None:
        manager = self.make()
        block = next(iter(manager.pool._free))
        block.next_free = block
        with pytest.raises(IntegrityError, match="cycle"):
            manager.check_integrity()

    def test_hash_without_an_entry(self) -> None:
        manager = self.make()
        manager.pool._cached.popitem()
        with pytest.raises(IntegrityError, match="1 hashes are mapped, 2 blocks carry one"):
            manager.check_integrity()

    def test_entry_of_another_block(self) -> None:
        manager = self.make()
        first, second = manager.pool._cached
        manager.pool._cached[first] = manager.pool._cached[second]
        with pytest.raises(IntegrityError, match="disagree"):
            manager.check_integrity()

    def test_null_block_in_use(self) -> None:
        manager = self.make()
        manager.pool.blocks[0].ref_cnt = 1
        with pytest.raises(IntegrityError, match="null block"):
            manager.check_integrity()

    def test_capacity_astray(self) -> None:
        manager = self.make()
        next(iter(manager._tables)).capacity += 2
        with pytest.raises(IntegrityError, match="3 blocks says it holds 8"):
            manager.check_integrity()

    def test_blocks_held_at_rest(self) -> None:
        manager = self.make()
        with pytest.raises(IntegrityError, match="3 of 7 blocks are held by 1 tables"):
            manager.check_all_free()


class TestKVManager:
    # vllm-project/vllm#3239, #9972: a prompt that is cached in full.
    @pytest.mark.parametrize(
        ("num_ids", "cached"), [(1, 0), (15, 0), (16, 0), (17, 16), (31, 16), (32, 16), (33, 32)]
    )
    def test_hit_never_covers_the_last_token(self, num_ids: int, cached: int) -> None:
        manager = KVManager(16, 16)
        token_ids = ids(*range(100, 100 + num_ids))
        assert run_and_free(manager, token_ids) == 0
        assert run_and_free(manager, token_ids) == cached
        assert run_and_free(manager, token_ids) == cached

    def test_salts_are_apart(self) -> None:
        manager = KVManager(64, 16)
        token_ids = ids(*range(100, 164))
        salts = ["tenant-a", "tenant-b", "tenant-a", "", "smollm2-135m-instruct"]
        assert [run_and_free(manager, token_ids, salt) for salt in salts] == [0, 0, 48, 0, 0]

    def test_nothing_is_known_before_it_is_computed(self) -> None:
        manager = KVManager(16, 2)
        token_ids = ids(1, 2, 3, 4, 5, 6)
        first = manager.new_table(token_ids)
        assert manager.admit(first, manager.lookup(first), 6, reserve=0) is not None
        assert manager.lookup(manager.new_table(token_ids)).num_cached_tokens == 0
        manager.register_computed(first, 3)
        assert manager.lookup(manager.new_table(token_ids)).num_cached_tokens == 2
        # The rest of the chunk never runs: it must not leave a hash.
        manager.free(first)
        assert manager.lookup(manager.new_table(token_ids)).num_cached_tokens == 2
        assert manager.pool.num_cached_blocks == 1
        manager.check_integrity()

    def test_a_live_prefix_is_shared(self) -> None:
        manager = KVManager(16, 2)
        first = manager.new_table(ids(1, 2, 3, 4, 5))
        compute(manager, first)
        second = manager.new_table(ids(1, 2, 3, 4, 9))
        assert compute(manager, second) == 4
        assert first.block_ids()[:2] == second.block_ids()[:2]
        assert first.block_ids()[2] != second.block_ids()[2]
        manager.free(first)
        manager.check_integrity()
        manager.free(second)
        manager.check_all_free()

    def test_admit_counts_free_hits_as_room(self) -> None:
        manager = KVManager(5, 2)
        token_ids = ids(1, 2, 3, 4, 5)
        run_and_free(manager, token_ids)
        other = manager.new_table(ids(7, 7))
        assert manager.admit(other, manager.lookup(other), 2, reserve=0) is not None
        table = manager.new_table(token_ids)
        hit = manager.lookup(table)
        assert (len(hit.blocks), hit.num_free) == (2, 2)
        # Three free blocks: two are the hit itself, one is new, none can be kept back.
        assert manager.admit(table, hit, 1, reserve=1) is None
        manager.check_integrity()
        assert manager.admit(table, hit, 1, reserve=0) is not None
        assert manager.num_free_blocks == 0
        manager.check_integrity()

    def test_admit_needs_room_for_all_known_ids(self) -> None:
        manager = KVManager(4, 2)
        table = manager.new_table(ids(*range(8)))
        assert manager.admit(table, manager.lookup(table), 2, reserve=0) is None
        assert manager.num_free_blocks == 3

    def test_admitting_never_evicts_its_own_hit(self) -> None:
        manager = KVManager(4, 2)
        run_and_free(manager, ids(1, 2, 3, 4, 5, 6))
        table = manager.new_table(ids(1, 2, 3, 4, 9, 9))
        hit = manager.lookup(table)
        assert hit.num_cached_tokens == 4
        granted = manager.admit(table, hit, 2, reserve=0)
        assert granted is not None
        assert granted[:2] == tuple(block.block_id for block in hit.blocks)
        assert len(set(granted)) == 3

    def test_grow(self) -> None:
        manager = KVManager(4, 2)
        table = manager.new_table(ids(1, 2, 3, 4, 5, 6, 7))
        assert manager.admit(table, manager.lookup(table), 1, reserve=0) is None
        table = manager.new_table(ids(1, 2, 3, 4, 5, 6))
        granted = manager.admit(table, manager.lookup(table), 1, reserve=0)
        assert granted is not None
        assert len(granted) == 1
        assert manager.grow(table, 2) == ()
        more = manager.grow(table, 6)
        assert more is not None
        assert table.block_ids() == granted + more
        assert manager.usage == 1.0
        assert manager.grow(table, 7) is None
        assert table.block_ids() == granted + more

    def test_tail_is_evicted_before_head(self) -> None:
        manager = KVManager(5, 2)
        run_and_free(manager, ids(1, 2, 3, 4, 5, 6, 7))
        # One block of four is unhashed; taking two evicts the last hashed one.
        other = manager.new_table(ids(9, 9, 9))
        assert manager.admit(other, manager.lookup(other), 3, reserve=0) is not None
        assert manager.lookup(manager.new_table(ids(1, 2, 3, 4, 5, 6, 7))).num_cached_tokens == 4

    def test_without_prefix_caching(self) -> None:
        manager = KVManager(16, 2, enable_prefix_caching=False)
        token_ids = ids(1, 2, 3, 4, 5)
        assert run_and_free(manager, token_ids) == 0
        assert run_and_free(manager, token_ids) == 0
        manager.count_lookup(manager.new_table(token_ids), 5, 0)
        assert manager.num_queried_tokens == 0
        assert manager.pool.num_cached_blocks == 0

    def test_reset_forgets_what_was_begun_before(self) -> None:
        manager = KVManager(16, 2)
        run_and_free(manager, ids(8, 8, 8))
        token_ids = ids(1, 2, 3, 4, 5, 6, 7)
        table = manager.new_table(token_ids)
        assert manager.admit(table, manager.lookup(table), 7, reserve=0) is not None
        manager.register_computed(table, 4)
        assert manager.reset_prefix_cache() == 3
        assert manager.reset_prefix_cache() == 0
        manager.register_computed(table, 7)
        assert manager.pool.num_cached_blocks == 0
        manager.check_integrity()
        manager.free(table)
        # Computed anew, it can be hit again.
        assert compute(manager, table) == 0
        manager.free(table)
        assert manager.lookup(manager.new_table(token_ids)).num_cached_tokens == 6

    def test_free_twice_is_harmless(self) -> None:
        manager = KVManager(8, 2)
        table = manager.new_table(ids(1, 2, 3))
        compute(manager, table)
        manager.free(table)
        manager.free(table)
        manager.check_integrity()
        manager.check_all_free()

    def test_bad_block_size(self) -> None:
        with pytest.raises(ValueError, match="block_size is 0"):
            KVManager(8, 0)


class TestFork:
    def computed(self, manager: KVManager, num_tokens: int, salt: str = "") -> BlockTable:
        table = manager.new_table(array("i", range(num_tokens)), salt)
        assert manager.admit(table, manager.lookup(table), num_tokens, 0) is not None
        manager.register_computed(table, num_tokens)
        return table

    def test_shares_full_blocks_and_copies_the_partial_one(self) -> None:
        manager = KVManager(10, 4)
        parent = self.computed(manager, 10)
        child = manager.new_table(array("i", [*range(10), 77]))
        fork = manager.fork(parent, child, 10)
        assert fork is not None
        assert fork.block_ids[:2] == parent.block_ids()[:2]
        assert fork.copy == (parent.block_ids()[2], fork.block_ids[2])
        assert manager.num_free_blocks == 9 - 4
        manager.check_integrity()
        assert manager.take_moves().copy == (fork.copy,)
        assert manager.take_moves().copy == ()
        # The child's own block becomes a hit under its own ids.
        child.token_ids.append(78)
        assert manager.grow(child, 12) == ()
        manager.register_computed(child, 12)
        other = manager.new_table(array("i", [*range(10), 77, 78, 1]))
        assert manager.lookup(other).num_cached_tokens == 12
        for table in (parent, child):
            manager.free(table)
        manager.check_all_free()

    def test_at_a_block_edge_there_is_nothing_to_copy(self) -> None:
        manager = KVManager(4, 4)
        parent = self.computed(manager, 8)
        fork = manager.fork(parent, manager.new_table(array("i", range(9))), 8)
        assert fork == Fork(parent.block_ids(), None)

    def test_out_of_room_is_none_and_changes_nothing(self) -> None:
        manager = KVManager(4, 4)
        parent = self.computed(manager, 10)
        child = manager.new_table(array("i", range(11)))
        assert manager.fork(parent, child, 10) is None
        assert not child.blocks
        manager.check_integrity()
        # Full blocks alone need no room.
        assert manager.fork(parent, child, 8) is not None
        manager.free(child)
        manager.free(parent)
        manager.check_all_free()

    def test_the_source_is_nobodys_until_the_plan_is_sealed(self) -> None:
        manager = KVManager(5, 4)
        parent = self.computed(manager, 3)
        child = manager.new_table(array("i", [0, 1, 2, 9]))
        fork = manager.fork(parent, child, 3)
        assert fork is not None
        assert fork.copy is not None
        manager.free(parent)
        manager.check_integrity()
        taken = manager.pool.allocate(manager.num_free_blocks)
        assert taken is not None
        assert fork.copy[0] not in [block.block_id for block in taken]
        manager.take_moves()
        assert manager.num_free_blocks == 1
        manager.pool.release(taken)
        manager.free(child)
        manager.check_all_free()

    def test_a_child_that_goes_takes_its_copy_along(self) -> None:
        manager = KVManager(5, 4)
        parent = self.computed(manager, 3)
        child = manager.new_table(array("i", [0, 1, 2, 9]))
        assert manager.fork(parent, child, 3) is not None
        manager.free(child)
        assert manager.take_moves().copy == ()
        manager.free(parent)
        manager.check_all_free()

    def test_after_a_reset_nothing_of_it_is_registered(self) -> None:
        manager = KVManager(10, 4)
        parent = self.computed(manager, 6)
        manager.reset_prefix_cache()
        child = manager.new_table(array("i", range(8)))
        assert manager.fork(parent, child, 6) is not None
        manager.register_computed(child, 8)
        assert manager.pool.num_cached_blocks == 0
