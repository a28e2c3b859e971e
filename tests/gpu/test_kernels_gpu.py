"""The CUDA backend on a real device, bfloat16 too: the same cases as on the CPU."""

from __future__ import annotations

import os
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch

from kernels.inputs import CASES, NAN, Case, Maker, Row, attention_args, sampling_batch
from kernels.reference.ops import ReferenceOps
from kernels.reference.philox import uniform
from kernels.tolerances import assert_within_budget

if TYPE_CHECKING:
    from kernels.cuda.ops import CudaOps

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available(), reason="NO CUDA DEVICE: kernels not run on hardware"
    ),
    pytest.mark.skipif(
        os.environ.get("TRITON_INTERPRET") == "1", reason="kernels are interpreted in this process"
    ),
]

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def _attention(label: str, *sizes: object) -> Case:
    names = ("query_lens", "seq_lens", "heads", "kv_heads", "head_dim", "block_size")
    return Case("attention", label, partial(attention_args, **dict(zip(names, sizes, strict=True))))


# Sizes that the interpreter would take minutes for.
LARGE_CASES = [
    _attention("large-decode", [1] * 7, [1, 255, 4096, 8191, 33, 2048, 700], 32, 8, 128, 16),
    _attention("large-alone", [1], [32768], 16, 2, 64, 16),
    _attention("large-prefill", [1, 700, 2048], [300, 1500, 2048], 32, 8, 128, 16),
    _attention("large-head-80", [1, 1, 300], [1000, 50, 900], 32, 32, 80, 32),
    _attention("large-head-96", [1, 1, 300], [1000, 50, 900], 12, 4, 96, 16),
    _attention("large-head-256", [1, 1, 300], [1000, 50, 900], 8, 4, 256, 16),
    _attention("large-short-chunks", [1, 1, 2, 3], [4000, 50, 900, 3], 9, 3, 64, 16),
    _attention("large-group-70", [1, 40], [2000, 60], 70, 1, 64, 16),
]


@pytest.fixture(scope="module")
def ops() -> CudaOps:
    from kernels.cuda.ops import CudaOps

    # cuBLAS may otherwise sum 16-bit products in 16 bits, outside the error budget.
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    return CudaOps()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", [*CASES, *LARGE_CASES], ids=str)
def test_matches_the_reference(case: Case, dtype: torch.dtype, ops: CudaOps) -> None:
    actual = case.run(ops, dtype, "cuda")
    reference = case.run(ReferenceOps(), dtype)
    exact = case.run(ReferenceOps(torch.float64), dtype, widen=True)
    assert actual.keys() == reference.keys()
    for name, value in actual.items():
        assert_within_budget(value, exact[name], reference[name], f"{case} {name}")


def test_philox_matches_the_reference_bit_for_bit() -> None:
    from kernels.cuda.sample import philox_uniform

    seed = torch.tensor([0, 1, 2**32 - 1, 2**63 - 1, -(2**63), -1]).repeat_interleave(5)
    position = torch.tensor([0, 1, 2**31, 2**32 - 1, 2**33]).repeat(6)
    sample_index = torch.arange(30, dtype=torch.int32) % 3
    u = philox_uniform(seed.cuda(), position.cuda(), sample_index.cuda())
    assert torch.equal(u.cpu(), uniform(seed, position, sample_index))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sample_matches_the_reference(dtype: torch.dtype, ops: CudaOps) -> None:
    kinds = [
        Row(temperature=0.0),
        Row(seed=1),
        Row(temperature=0.7, top_k=50, seed=2),
        Row(temperature=1.3, top_p=0.8, seed=3, sample_index=1),
        Row(temperature=0.9, min_p=0.05, seed=2**64 - 1),
    ]
    rows = [
        Row(r.temperature, r.top_k, r.top_p, r.min_p, r.seed, position, r.sample_index)
        for position in range(20)
        for r in kinds
    ]
    logits = Maker(dtype).normal(len(rows), 49152) * 3
    logits[1, 7] = NAN
    expected = ReferenceOps().sample(logits, sampling_batch(rows))
    ids = ops.sample(logits.cuda(), sampling_batch(rows, "cuda"))
    assert torch.equal(ids.cpu(), expected)


def test_a_captured_decode_replays_with_other_contents(ops: CudaOps) -> None:
    def args_of(seed: int, seq_lens: list[int]) -> dict[str, Any]:
        return attention_args(Maker(torch.bfloat16, "cuda", seed), [1] * 4, seq_lens, 8, 2, 64)

    # As many blocks, and as long a longest sequence: only contents and lengths differ.
    captured, again = args_of(1, [900, 17, 64, 5]), args_of(2, [900, 1, 33, 33])
    assert captured["k_cache"].shape == again["k_cache"].shape
    ops.attention(**captured)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = ops.attention(**captured)
    for name in ("q", "k_cache", "v_cache"):
        captured[name].copy_(again[name])
    captured["batch"].seq_lens.copy_(again["batch"].seq_lens)
    captured["batch"].block_table.copy_(again["batch"].block_table)
    graph.replay()
    torch.cuda.synchronize()
    assert out.isfinite().all()
    assert torch.equal(out, ops.attention(**again))
