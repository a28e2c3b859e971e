"""The runner against plans written by hand: batches, rows, sampling, late ids, assembly."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from engine_core.device.cpu import CpuDevice
from engine_core.engine_builder import build_engine
from engine_core.model.loader import load_model, open_model
from engine_core.runner.batch import BatchBuilder
from engine_core.runner.kv_caches import allocate_kv_caches
from engine_core.runner.model_runner import ModelRunner
from engine_core.runner.rows import Rows
from engine_core.sched.plan import NewSeq, SeqStep, StepPlan
from kernels.registry import load_ops
from pagewire.config import EngineConfig
from pagewire.errors import ConfigError, ModelLoadError
from pagewire.model_source import resolve_model
from pagewire.types import SamplingParams
from tests.support.tiny_model import TinySpec, write_gguf, write_hf

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from kernels.ops import Ops

BLOCK_SIZE = 4
GREEDY = SamplingParams(max_tokens=50, temperature=0.0)


def new_seq(row: int, ids: Sequence[int], num_prompt: int | None = None, **sampling: Any) -> NewSeq:
    params = SamplingParams(max_tokens=50, **sampling) if sampling else GREEDY
    return NewSeq(row, tuple(ids), len(ids) if num_prompt is None else num_prompt, params)


def plan(
    step: int,
    seqs: Sequence[SeqStep],
    new: Sequence[NewSeq] = (),
    freed: Sequence[int] = (),
) -> StepPlan:
    return StepPlan(step, tuple(freed), tuple(new), tuple(seqs))


class LateDevice(CpuDevice):
    """Computes at once but hands ids over only when asked, as a GPU does."""

    def __init__(self) -> None:
        super().__init__("1MiB", 1)
        self.is_synchronous = False
        self.num_staging_sets = 2


def make_runner(path: Path, device: CpuDevice | None = None, backend: str = "cpu") -> ModelRunner:
    device = device or CpuDevice("1MiB", 1)
    ops = load_ops(backend)
    model = load_model(
        open_model(resolve_model(str(path))),
        ops,
        device.torch_device,
        torch.float32,
        64,
        lambda done, total: None,
    )
    kv_caches = allocate_kv_caches(model, device, 40, BLOCK_SIZE, torch.float32)
    return ModelRunner(
        model, ops, device, kv_caches, max_num_seqs=4, max_num_batched_tokens=32, max_model_len=64
    )


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write_hf(tmp_path / "model", TinySpec(max_positions=64))


# batch


def test_batch_of_decodes_and_chunks() -> None:
    rows = Rows(max_num_seqs=4, max_model_len=32, block_size=BLOCK_SIZE)
    device = CpuDevice("1MiB", 1)
    builder = BatchBuilder(rows, device, max_num_seqs=4, max_num_batched_tokens=32)
    first = plan(
        1,
        [SeqStep(2, 0, 6, (3, 7), True), SeqStep(0, 0, 3, (5,), False)],
        [new_seq(2, range(100, 106)), new_seq(0, range(200, 210), 8, temperature=0.5, top_k=3)],
    )
    rows.apply(first)
    batch = builder.build(first)
    assert batch.inputs.input_ids.tolist() == [100, 101, 102, 103, 104, 105, 200, 201, 202]
    assert batch.inputs.positions.tolist() == [0, 1, 2, 3, 4, 5, 0, 1, 2]
    assert batch.inputs.slot_mapping.tolist() == [12, 13, 14, 15, 28, 29, 20, 21, 22]
    assert batch.inputs.sampling_tokens is not None
    assert batch.inputs.sampling_tokens.tolist() == [5]
    assert batch.sampling_rows.tolist() == [2]
    attention = batch.inputs.attention
    assert attention.query_start_loc.tolist() == [0, 6, 9]
    assert attention.seq_lens.tolist() == [6, 3]
    assert attention.block_table.tolist() == [[3, 7], [5, 0]]
    assert (attention.num_decodes, attention.max_query_len, attention.max_seq_len) == (0, 6, 6)
    assert batch.sampling is not None
    assert batch.sampling.all_greedy
    assert not batch.sampling.any_filter
    assert batch.sampling.position.tolist() == [0]

    rows.append_unresolved(batch.sampling_rows)
    rows.resolve(np.array([2]), rows.tenancy[[2]], np.array([6]), np.array([106]))
    second = plan(2, [SeqStep(2, 6, 1, (), True), SeqStep(0, 3, 7, (9, 1), True)])
    rows.apply(second)
    batch = builder.build(second)
    assert batch.inputs.input_ids.tolist() == [106, *range(203, 210)]
    assert batch.inputs.positions.tolist() == [6, *range(3, 10)]
    assert batch.inputs.slot_mapping.tolist() == [30, 23, 36, 37, 38, 39, 4, 5]
    assert batch.inputs.attention.block_table.tolist() == [[3, 7, 0], [5, 9, 1]]
    assert batch.inputs.attention.num_decodes == 1
    assert batch.sampling is not None
    # Row 0 came with two output ids, so that its third is drawn now.
    assert batch.sampling.position.tolist() == [1, 2]
    assert batch.sampling.temperature.tolist() == [0.0, 0.5]
    assert batch.sampling.top_k.tolist() == [0, 3]
    assert batch.sampling.any_filter
    assert not batch.sampling.all_greedy


def test_freed_row_leaves_null_blocks_behind() -> None:
    rows = Rows(max_num_seqs=2, max_model_len=32, block_size=BLOCK_SIZE)
    rows.apply(plan(1, [SeqStep(0, 0, 9, (4, 5, 6), True)], [new_seq(0, range(9))]))
    rows.apply(plan(2, [SeqStep(0, 0, 2, (8,), True)], [new_seq(0, (1, 2))], freed=[0]))
    assert rows.block_table[0].tolist() == [8, 0, 0, 0, 0, 0, 0, 0]
    assert rows.num_tokens[0] == 2


def test_missing_block_is_our_bug() -> None:
    rows = Rows(max_num_seqs=2, max_model_len=32, block_size=BLOCK_SIZE)
    builder = BatchBuilder(rows, CpuDevice("1MiB", 1), 2, 32)
    short = plan(1, [SeqStep(0, 0, 5, (4,), True)], [new_seq(0, range(5))])
    rows.apply(short)
    with pytest.raises(AssertionError):
        builder.build(short)


def test_seed_keeps_all_64_bits() -> None:
    rows = Rows(max_num_seqs=2, max_model_len=32, block_size=BLOCK_SIZE)
    builder = BatchBuilder(rows, CpuDevice("1MiB", 1), 2, 32)
    seed = 0xFEDC_BA98_7654_3210
    one = plan(1, [SeqStep(0, 0, 1, (4,), True)], [new_seq(0, (1,), temperature=1.0, seed=seed)])
    rows.apply(one)
    sampling = builder.build(one).sampling
    assert sampling is not None
    assert int(sampling.seed[0]) % (1 << 64) == seed


# runner


def run_alone(runner: ModelRunner, ids: Sequence[int], num: int, **sampling: Any) -> list[int]:
    """Prefill, then decode, in row 1, read as soon as launched."""
    blocks = tuple(range(1, 16))
    result = runner.launch(
        plan(1, [SeqStep(1, 0, len(ids), blocks, True)], [new_seq(1, ids, **sampling)])
    ).result()
    assert result.rows == (1,)
    tokens = list(result.token_ids)
    for i in range(num - 1):
        step = plan(2 + i, [SeqStep(1, len(ids) + i, 1, (), True)])
        tokens += runner.launch(step).result().token_ids
    runner.launch(plan(99, [], freed=[1])).result()
    return tokens


PROMPT = (5, 90, 17, 250, 33, 8, 61)


def test_chunk_without_sampling_gives_no_token(path: Path) -> None:
    runner = make_runner(path)
    expected = run_alone(runner, PROMPT, 1)
    first = plan(1, [SeqStep(3, 0, 4, (20,), False)], [new_seq(3, PROMPT)])
    assert runner.launch(first).result().rows == ()
    last = runner.launch(plan(2, [SeqStep(3, 4, 3, (21,), True)])).result()
    assert (last.rows, list(last.token_ids)) == ((3,), expected)


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.9, "top_p": 0.9, "seed": 1 << 63}])
def test_replayed_output_continues_as_before(path: Path, sampling: dict[str, Any]) -> None:
    """A pure function of (logits, parameters, seed, position): where it ran does not matter."""
    runner = make_runner(path)
    whole = run_alone(runner, PROMPT, 12, **sampling)
    assert len(set(whole)) > 3
    known = (*PROMPT, *whole[:5])
    replay = plan(
        1,
        [SeqStep(0, 0, len(known), (30, 31, 32), True)],
        [new_seq(0, known, len(PROMPT), **sampling)],
    )
    assert runner.launch(replay).result().token_ids == (whole[5],)


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize(
    "sampling",
    [{}, {"temperature": 0.0, "repetition_penalty": 1.5, "frequency_penalty": 1.0}],
    ids=["plain", "penalized"],
)
def test_next_step_may_be_launched_before_the_last_is_read(
    path: Path, backend: str, sampling: dict[str, Any]
) -> None:
    expected = run_alone(make_runner(path, backend=backend), PROMPT, 10, **sampling)
    runner = make_runner(path, LateDevice(), backend)
    other = tuple(range(40, 50))
    pending = [
        runner.launch(
            plan(
                1,
                [SeqStep(1, 0, 7, (1, 2, 3, 4, 5), True), SeqStep(2, 0, 3, (9, 10, 11), False)],
                [new_seq(1, PROMPT, **sampling), new_seq(2, other)],
            )
        )
    ]
    chunks = [SeqStep(2, 3, 4, (), False), SeqStep(2, 7, 3, (), True)]
    tokens: list[int] = []
    for i in range(9):
        seqs = [SeqStep(1, 7 + i, 1, (), True), *chunks[i : i + 1]]
        pending.append(runner.launch(plan(2 + i, seqs)))
        # One step behind, as an overlapped loop reads.
        tokens.append(pending.pop(0).result().token_ids[0])
    tokens.append(pending.pop(0).result().token_ids[0])
    assert tokens == expected


def test_id_that_comes_after_its_row_was_given_away_is_dropped(path: Path) -> None:
    runner = make_runner(path, LateDevice())
    late = runner.launch(plan(1, [SeqStep(0, 0, 7, (1, 2), True)], [new_seq(0, PROMPT)]))
    longer = tuple(range(60, 69))
    second = runner.launch(
        plan(2, [SeqStep(0, 0, 8, (3, 4, 5), False)], [new_seq(0, longer)], freed=[0])
    )
    assert len(late.result().token_ids) == 1
    assert second.result().token_ids == ()
    last = runner.launch(plan(3, [SeqStep(0, 8, 1, (), True)])).result()
    assert list(last.token_ids) == run_alone(make_runner(path), longer, 1)


def test_sequence_may_fill_the_context(path: Path) -> None:
    runner = make_runner(path)
    ids = list(range(2, 62))
    first = runner.launch(
        plan(1, [SeqStep(1, 0, 32, tuple(range(1, 17)), False)], [new_seq(1, ids)])
    )
    first.result()
    runner.launch(plan(2, [SeqStep(1, 32, 28, (), True)])).result()
    for i in range(3):
        runner.launch(plan(3 + i, [SeqStep(1, 60 + i, 1, (), True)])).result()
    # 64 tokens known, 63 in the cache: the next would be past max_model_len.
    assert runner._rows.num_tokens[1] == 64


def test_warm_up_leaves_the_cache_alone(path: Path) -> None:
    runner = make_runner(path)
    runner.warm_up()
    assert not any(paged.any() for cache in runner._kv_caches for paged in cache.paged)


# assembly


def build(path: Path, **changes: Any) -> Any:
    fields: dict[str, Any] = {
        "model": str(path),
        "device": "cpu",
        "dtype": "float32",
        "cpu_threads": 1,
        "kv_cache_memory": "1MiB",
        "max_num_seqs": 8,
        **changes,
    }
    stages: list[tuple[str, int, int]] = []
    built = build_engine(EngineConfig(**fields), lambda *call: stages.append(call))
    assert [stage for stage, _, _ in stages][-2:] == ["warm-up", "warm-up"]
    assert stages[0][0] == "weights"
    return built


def test_build_engine_tells_the_facts(path: Path) -> None:
    built = build(path)
    # A block: keys and values, 2 layers, 3 heads of 4, 16 tokens, float32.
    assert built.num_blocks == (1 << 20) // (2 * 2 * 3 * 4 * 16 * 4)
    assert built.model_name == "model"
    assert built.architecture == "LlamaForCausalLM"
    assert (built.max_model_len, built.vocab_size, built.eos_token_ids) == (64, 300, (1,))
    assert (built.dtype, built.device, built.block_size) == ("float32", "cpu", 16)
    assert (built.max_num_seqs, built.max_num_batched_tokens) == (8, 512)
    assert built.default_sampling == {}


@pytest.mark.parametrize("max_model_len", [2, 5])
def test_a_context_shorter_than_what_warms_up(path: Path, max_model_len: int) -> None:
    built = build(path, max_model_len=max_model_len, kv_cache_dtype="fp8")
    assert built.max_model_len == max_model_len
    assert built.speculation is not None


@pytest.mark.parametrize(
    ("dtype", "is_built", "asked"),
    [("float32", True, [True]), ("float32", False, [True, False]), ("bfloat16", True, [False])],
)
def test_float32_on_a_cpu_is_batch_invariant(
    path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str, is_built: bool, asked: list[bool]
) -> None:
    seen: list[bool] = []

    def spy(name: str, *, batch_invariant: bool = False) -> Ops:
        seen.append(batch_invariant)
        return load_ops(name, batch_invariant=batch_invariant)

    monkeypatch.setattr("engine_core.engine_builder.load_ops", spy)
    if not is_built:
        monkeypatch.setattr("kernels.cpu.library.supported_variants", list)
    build(path, dtype=dtype)
    assert seen == asked


def test_build_engine_from_gguf_under_another_name(tmp_path: Path) -> None:
    path = write_gguf(
        tmp_path / "tiny.gguf", TinySpec(hidden_size=288, intermediate_size=96), "Q8_0"
    )
    built = build(path, served_model_name="other", max_model_len=100, dtype="bfloat16")
    assert (built.model_name, built.max_model_len, built.dtype) == ("other", 100, "bfloat16")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_model_len": 65}, "--max-model-len 65 is above the model's own context of 64"),
        ({"max_model_len": 64, "kv_cache_memory": "12KiB"}, "lower --max-model-len"),
        ({"kernels": "cuda"}, "--kernels cuda"),
    ],
)
def test_build_engine_refuses_settings(path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build(path, **changes)


def test_build_engine_serves_a_window_that_binds(tmp_path: Path) -> None:
    spec = TinySpec(architecture="MistralForCausalLM", sliding_window=32, max_positions=64)
    assert build(write_hf(tmp_path / "model", spec)).max_model_len == 64


def test_build_engine_names_a_missing_model(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="no such file or directory"):
        build(tmp_path / "nothing")
