"""Graphs, overlap and memory on a real device. Waiting for it within a launch is an error."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, Any

import pytest
import torch

from engine_core.core import EngineCore
from engine_core.engine_builder import build_engine
from engine_core.kv.manager import KVManager
from engine_core.sched.limits import SchedulerLimits
from engine_core.sched.scheduler import Scheduler
from pagewire.config import EngineConfig
from pagewire.types import SamplingParams
from pagewire.wire.codec import pack_ids, unpack_ids, unpack_request_ids
from pagewire.wire.messages import Add
from tests.support.tiny_model import TinySpec, write_hf

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from engine_core.engine_builder import BuiltEngine

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available(), reason="NO CUDA DEVICE: graphs not run on hardware"
    ),
]

PROMPTS = ([5, 90, 17, 250, 33, 8, 61], [40, 41] * 9, list(range(60, 91)), [7], [9, 8, 7])
SAMPLINGS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.9, "top_k": 40, "seed": 11},
    {"temperature": 0.9, "seed": 5, "presence_penalty": 1.5, "logit_bias": ((9, 4.0),)},
    {"temperature": 0.9, "seed": 6, "allowed_token_ids": tuple(range(40)), "min_tokens": 7},
    {"temperature": 0.0, "logprobs": 5},
)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    spec = TinySpec(hidden_size=256, intermediate_size=512, num_heads=8, num_kv_heads=2)
    return write_hf(tmp_path_factory.mktemp("tiny") / "model", spec)


@pytest.fixture(autouse=True)
def freed() -> Iterator[None]:
    yield
    torch.cuda.set_sync_debug_mode("default")
    gc.collect()
    torch.cuda.empty_cache()


def build(path: Path, **settings: Any) -> BuiltEngine:
    config = EngineConfig(
        model=str(path),
        device="cuda",
        dtype="float32",
        max_num_seqs=8,
        max_num_batched_tokens=64,
        **{"kv_cache_memory": "64MiB", **settings},
    )
    return build_engine(config, lambda stage, done, total: None)


def generate(built: BuiltEngine, *, strict: bool = False) -> list[list[int]]:
    limits = SchedulerLimits(8, 64, built.max_model_len, built.vocab_size, built.eos_token_ids)
    scheduler = Scheduler(limits, KVManager(built.num_blocks, built.block_size, False))
    core = EngineCore(scheduler, built.runner, epoch=1, async_scheduling=built.async_scheduling)
    launch = built.runner.launch

    def guarded(plan: Any) -> Any:
        if strict:
            torch.cuda.set_sync_debug_mode("error")
        try:
            return launch(plan)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    built.runner.launch = guarded  # type: ignore[method-assign]
    outputs: dict[int, list[int]] = {}
    for number, (prompt, sampling) in enumerate(zip(PROMPTS, SAMPLINGS, strict=True)):
        params = SamplingParams(40, ignore_eos=True, **sampling)
        core.add(1, Add(number, 1, pack_ids(prompt), 0, params), 0.0)
        outputs[number] = []
    while core.has_work():
        for output in core.step(lambda: None).values():
            ids = unpack_request_ids(output.request_ids)
            for number, token_id in zip(ids, unpack_ids(output.token_ids), strict=True):
                outputs[number].append(token_id)
    core.check_integrity()
    return list(outputs.values())


def test_graphs_and_overlap_change_no_token(path: Path) -> None:
    plain = generate(build(path, cuda_graphs="off", async_scheduling="off"))
    assert all(len(ids) == 40 for ids in plain)
    assert generate(build(path, cuda_graphs="off")) == plain
    assert generate(build(path)) == plain
    assert generate(build(path, cuda_graph_sizes="3")) == plain


def test_no_launch_waits_for_the_device(path: Path) -> None:
    generate(build(path), strict=True)
    generate(build(path, cuda_graphs="off"), strict=True)


def test_the_estimated_memory_holds_what_is_taken(path: Path) -> None:
    device = torch.cuda.current_device()
    total = torch.cuda.mem_get_info(device)[1]
    built = build(path, kv_cache_memory=None, gpu_memory_utilization=0.5)
    generate(built)
    torch.cuda.synchronize()
    free = torch.cuda.mem_get_info(device)[0]
    assert total - free <= 0.5 * total
    assert total - free >= 0.4 * total
