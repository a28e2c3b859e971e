"""The host tier: its pool, what it costs, and what the manager makes of it."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Any

import pytest
import torch

from engine_core.device.cpu import CpuDevice
from engine_core.engine_builder import build_engine
from engine_core.kv.block_pool import IntegrityError
from engine_core.kv.host_pool import HostPool
from engine_core.kv.manager import KVManager
from engine_core.kv.offload import KVOffload
from engine_core.kv.restore_policy import RETRY_AFTER, MeasuredCosts, RestorePolicy
from engine_core.runner.offload import HostKV
from engine_core.sched.plan import NO_MOVES, BlockMoves
from kernels.ops import KVCache
from pagewire.config import EngineConfig
from pagewire.errors import ConfigError
from tests.support.fake_model import FakeEngine, alone
from tests.support.tiny_model import TinySpec, write_hf

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

A, B, C = b"a", b"b", b"c"
DEVICE, HOST = False, True


class TestHostPool:
    def test_the_least_recently_used_is_replaced(self) -> None:
        pool = HostPool(2)
        first, second = pool.store(A), pool.store(B)
        pool.unpin_all()
        pool.pin(A)
        pool.unpin_all()
        assert pool.store(C) == second
        assert B not in pool
        assert pool.settled_items() == [(A, first)]
        pool.check_integrity()

    def test_what_a_plan_touches_stays_until_it_is_sealed(self) -> None:
        pool = HostPool(2)
        pool.store(A)
        pool.unpin_all()
        pool.pin(A)
        assert pool.store(B) is not None
        assert pool.store(C) is None
        pool.unpin_all()
        assert pool.store(C) is not None
        assert A not in pool
        pool.check_integrity()

    def test_forgets_all(self) -> None:
        pool = HostPool(3)
        pool.store(A)
        pool.store(B)
        assert pool.forget_all() == 2
        assert pool.num_used_blocks == 0
        pool.check_integrity()

    def test_a_block_that_two_own_is_found(self) -> None:
        pool = HostPool(2)
        pool.store(A)
        pool._free.append(pool._ids[A])
        with pytest.raises(IntegrityError, match="each once"):
            pool.check_integrity()


class TestRestorePolicy:
    def test_restores_all_before_anything_is_measured(self) -> None:
        policy = RestorePolicy(16)
        assert policy.num_worth([DEVICE, HOST, HOST]) == 3
        policy.observe_prefill(100, 1.0)
        assert policy.num_worth([HOST]) == 1

    @pytest.mark.parametrize(("restore_s", "num"), [(0.15, 3), (0.17, 1)])
    def test_takes_the_cheaper(self, restore_s: float, num: int) -> None:
        policy = RestorePolicy(16, MeasuredCosts(restore_s, 0.01))  # a block's prefill: 0.16 s
        assert policy.num_worth([DEVICE, HOST, HOST]) == num

    def test_a_dear_block_is_worth_the_device_blocks_after_it(self) -> None:
        policy = RestorePolicy(16, MeasuredCosts(0.5, 0.01))
        assert policy.num_worth([DEVICE, HOST, DEVICE, DEVICE]) == 1
        assert policy.num_worth([DEVICE, HOST, DEVICE, DEVICE, DEVICE, HOST]) == 5

    def test_follows_what_is_measured(self) -> None:
        policy = RestorePolicy(16, MeasuredCosts(0.01, 0.01))
        assert policy.num_worth([HOST]) == 1
        for _ in range(3):
            policy.observe_restore(4, 4.0)
        assert policy.num_worth([HOST]) == 0
        for _ in range(20):
            policy.observe_prefill(64, 64 * 0.2)
        assert policy.num_worth([HOST]) == 1

    def test_a_large_step_counts_for_more(self) -> None:
        policy = RestorePolicy(1, MeasuredCosts(0.02, 0.01))
        policy.observe_prefill(1000, 10.0)
        policy.observe_prefill(2, 1.0)  # half a second a token, but two of them
        assert policy.num_worth([HOST]) == 0

    def test_what_is_never_done_is_tried_again(self) -> None:
        policy = RestorePolicy(16, MeasuredCosts(1.0, 0.001))
        for _ in range(RETRY_AFTER):
            assert policy.num_worth([HOST]) == 0
            policy.admitted(0, 1)
        assert policy.num_worth([HOST]) == 1
        policy.admitted(1, 0)
        assert policy.num_worth([HOST]) == 0


def tiers(num_blocks: int, num_host_blocks: int, **costs: float) -> KVManager:
    measured = MeasuredCosts(**costs) if costs else None
    return KVManager(num_blocks, 2, offload=KVOffload(num_host_blocks, RestorePolicy(2, measured)))


def run(manager: KVManager, *ids: int, salt: str = "", **reads: bool) -> tuple[int, BlockMoves]:
    """A sequence comes, is computed and goes: its cached tokens, and the plan's moves."""
    table = manager.new_table(array("i", ids), salt, **reads)
    hit = manager.lookup(table)
    num_new = table.num_tokens - hit.num_cached_tokens
    assert manager.admit(table, hit, num_new, reserve=0) is not None
    manager.count_lookup(table, table.num_tokens, hit.num_cached_tokens, hit)
    moves = manager.take_moves()
    assert manager.offload is not None
    assert manager.offload.pool.num_pinned_blocks == 0
    manager.register_computed(table, table.num_tokens)
    manager.free(table)
    manager.check_integrity()
    return hit.num_cached_tokens, moves


class TestManager:
    def test_evicted_blocks_come_back(self) -> None:
        manager = tiers(4, 8)  # three usable blocks of two tokens
        assert run(manager, 1, 2, 3, 4, 5) == (0, NO_MOVES)
        _, moves = run(manager, 9, 9, 8, 8, 7)
        # The tail is evicted first, and its unhashed last block was free anyway.
        assert [source for source, _ in moves.offload] == [2, 1]
        cached, moves = run(manager, 1, 2, 3, 4, 5)
        assert cached == 4
        assert len(moves.restore) == 2
        offload = manager.offload
        assert offload is not None
        assert (offload.num_queried_tokens, offload.num_hit_tokens) == (5 + 5 + 5, 4)
        assert (manager.num_queried_tokens, manager.num_hit_tokens) == (15, 0)

    def test_a_block_that_the_host_has_is_not_copied_again(self) -> None:
        manager = tiers(4, 8)
        for _ in range(3):
            run(manager, 1, 2, 3, 4, 5)
            run(manager, 9, 9, 8, 8, 7)
        assert manager.offload is not None
        assert manager.offload.num_offloaded_blocks == 4
        assert manager.offload.num_restored_blocks == 2 * 4

    def test_what_is_to_be_restored_is_not_replaced_by_the_same_plan(self) -> None:
        manager = tiers(4, 2)
        run(manager, 1, 2, 3, 4, 5)
        run(manager, 9, 9, 8, 8, 7)
        # Both host blocks are read by this plan, so what it evicts is lost.
        cached, moves = run(manager, 1, 2, 3, 4, 5)
        assert (cached, len(moves.restore), moves.offload) == (4, 2, ())
        assert run(manager, 9, 9, 8, 8, 7)[0] == 0

    def test_device_and_host_blocks_in_turn(self) -> None:
        manager = tiers(8, 8)
        run(manager, 1, 2, 3, 4, 5, 6, 7)
        hashes = manager.new_table(array("i", (1, 2, 3, 4, 5, 6, 7))).hashes.first(3)
        middle = manager.pool.find(hashes[1])
        assert middle is not None
        kept = [manager.pool.find(hashes[0]), manager.pool.find(hashes[2])]
        manager.pool._forget(middle)
        cached, moves = run(manager, 1, 2, 3, 4, 5, 6, 7)
        assert cached == 6
        assert moves.offload[0][0] == middle.block_id
        assert moves.restore == ((moves.offload[0][1], moves.restore[0][1]),)
        assert [manager.pool.find(hashes[0]), manager.pool.find(hashes[2])] == kept

    def test_salts_are_apart_and_skipping_skips_both(self) -> None:
        manager = tiers(4, 8)
        run(manager, 1, 2, 3, 4, 5, salt="x")
        run(manager, 9, 9, 8, 8, 7)
        assert run(manager, 1, 2, 3, 4, 5)[0] == 0
        assert run(manager, 1, 2, 3, 4, 5, salt="y")[0] == 0
        assert run(manager, 1, 2, 3, 4, 5, salt="x", reads_cache=False)[0] == 0
        assert run(manager, 1, 2, 3, 4, 5, salt="x")[0] == 4

    def test_a_reset_clears_both(self) -> None:
        manager = tiers(4, 8)
        run(manager, 1, 2, 3, 4, 5)
        run(manager, 9, 9, 8, 8, 7)
        assert manager.reset_prefix_cache() == 4
        assert manager.reset_prefix_cache() == 0
        assert run(manager, 1, 2, 3, 4, 5) == (0, NO_MOVES)

    def test_recomputes_where_that_is_cheaper(self) -> None:
        manager = tiers(4, 8, restore_s_per_block=1.0, prefill_s_per_token=0.1)
        run(manager, 1, 2, 3, 4, 5)
        run(manager, 9, 9, 8, 8, 7)
        cached, moves = run(manager, 1, 2, 3, 4, 5)
        assert (cached, moves.restore) == (0, ())

    def test_out_of_room_changes_nothing(self) -> None:
        manager = tiers(4, 8)
        run(manager, 1, 2, 3, 4, 5)
        run(manager, 9, 9, 8, 8, 7)
        table = manager.new_table(array("i", (1, 2, 3, 4, 5, 6, 7)))
        hit = manager.lookup(table)
        assert hit.num_cached_tokens == 4
        assert manager.admit(table, hit, 1, reserve=0) is None
        assert manager.take_moves() is NO_MOVES
        manager.check_integrity()


class TestEngine:
    """Over the fake model, whose KV shows each slip."""

    def make(self, **more: Any) -> FakeEngine:
        more = {"num_blocks": 4, "block_size": 4, "num_host_blocks": 16} | more
        return FakeEngine(**more)

    def test_restored_tokens_count_as_cached(self) -> None:
        engine = self.make()
        first, second = [3, 5, 7, 3, 5, 7, 3, 5, 9], [4, 4, 4, 4, 4, 4, 4, 4, 4]
        for request_id, prompt in enumerate((first, second, first)):
            engine.add(request_id, prompt, max_tokens=4, ignore_eos=True)
            engine.run()
            assert engine.of(request_id).token_ids == alone(prompt, 4, ())
        assert engine.of(2).finished[0].num_cached_tokens == 8
        assert engine.stats is not None
        assert engine.stats.host_cache_hits == 8
        assert engine.stats.total_restored_blocks == 2
        assert engine.stats.num_used_host_blocks > 0
        assert engine.stats.num_host_blocks == 16

    def test_a_preempted_request_is_restored(self) -> None:
        engine = self.make(num_blocks=8)
        prompts = [[3 + n] * 9 for n in range(3)]
        for request_id, prompt in enumerate(prompts):
            engine.add(request_id, prompt, max_tokens=12, ignore_eos=True)
        engine.run()
        for request_id, prompt in enumerate(prompts):
            assert engine.of(request_id).token_ids == alone(prompt, 12, ())
        assert engine.scheduler.total_preemptions > 0
        assert engine.offload is not None
        assert engine.offload.num_restored_blocks > 0

    def test_the_runners_word_decides(self) -> None:
        engine = self.make(step_s=lambda num_tokens: 0.01 * num_tokens)
        engine.runner.block_copy_s = 0.1
        first, second = [3, 5, 7, 3, 5, 7, 3, 5, 9], [4, 4, 4, 4, 4, 4, 4, 4, 4]
        cached = []
        for request_id in range(6):
            prompt = second if request_id % 2 else first
            engine.add(request_id, prompt, max_tokens=1)
            engine.run()
            cached.append(engine.of(request_id).finished[0].num_cached_tokens)
        # The first restore shows that it takes longer than computing four tokens.
        assert cached == [0, 0, 8, 0, 0, 0]


class TestHostKV:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
    @pytest.mark.parametrize("share_blocks", [False, True])
    def test_blocks_go_there_and_back(self, dtype: torch.dtype, share_blocks: bool) -> None:
        """Blocks of 24 elements, and of 25, which are words of single bytes."""
        generator = torch.Generator().manual_seed(1)
        for shape in ((6, 3, 2, 4, 2, 3), (6, 3, 2, 5, 1, 5)):
            drawn = torch.randint(-99, 99, shape, generator=generator).to(dtype)
            pairs = [layer.unbind(1) for layer in drawn.unbind(1)]
            if not share_blocks:
                pairs = [(k.clone(), v.clone()) for k, v in pairs]
            self.go_there_and_back([KVCache(*pair) for pair in pairs])

    def go_there_and_back(self, caches: Sequence[KVCache]) -> None:
        before = [[paged.clone() for paged in cache.paged] for cache in caches]
        host = HostKV(CpuDevice("1MiB", 1), caches, 4)
        host._num_staged = 2  # so that it takes several turns
        times = host.move(BlockMoves(offload=((1, 3), (2, 0), (5, 1))))
        assert times.offload_s > 0
        assert times.restore_s == 0
        # The same plan may hand out what it offloads, and restore what it offloads.
        times = host.move(BlockMoves(offload=((3, 2),), restore=((3, 3), (1, 1), (2, 4))))
        assert times.restore_s > 0
        for cache, old in zip(caches, before, strict=True):
            for paged, was in zip(cache.paged, old, strict=True):
                assert torch.equal(paged[1], was[5])
                assert torch.equal(paged[3], was[1])
                assert torch.equal(paged[4], was[3])
                assert torch.equal(paged[[0, 2, 5]], was[[0, 2, 5]])

    def test_is_built_measured_and_refused(self, tmp_path: Path) -> None:
        path = str(write_hf(tmp_path / "model", TinySpec(max_positions=64)))
        config = {"model": path, "device": "cpu", "dtype": "float32", "cpu_threads": 1}
        config["kv_cache_memory"] = "1MiB"

        def build(**more: Any) -> Any:
            return build_engine(EngineConfig(**config, **more), lambda *_: None)

        built = build(kv_offload_memory="64KiB")
        assert built.num_host_blocks == 64 * 1024 // (2 * 2 * 3 * 4 * 4 * 16)
        assert built.kv_costs.restore_s_per_block > 0
        assert built.kv_costs.prefill_s_per_token > 0
        with pytest.raises(ConfigError, match=r"--kv-offload-memory 2 is .* but a KV block takes"):
            build(kv_offload_memory="2")
        with pytest.raises(ConfigError, match="--kv-offload-memory 900TiB"):
            build(kv_offload_memory="900TiB")
        with pytest.raises(ConfigError, match="--enable-prefix-caching"):
            build(kv_offload_memory="64KiB", enable_prefix_caching=False)
