"""KV behind every layer's window is given back, and never read again."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Any

import pytest
import torch

from engine_core.kv.block_pool import IntegrityError
from engine_core.kv.manager import KVManager
from engine_core.kv.window import KVWindow
from pagewire.types import BeamParams, SamplingParams
from tests.parity.harness import Engine, load, transformers_greedy
from tests.support.tiny_model import TinySpec, write_hf

if TYPE_CHECKING:
    from pathlib import Path

    from engine_core.kv.block_table import BlockTable
    from tests.parity.harness import Loaded

SIZE = 4
WINDOW = 10
CHUNK = 6


def manager_of(num_blocks: int = 64, *, caching: bool = True) -> KVManager:
    window = KVWindow(WINDOW, CHUNK)
    return KVManager(num_blocks, SIZE, enable_prefix_caching=caching, window=window)


def run_to(manager: KVManager, table: BlockTable, num_tokens: int) -> int:
    """In chunks; the most blocks that were held after one."""
    most, computed = 0, table.num_computed
    if not table.blocks:
        hit = manager.lookup(table)
        computed = hit.num_cached_tokens
        num_new = min(CHUNK, table.num_tokens - computed)
        assert manager.admit(table, hit, num_new, 0) is not None
        computed += num_new
        manager.register_computed(table, computed)
    while computed < num_tokens:
        computed = min(computed + CHUNK, num_tokens)
        assert manager.grow(table, computed) is not None
        most = max(most, len(table.blocks) - table.num_reclaimed)
        manager.register_computed(table, computed)
        manager.check_integrity()
    return most


@pytest.mark.parametrize("caching", [True, False])
def test_a_long_sequence_holds_a_window_and_a_chunk(caching: bool) -> None:
    manager = manager_of(caching=caching)
    table = manager.new_table(array("i", range(200)))
    assert run_to(manager, table, 200) <= KVWindow(WINDOW, CHUNK).max_blocks(SIZE)
    # The next token sees positions 191 to 200; block 47 begins at 188.
    assert table.num_reclaimed == 47
    assert table.block_ids()[:47] == (0,) * 47
    assert manager.num_usable_blocks - manager.num_free_blocks == 3
    manager.free(table)
    manager.check_all_free()


def test_a_sequence_longer_than_the_pool_fits_a_piece_at_a_time() -> None:
    manager = manager_of(9)
    table = manager.new_table(array("i", range(200)))
    run_to(manager, table, 200)
    assert manager.num_free_blocks == 5
    manager.check_integrity()


def test_what_is_given_back_can_still_be_hit() -> None:
    manager = manager_of()
    first = manager.new_table(array("i", range(100)))
    run_to(manager, first, 100)
    second = manager.new_table(array("i", [*range(100), 7, 7, 7, 7]))
    hit = manager.lookup(second)
    assert hit.num_cached_tokens == 100
    assert manager.admit(second, hit, 4, 0) is not None
    manager.register_computed(second, 104)
    assert second.num_reclaimed == 23
    manager.check_integrity()
    manager.free(first)
    manager.free(second)
    manager.check_all_free()


def test_admission_asks_for_what_is_held_at_once() -> None:
    manager = manager_of(12)
    table = manager.new_table(array("i", range(200)))
    most = KVWindow(WINDOW, CHUNK).max_blocks(SIZE)
    assert manager.blocks_ahead(table) == most == 8
    hit = manager.lookup(table)
    assert manager.admit(table, hit, CHUNK, reserve=4) is None
    assert manager.admit(table, hit, CHUNK, reserve=3) is not None


def test_a_donor_that_has_given_blocks_back_gives_none() -> None:
    manager = manager_of(caching=False)
    donor = manager.new_table(array("i", range(30)))
    table = manager.new_table(array("i", range(30)))
    manager.share(donor, table, 30)
    run_to(manager, donor, 9)
    assert manager.lookup(table).num_cached_tokens == 9
    run_to(manager, donor, 30)
    assert manager.lookup(table).num_cached_tokens == 0


def test_contradictions_are_found() -> None:
    manager = manager_of()
    table = manager.new_table(array("i", range(100)))
    run_to(manager, table, 100)
    table.num_reclaimed -= 1
    with pytest.raises(IntegrityError):
        manager.check_integrity()


@pytest.mark.parametrize("name", ["num_tokens", "max_chunk"])
def test_a_window_of_nothing_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} is 0"):
        KVWindow(**{"num_tokens": 5, "max_chunk": 5, name: 0})


SPEC = TinySpec(architecture="MistralForCausalLM", sliding_window=24, max_positions=512, seed=12)
NUM_TOKENS = 90


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_hf(tmp_path_factory.mktemp("windowed") / "model", SPEC)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    lengths = (3, 24, 70, 131)
    return [torch.randint(2, SPEC.vocab_size, (n,), generator=generator).tolist() for n in lengths]


@pytest.fixture(scope="module")
def expected(path: Path, prompts: list[list[int]]) -> list[list[int]]:
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    return transformers_greedy(model, prompts, NUM_TOKENS)


class Poisoned(Engine):
    """Before each step, NaN is in every block that no sequence holds."""

    most_held = 0

    def poison(self) -> None:
        pool = self.kv_manager.pool
        free = [block.block_id for block in pool.blocks if block.ref_cnt == 0]
        for cache in self.runner._kv_caches:
            for part in cache.paged:
                part[free] = float("nan")
        self.most_held = max(self.most_held, pool.num_usable_blocks - pool.num_free_blocks)

    def generate(self, *args: Any, **more: Any) -> list[list[int]]:
        step = self.core.step

        def poisoned(take: Any) -> Any:
            self.poison()
            return step(take)

        self.core.step = poisoned  # type: ignore[method-assign]
        return super().generate(*args, **more)


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("overlapped", [False, True])
def test_streams_are_those_of_transformers_though_the_rest_is_poisoned(
    path: Path,
    prompts: list[list[int]],
    expected: list[list[int]],
    backend: str,
    overlapped: bool,
) -> None:
    loaded: Loaded = load(str(path), backend)
    assert loaded.config.window == 24
    # Whole, the four take 15 x 4 blocks.
    engine = Poisoned(
        loaded,
        num_blocks=40,
        block_size=8,
        max_num_batched_tokens=16,
        async_scheduling=overlapped,
    )
    assert engine.generate(prompts, NUM_TOKENS) == expected
    assert engine.scheduler.total_preemptions == 0
    whole = sum(-(-(len(prompt) + NUM_TOKENS - 1) // 8) for prompt in prompts)
    assert engine.most_held < whole / 2


@pytest.mark.parametrize("num_blocks", [30, 200])
def test_preempted_streams_and_prefix_hits_under_a_window(
    path: Path, prompts: list[list[int]], expected: list[list[int]], num_blocks: int
) -> None:
    loaded = load(str(path), "cpu")
    engine = Engine(
        loaded, num_blocks=num_blocks, block_size=8, max_num_batched_tokens=64, prefix_caching=True
    )
    # Short ones are let in together, and grow.
    many, wanted = prompts[:2] * 6 + prompts, expected[:2] * 6 + expected
    assert engine.generate(many, NUM_TOKENS) == wanted
    assert (engine.scheduler.total_preemptions > 0) == (num_blocks == 30)
    again = [prompt + output[:40] for prompt, output in zip(many, wanted, strict=True)]
    assert engine.generate(again, 50) == [output[40:] for output in wanted]
    assert engine.kv_manager.num_hit_tokens > 0


def test_beams_share_what_their_windows_see(path: Path, prompts: list[list[int]]) -> None:
    def search(engine: Engine, found: list[Any]) -> int:
        take = engine._take
        beam = BeamParams(width=3, num_return=3)
        wanted = SamplingParams(60, temperature=0.0, ignore_eos=True, beam=beam)

        def take_beams(output: Any, outputs: dict[int, list[int]]) -> None:
            found.extend((it.token_ids, it.score) for one in output.finished for it in one.beams)
            take(output, outputs)

        engine._take = take_beams  # type: ignore[method-assign]
        engine.generate(prompts[2:], 60, wanted)
        return len(found)

    loaded = load(str(path), "cpu")
    whole, reclaimed = ([], [])  # type: tuple[list[Any], list[Any]]
    plain = Engine(loaded, num_blocks=200, block_size=8)
    plain.kv_manager.window = None
    windowed = Poisoned(loaded, num_blocks=200, block_size=8)
    assert search(plain, whole) == search(windowed, reclaimed) == 6
    assert whole == reclaimed
    assert windowed.most_held < 45
