"""Ranks on real devices: NCCL's calls, also captured in graphs, on one; on two, the server."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from engine_core.engine_builder import build_engine
from pagewire.config import EngineConfig
from tests.chaos.test_rank_death import streams_outlive_killed_ranks
from tests.gpu.test_graphs_gpu import build, generate
from tests.support.lone_rank import LoneRank
from tests.support.tiny_model import TinySpec, write_hf

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available(), reason="NO CUDA DEVICE: ranks not run on hardware"
    ),
]


@pytest.mark.parametrize("is_invariant", [False, True])
def test_a_rank_by_itself_meets_nobody_by_nccl(is_invariant: bool, tmp_path: Path) -> None:
    spec = TinySpec(hidden_size=256, intermediate_size=512, num_heads=8, num_kv_heads=2)
    path = write_hf(tmp_path / "model", spec)
    expected = generate(build(path, batch_invariant=is_invariant))
    config = EngineConfig(
        model=str(path),
        device="cuda",
        dtype="float32",
        max_num_seqs=8,
        max_num_batched_tokens=64,
        kv_cache_memory="64MiB",
        batch_invariant=is_invariant,
    )
    ranks = LoneRank(config)
    built = build_engine(config, lambda _stage, _done, _total: None, ranks)
    try:
        assert generate(built) == expected
    finally:
        ranks.close()


@pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.device_count() < 2,
    reason="ONE CUDA DEVICE: two ranks not run on hardware",
)
@pytest.mark.timeout(600)
async def test_streams_outlive_a_killed_rank(tmp_path: Path) -> None:
    flags = ("--device=cuda", "--dtype=float32", "--kv-cache-memory=64MiB")
    await streams_outlive_killed_ranks(tmp_path, (*flags, "--tensor-parallel-size=2"))
