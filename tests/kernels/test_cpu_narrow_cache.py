"""Caches of bfloat16 and float16 beside tensors of float32, on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kernels.blocks import run_blocks
from kernels.cpu.batch_invariant import one_token_sequences
from kernels.feature_inputs import featured_attention_args, featured_rope_args
from kernels.inputs import Maker
from kernels.ops import KVCache
from kernels.reference.ops import ReferenceOps
from kernels.shapes import ShapeError
from kernels.tolerances import assert_within_budget
from tests.kernels.test_blocks import SHAPES, make_blocks, make_step
from tests.support.cpu_kernels import (
    BACKENDS,
    VARIANTS,
    batch_invariant_cpu_ops,
    best_cpu_ops,
    cpu_ops,
)

F32 = torch.float32

by_half = pytest.mark.parametrize(
    "half", [torch.bfloat16, torch.float16], ids=lambda it: str(it).removeprefix("torch.")
)
SHAPES_OF_HEADS = [
    # query lens, seq lens, heads, options
    ([1, 1, 30], [700, 9, 530], (6, 2, 64), {}),
    ([1, 70, 2], [63, 70, 602], (5, 1, 10), {"window": 30, "block_size": 7}),
    ([1] * 9, [600, *range(1, 9)], (4, 4, 80), {"soft_cap": 5.0}),
]


def narrow_args(
    half: torch.dtype, query_lens: list[int], seq_lens: list[int], heads: Any, options: Any
) -> dict[str, Any]:
    args = featured_attention_args(Maker(F32), query_lens, seq_lens, *heads, **options)
    return args | {name: args[name].to(half) for name in ("k_cache", "v_cache")}


@pytest.mark.parametrize("backend", BACKENDS)
@by_half
@pytest.mark.parametrize("case", SHAPES_OF_HEADS, ids=lambda case: str(case[2:]))
def test_attention(case: Any, half: torch.dtype, backend: str) -> None:
    args = narrow_args(half, *case)
    wide = {name: args[name].double() for name in ("q", "k_cache", "v_cache")}
    exact = ReferenceOps(torch.float64).attention(**args | wide)
    out = cpu_ops(backend).attention(**args)
    assert_within_budget(out, exact, ReferenceOps().attention(**args), str(case))


@pytest.mark.parametrize("backend", VARIANTS)
@by_half
def test_a_row_does_not_depend_on_the_batch(half: torch.dtype, backend: str) -> None:
    args = narrow_args(half, *SHAPES_OF_HEADS[0])
    together = batch_invariant_cpu_ops(backend).attention(**args)
    alone = one_token_sequences(args["batch"])
    assert torch.equal(cpu_ops(backend).attention(**args | {"batch": alone}), together)


@pytest.mark.parametrize("backend", BACKENDS)
@by_half
@pytest.mark.parametrize("dim", [10, 64])
def test_writes_are_rounded_once(dim: int, half: torch.dtype, backend: str) -> None:
    """Against the cache in float32; what is half way between two may fall to either side."""
    args = featured_rope_args(Maker(F32), 40, 4, 2, dim, rotary_dim=dim, norm=True)
    narrow = args | {"q": args["q"].clone()}
    for name in ("k_cache", "v_cache"):
        narrow[name] = torch.full_like(args[name], float("nan"), dtype=half)
    ops = cpu_ops(backend)
    ops.rope_and_cache(**args)
    ops.rope_and_cache(**narrow)
    assert torch.equal(narrow["q"], args["q"])
    for name in ("k_cache", "v_cache"):
        assert torch.equal(narrow[name].nan_to_num(99.0), args[name].to(half).nan_to_num(99.0))


@pytest.mark.parametrize("backend", VARIANTS)
@by_half
@pytest.mark.parametrize("shape", SHAPES)
def test_blocks_are_composed_of_the_ops(shape: str, half: torch.dtype, backend: str) -> None:
    ops, sizes = cpu_ops(backend), SHAPES[shape]
    stack = ops.prepare_blocks(make_blocks(ops, sizes, F32, F32))
    results = []
    for run in (ops.run_blocks, lambda *args: run_blocks(ops, *args)):
        first = make_step(sizes, F32, [9, 33, 4], [9, 33, 4])
        caches = [KVCache(it.k.to(half), it.v.to(half)) for it in first.kv_caches]
        run(stack, first.residual, first.batch, caches)
        after = make_step(sizes, F32, [1, 1, 3], [10, 34, 7])
        run(stack, after.residual, after.batch, caches)
        results.append((first.residual, after.residual))
    for ours, composed in zip(*results, strict=True):
        assert torch.equal(ours, composed)


def test_only_float32_has_them() -> None:
    args = featured_attention_args(Maker(torch.bfloat16), [1], [4], 2, 2, 16)
    narrow = {name: args[name].half() for name in ("k_cache", "v_cache")}
    with pytest.raises(ShapeError, match=r"attention: k_cache is torch.float16 .*F is torch.bfl"):
        best_cpu_ops().attention(**args | narrow)
