"""Decode graphs on a device that replays torch's calls as CUDA replays kernels."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest
import torch

from engine_core.device.memory import block_num_bytes
from engine_core.engine_builder import build_engine
from engine_core.runner.batch import BatchBuilder
from engine_core.runner.graphs import DecodeGraphs, graph_sizes, measure_graphs
from engine_core.runner.kv_caches import allocate_kv_caches
from engine_core.runner.rows import Rows
from engine_core.sched.drafters import ModelDrafter, NgramDrafter
from engine_core.sched.speculation import Speculation
from engine_core.sched.step_costs import StepCosts
from pagewire.config import EngineConfig
from pagewire.errors import ConfigError
from pagewire.types import SamplingParams
from tests.parity.harness import MAX_SAMPLED, Engine, Loaded, load
from tests.support.graph_device import GraphDevice, GraphOps, NoWaiting, WaitsForDevice
from tests.support.tiny_model import TinySpec, write_hf

if TYPE_CHECKING:
    from pathlib import Path

    from engine_core.sched.plan import StepPlan

MIB = 1 << 20
PROMPTS = ([5, 90, 17, 250, 33, 8, 61], [40, 41] * 9, list(range(60, 91)), [7], [9, 8, 7])
SIZES = (1, 2, 4, 8)
MASKED = SamplingParams(
    8,
    temperature=0.9,
    min_tokens=8,
    logit_bias=((9, 4.0),),
    allowed_token_ids=tuple(range(99)),
)
DRAWN = SamplingParams(20, temperature=0.9, top_k=40, seed=11, ignore_eos=True)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_hf(tmp_path_factory.mktemp("tiny") / "model", TinySpec())


@pytest.fixture(scope="module")
def plain(path: Path) -> Loaded:
    return load(str(path), "reference", 96)


@pytest.fixture
def loaded(path: Path, monkeypatch: pytest.MonkeyPatch) -> Loaded:
    monkeypatch.setattr("tests.parity.harness.load_ops", lambda *args, **more: GraphOps())
    return replace(load(str(path), "graph", 96), device=GraphDevice())


def device_of(loaded: Loaded) -> GraphDevice:
    assert isinstance(loaded.device, GraphDevice)
    return loaded.device


def make_graphs(loaded: Loaded, sizes: tuple[int, ...]) -> tuple[BatchBuilder, DecodeGraphs, Any]:
    kv_caches = allocate_kv_caches(loaded.model, loaded.device, 4, 16, torch.float32)
    builder = BatchBuilder(Rows(8, 96, 16), loaded.device, 8, 64)
    return builder, DecodeGraphs(loaded.model, loaded.device, kv_caches, builder, sizes), kv_caches


@pytest.mark.parametrize(
    ("max_num_seqs", "sizes"),
    [
        (1, (1,)),
        (2, (1, 2)),
        (6, (1, 2, 4, 6)),
        (8, (1, 2, 4, 8)),
        (30, (1, 2, 4, 8, 16, 24, 30)),
    ],
)
def test_the_ladder_ends_with_all_sequences(max_num_seqs: int, sizes: tuple[int, ...]) -> None:
    assert graph_sizes(max_num_seqs) == sizes


def test_the_ladder_of_many_sequences() -> None:
    sizes = graph_sizes(1000)
    assert list(sizes) == sorted(set(sizes))
    assert sizes[-1] == 512
    padding = [(size - below - 1) / size for below, size in pairwise(sizes)]
    assert max(padding) < 0.5
    assert max(padding[11:]) < 0.12


@pytest.mark.parametrize(
    ("sampling", "async_scheduling"), [(None, False), (DRAWN, True)], ids=["sync", "async"]
)
def test_replayed_steps_draw_what_launched_ones_do(
    loaded: Loaded, plain: Loaded, sampling: SamplingParams | None, async_scheduling: bool
) -> None:
    expected = Engine(plain).generate(PROMPTS, 20, sampling)
    engine = Engine(
        loaded,
        max_num_seqs=8,
        max_num_batched_tokens=40,
        async_scheduling=async_scheduling,
        graph_sizes=SIZES,
    )
    assert engine.generate(PROMPTS, 20, sampling) == expected
    device = device_of(loaded)
    # Five of them are padded to eight; prefill is not captured.
    assert device.replays.count(device.graphs[0]) >= 16
    assert engine.generate(PROMPTS[:1], 20, sampling) == expected[:1]
    assert device.graphs[-1] in device.replays


@pytest.mark.parametrize("sampling", [None, DRAWN], ids=["greedy", "drawn"])
@pytest.mark.parametrize("by", ["ngram", "draft"])
def test_guesses_are_verified_between_replayed_steps(
    loaded: Loaded, plain: Loaded, sampling: SamplingParams | None, by: str
) -> None:
    """On a device whose results come late, also those of the draft model."""
    expected = Engine(plain).generate(PROMPTS, 20, sampling)
    cheap = StepCosts({1: 0.01, 64: 0.01})
    speculation = Speculation(
        NgramDrafter(1, 4) if by == "ngram" else ModelDrafter(cheap),
        StepCosts({1: 1.0, 64: 1.0}),
        num_speculative_tokens=3,
        max_sampled_tokens=MAX_SAMPLED,
    )
    engine = Engine(
        loaded,
        max_num_seqs=8,
        max_num_batched_tokens=40,
        graph_sizes=SIZES,
        speculation=speculation,
        draft=loaded if by == "draft" else None,
    )
    assert engine.generate(PROMPTS, 20, sampling) == expected
    assert speculation.num_draft_tokens > 10
    # A draft model that is the model is right, whatever is drawn.
    assert by == "ngram" or speculation.num_accepted_tokens > 0.9 * speculation.num_draft_tokens


def test_a_batch_beyond_the_largest_is_launched(loaded: Loaded, plain: Loaded) -> None:
    expected = Engine(plain).generate(PROMPTS, 12)
    engine = Engine(loaded, max_num_seqs=8, graph_sizes=(1, 2, 4))
    assert engine.generate(PROMPTS, 12) == expected
    assert device_of(loaded).replays == []


def test_preempted_and_resumed_between_replays(loaded: Loaded, plain: Loaded) -> None:
    expected = Engine(plain).generate(PROMPTS, 40)
    engine = Engine(loaded, num_blocks=14, max_num_seqs=8, async_scheduling=True, graph_sizes=SIZES)
    assert engine.generate(PROMPTS, 40) == expected
    assert engine.scheduler.total_preemptions > 0
    assert len(set(device_of(loaded).replays)) > 1


def test_graphs_work_on_memory_that_outlasts_them(loaded: Loaded) -> None:
    """Weights, KV cache, the builder's buffers, and where the hidden states go."""
    builder, graphs, kv_caches = make_graphs(loaded, SIZES)
    device = device_of(loaded)
    lasting = {it.untyped_storage().data_ptr() for cache in kv_caches for it in cache.paged}
    lasting |= {it.untyped_storage().data_ptr() for it in builder._buffers.values()}
    assert builder._decode_table is not None
    lasting.add(builder._decode_table.untyped_storage().data_ptr())
    lasting.add(graphs._hidden.untyped_storage().data_ptr())
    weights = {it.untyped_storage().data_ptr() for it in _tensors_of(loaded.model)}
    assert len(device.graphs) == len(SIZES)
    for graph in device.graphs:
        assert graph.reads <= lasting | weights
        assert graph.reads & lasting
    (hidden,) = {graphs.replay(size).untyped_storage().data_ptr() for size in SIZES}
    assert hidden == graphs._hidden.untyped_storage().data_ptr()


def _tensors_of(value: Any, seen: set[int] | None = None) -> list[torch.Tensor]:
    """All that an object of ours holds, however deep."""
    seen = set() if seen is None else seen
    if id(value) in seen:
        return []
    seen.add(id(value))
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        parts = list(value.values())
    elif isinstance(value, (list, tuple)):
        parts = list(value)
    elif type(value).__module__.startswith(("engine_core", "kernels", "tests")):
        slots = [name for base in type(value).__mro__ for name in getattr(base, "__slots__", ())]
        parts = [getattr(value, name, None) for name in slots]
        parts += list(getattr(value, "__dict__", {}).values())
    else:
        parts = []
    return [tensor for part in parts for tensor in _tensors_of(part, seen)]


def test_what_reads_a_length_on_the_host_cannot_be_captured(loaded: Loaded) -> None:
    device = device_of(loaded)
    values = torch.ones(3)
    with pytest.raises(WaitsForDevice):
        device.capture(lambda: values.sum().item())


def test_padding_writes_nothing(loaded: Loaded) -> None:
    _, graphs, kv_caches = make_graphs(loaded, (4,))
    for cache in kv_caches:
        for paged in cache.paged:
            paged.fill_(0.5)
    hidden = graphs.replay(4)
    assert hidden.isfinite().all()
    assert all((paged == 0.5).all() for cache in kv_caches for paged in cache.paged)


@pytest.mark.parametrize("sampling", [None, MASKED], ids=["greedy", "masked"])
def test_launch_never_waits(
    loaded: Loaded, sampling: SamplingParams | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(loaded, max_num_seqs=8, async_scheduling=True, graph_sizes=SIZES)
    device, launch = device_of(loaded), engine.runner.launch
    sample = engine.runner._ops.sample

    def sample_unguarded(*args: Any) -> torch.Tensor:
        with torch._C.DisableTorchFunction():
            return sample(*args)

    # What the reference op looks at is not the runner's fault.
    monkeypatch.setattr(engine.runner._ops, "sample", sample_unguarded)

    def guarded(plan: StepPlan) -> Any:
        device.forbids_waiting = True
        try:
            if plan.seqs[-1].num_new_tokens > 1:  # nor at a chunk's length
                return launch(plan)
            with NoWaiting():
                return launch(plan)
        finally:
            device.forbids_waiting = False

    monkeypatch.setattr(engine.runner, "launch", guarded)
    engine.generate(PROMPTS, 8, sampling)
    assert device.replays


# Memory.


def test_the_estimate_is_what_the_graphs_take(loaded: Loaded) -> None:
    loaded = replace(loaded, device=GraphDevice(graphs_bytes=300 * MIB, growth_bytes=5 * MIB))
    builder, graphs, kv_caches = make_graphs(loaded, SIZES)
    assert graphs.num_bytes == 300 * MIB + 4 * 5 * MIB
    for sizes in (SIZES, SIZES[:1]):
        estimate = measure_graphs(loaded.model, loaded.device, kv_caches, builder, sizes)
        assert estimate == 300 * MIB + len(sizes) * 5 * MIB
    assert measure_graphs(loaded.model, loaded.device, kv_caches, builder, ()) == 0


def build(path: Path, monkeypatch: pytest.MonkeyPatch, device: GraphDevice, **settings: Any) -> Any:
    monkeypatch.setattr("engine_core.engine_builder.select_device", lambda *args: device)
    monkeypatch.setattr("engine_core.engine_builder.load_ops", lambda *args, **more: GraphOps())
    config = EngineConfig(
        model=str(path), max_num_seqs=4, max_num_batched_tokens=32, dtype="float32", **settings
    )
    return build_engine(config, lambda stage, done, total: None)


def test_the_kv_cache_gets_what_is_left(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device = GraphDevice(total=400 * MIB, graphs_bytes=100 * MIB, growth_bytes=10 * MIB)
    device.held = 50 * MIB
    built = build(path, monkeypatch, device)
    # 90%, less the weights, the graphs (of 1, 2 and 4) and the margin.
    left = int(0.9 * 400 * MIB) - (50 + 100 + 3 * 10 + 64) * MIB
    config = load(str(path), "reference").config
    assert built.num_blocks == left // block_num_bytes(config, 16, torch.float32)
    assert built.async_scheduling
    # Two to estimate, then all.
    assert len(device.graphs) == (1 + 2) + 3


def test_graphs_and_overlap_can_be_switched_off(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = GraphDevice(total=400 * MIB, graphs_bytes=100 * MIB)
    built = build(path, monkeypatch, device, cuda_graphs="off", async_scheduling="off")
    assert not device.graphs
    assert not built.async_scheduling


def test_the_ladder_can_be_named(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device = GraphDevice()
    build(path, monkeypatch, device, cuda_graph_sizes="3,64,1")
    assert len(device.graphs) == (1 + 2) + 2


def test_a_ladder_above_every_batch_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device = GraphDevice()
    with pytest.raises(ConfigError, match=r"--cuda-graph-sizes 64,5: .* --max-num-seqs is 4; "):
        build(path, monkeypatch, device, cuda_graph_sizes="64,5")
    assert not device.graphs
    build(path, monkeypatch, device, cuda_graph_sizes="64,5", cuda_graphs="off")


def test_a_model_that_does_not_fit_is_told_with_figures(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = GraphDevice(total=400 * MIB, graphs_bytes=300 * MIB)
    device.held = 50 * MIB
    with pytest.raises(
        ConfigError,
        match=r"--gpu-memory-utilization 0\.9 of a made-up device with 0\.39 GiB leaves nothing "
        r"for the KV cache: weights take 0\.05 GiB, .* CUDA graphs 0\.29 GiB, .* 0\.06 GiB are",
    ):
        build(path, monkeypatch, device)


@pytest.mark.parametrize(
    ("text", "wrong"), [("1,x", "not whole numbers"), ("", "not whole"), ("4,0", "0 is among")]
)
def test_sizes_that_are_none(text: str, wrong: str) -> None:
    with pytest.raises(ValueError, match=wrong):
        EngineConfig(cuda_graph_sizes=text)
