"""--tensor-parallel-size: what cannot be is said before any rank is waited for."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

import pytest

from engine_core.__main__ import _build
from engine_core.device.cpu import CpuDevice
from engine_core.engine_builder import build_engine
from engine_core.parallel.ranks import SoleRank
from engine_core.sched.plan import NewSeq, SeqStep, StepPlan
from engine_core.sim_builder import build_simulated
from pagewire.config import EngineConfig
from pagewire.cores import allowed_cores
from pagewire.errors import ConfigError
from pagewire.settings import load_config
from pagewire.types import SamplingParams
from tests.support.lone_rank import LoneRank
from tests.support.tiny_model import TinySpec, write_hf

if TYPE_CHECKING:
    from pathlib import Path

    import torch

    from engine_core.engine_builder import BuiltEngine


class Unreached(SoleRank):
    """Rank 0 of several that are never there."""

    def __init__(self, size: int) -> None:
        self.size = size  # type: ignore[misc]

    def connect(self, device: torch.device) -> NoReturn:
        raise AssertionError("waits for ranks")


@pytest.mark.parametrize(
    ("flags", "size", "message"),
    [
        ((), 16, r"--tensor-parallel-size 16: .* has 9 attention heads: each rank needs one"),
        (("--enable-lora",), 3, "--tensor-parallel-size 3 goes without --enable-lora"),
        (("--speculative-model=x",), 2, "--tensor-parallel-size 2 .* --speculative-model: it is"),
        (("--device=cuda",), 2, "--device cuda"),
    ],
)
def test_what_cannot_be_is_refused_before_ranks_are_started(
    flags: tuple[str, ...],
    size: int,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def start(*_: object, **__: object) -> NoReturn:
        raise AssertionError("starts a rank")

    monkeypatch.setattr("engine_core.parallel.processes.subprocess.Popen", start)
    model = write_hf(tmp_path / "model", TinySpec())
    flags = (f"--model={model}", f"--tensor-parallel-size={size}", *flags)
    config = load_config(EngineConfig, list(flags))
    with pytest.raises(ConfigError, match=message):
        _build(config)


def test_what_is_too_small_is_refused_before_ranks_are_waited_for(tmp_path: Path) -> None:
    model = write_hf(tmp_path / "model", TinySpec())
    flags = (f"--model={model}", "--tensor-parallel-size=2", "--kv-cache-memory=100")
    config = load_config(EngineConfig, list(flags))
    with pytest.raises(ConfigError, match="--kv-cache-memory 100 gives the KV cache"):
        build_engine(config, lambda _stage, _done, _total: None, Unreached(2))


def test_it_is_not_simulated(tmp_path: Path) -> None:
    model = write_hf(tmp_path / "model", TinySpec())
    config = EngineConfig(model=str(model), device="sim:h200", tensor_parallel_size=2)
    with pytest.raises(ConfigError, match="--tensor-parallel-size is not simulated"):
        build_simulated(config)


def test_ranks_on_a_cpu_share_its_memory_and_cores() -> None:
    import torch

    before = torch.get_num_threads()
    try:
        alone, one_of_two = CpuDevice("64MiB", 4), CpuDevice("64MiB", 4, 2)
        assert torch.get_num_threads() == 2
        assert one_of_two.fixed_kv_budget().num_bytes == alone.fixed_kv_budget().num_bytes // 2
        CpuDevice(None, None, 64)
        assert torch.get_num_threads() == max(1, allowed_cores() // 64)
    finally:
        torch.set_num_threads(before)


def test_a_rank_by_itself_is_built_like_one_of_several(tmp_path: Path) -> None:
    config = EngineConfig(
        model=str(write_hf(tmp_path / "model", TinySpec(max_positions=64))),
        device="cpu",
        dtype="float32",
        kv_cache_memory="4MiB",
        kv_offload_memory="2MiB",
        max_num_seqs=4,
        cpu_threads=1,
    )
    ranks = LoneRank(config)
    built = build_engine(config, lambda _stage, _done, _total: None, ranks)
    try:
        assert built.ranks is ranks
        alone = build_engine(config, lambda _stage, _done, _total: None)
        assert (built.num_blocks, built.max_model_len) == (alone.num_blocks, alone.max_model_len)
        assert built.num_host_blocks == alone.num_host_blocks > 0
        assert first_ids(built) == first_ids(alone)
    finally:
        ranks.close()


def first_ids(built: BuiltEngine) -> list[tuple[int, ...]]:
    params = SamplingParams(max_tokens=9, temperature=0.8, seed=4)
    new = NewSeq(0, tuple(range(2, 30)), 28, params)
    plans = [StepPlan(1, (), (new,), (SeqStep(0, 0, 28, (1, 2, 3), True),))]
    plans += [StepPlan(at, (), (), (SeqStep(0, 26 + at, 1, (), True),)) for at in range(2, 9)]
    return [built.runner.launch(plan).result().token_ids for plan in plans]
