"""Residual blocks in one call against their composition of single ops, which defines them."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import pytest
import torch

from kernels.inputs import Maker, attention_batch, cos_sin_table
from kernels.ops import AttentionBlock, Block, BlockBatch, KVCache, MlpBlock
from kernels.reference.ops import ReferenceOps
from kernels.tolerances import assert_within_budget
from tests.support.cpu_kernels import BACKENDS, VARIANTS, cpu_ops, threads

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kernels.ops import LinearWeight, Ops

BLOCK_SIZE = 4
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
F64 = torch.float64


@dataclass(frozen=True)
class Shape:
    """Of a stack of two attention and two MLP blocks."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    inter: int
    bias: bool
    rotary_dim: int | None = None


SHAPES = {
    # Of gate and up, whole panels of every instruction set meet; then none does.
    "whole-panels": Shape(96, 6, 2, 32, 128, bias=False),
    "odd": Shape(37, 5, 1, 10, 51, bias=True, rotary_dim=6),
    "wide": Shape(130, 8, 8, 80, 64, bias=True),
}


@dataclass
class Step:
    """What run_blocks takes besides the stack."""

    residual: torch.Tensor
    batch: BlockBatch
    kv_caches: list[KVCache]

    def run(self, ops: Ops, blocks: Sequence[Block]) -> dict[str, torch.Tensor]:
        ops.run_blocks(ops.prepare_blocks(blocks), self.residual, self.batch, self.kv_caches)
        caches = {f"cache {i}": torch.stack(cache.paged) for i, cache in enumerate(self.kv_caches)}
        return {"residual": self.residual, **caches}


def make_blocks(ops: Ops, shape: Shape, dtype: torch.dtype, cast: torch.dtype) -> list[Block]:
    """Weights drawn in dtype, then cast."""
    maker = Maker(dtype, seed=7)

    def linear(out: int, into: int) -> LinearWeight:
        weight = maker.normal(out, into) / into**0.5
        bias = maker.normal(out).to(cast) if shape.bias else None
        return ops.prepare_linear(weight.to(dtype).to(cast), bias)

    heads, dim = shape.heads, shape.head_dim
    blocks: list[Block] = []
    for _ in range(2):
        blocks.append(
            AttentionBlock(
                norm=maker.normal(shape.hidden).to(cast),
                eps=1e-5,
                qkv=linear((heads + 2 * shape.kv_heads) * dim, shape.hidden),
                out=linear(shape.hidden, heads * dim),
                num_heads=heads,
                num_kv_heads=shape.kv_heads,
                head_dim=dim,
                cos_sin=cos_sin_table(64, shape.rotary_dim or dim),
                scale=dim**-0.5,
            )
        )
        blocks.append(
            MlpBlock(
                norm=maker.normal(shape.hidden).to(cast),
                eps=1e-5,
                gate_up=linear(2 * shape.inter, shape.hidden),
                down=linear(shape.hidden, shape.inter),
            )
        )
    return blocks


def make_step(
    shape: Shape, dtype: torch.dtype, query_lens: Sequence[int], seq_lens: Sequence[int]
) -> Step:
    """KV of earlier tokens is random; the blocks of a sequence lie apart."""
    maker = Maker(dtype, seed=3)
    per_seq = -(-max(seq_lens) // BLOCK_SIZE)
    num_blocks = len(seq_lens) * per_seq + 1
    table = (maker.permutation(num_blocks - 1) + 1).int().view(len(seq_lens), per_seq)
    positions = [
        torch.arange(seq - query, seq) for query, seq in zip(query_lens, seq_lens, strict=True)
    ]
    slots = [
        table[row, at // BLOCK_SIZE].long() * BLOCK_SIZE + at % BLOCK_SIZE
        for row, at in enumerate(positions)
    ]
    size = (num_blocks, BLOCK_SIZE, shape.kv_heads, shape.head_dim)
    return Step(
        maker.normal(sum(query_lens), shape.hidden) * 3,
        BlockBatch(
            torch.cat(positions),
            torch.cat(slots),
            attention_batch(query_lens, seq_lens, table, "cpu"),
        ),
        [KVCache(maker.normal(*size), maker.normal(*size)) for _ in range(2)],
    )


def widened(step: Step) -> Step:
    caches = [KVCache(cache.k.double(), cache.v.double()) for cache in step.kv_caches]
    return replace(step, residual=step.residual.double(), kv_caches=caches)


BATCHES = {
    "decode": ([1, 1, 1], [1, 17, 40]),
    "mixed": ([1, 1, 5, 30], [9, 1, 5, 37]),
}


@functools.cache
def yardsticks(
    shape: str, batch: str, dtype: torch.dtype
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The exact results, and those of the reference in dtype."""
    sizes, lens = SHAPES[shape], BATCHES[batch]
    exact, reference = ReferenceOps(F64), ReferenceOps()
    wide = widened(make_step(sizes, dtype, *lens))
    step = make_step(sizes, dtype, *lens)
    return (
        wide.run(exact, make_blocks(exact, sizes, dtype, F64)),
        step.run(reference, make_blocks(reference, sizes, dtype, dtype)),
    )


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("shape", SHAPES)
def test_matches_exact_composition(
    shape: str, batch: str, dtype: torch.dtype, backend: str
) -> None:
    sizes, lens = SHAPES[shape], BATCHES[batch]
    exact, fair = yardsticks(shape, batch, dtype)
    ops = cpu_ops(backend)
    with threads(1 if backend == "torch" else 2):
        actual = make_step(sizes, dtype, *lens).run(ops, make_blocks(ops, sizes, dtype, dtype))
    for name, value in actual.items():
        assert_within_budget(value, exact[name], fair[name], f"{shape} {batch} {name}")


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize("backend", VARIANTS)
def test_decode_rows_do_not_depend_on_the_batch_or_threads(
    backend: str, dtype: torch.dtype
) -> None:
    shape, seq_lens = SHAPES["whole-panels"], [40, 3, 17, 33, 1, 64, 20, 9, 12]
    ops = cpu_ops(backend)
    stack = ops.prepare_blocks(make_blocks(ops, shape, dtype, dtype))
    together = make_step(shape, dtype, [1] * len(seq_lens), seq_lens)
    with threads(3):
        alone = make_step(shape, dtype, [1] * len(seq_lens), seq_lens)
        ops.run_blocks(stack, together.residual, together.batch, together.kv_caches)
    for row, seq_len in enumerate(seq_lens):
        attention = alone.batch.attention
        batch = BlockBatch(
            alone.batch.positions[row : row + 1],
            alone.batch.slot_mapping[row : row + 1],
            attention_batch([1], [seq_len], attention.block_table[row : row + 1], "cpu"),
        )
        residual = alone.residual[row : row + 1].clone()
        ops.run_blocks(stack, residual, batch, alone.kv_caches)
        assert torch.equal(residual[0], together.residual[row])


@pytest.mark.parametrize("backend", VARIANTS)
def test_what_points_outside_is_refused_before_anything_is_written(backend: str) -> None:
    shape, ops = SHAPES["odd"], cpu_ops(backend)
    blocks = make_blocks(ops, shape, torch.float32, torch.float32)

    def refuse(step: Step, message: str) -> None:
        residual, caches = step.residual.clone(), [cache.k.clone() for cache in step.kv_caches]
        with pytest.raises(IndexError, match=message):
            step.run(ops, blocks)
        assert torch.equal(step.residual, residual)
        pairs = zip(step.kv_caches, caches, strict=True)
        assert all(torch.equal(cache.k, was) for cache, was in pairs)

    step = make_step(shape, torch.float32, [1, 3], [9, 5])
    step.batch.slot_mapping[2] = 10**6
    refuse(step, "token 2 has position 3 of 64 and slot 1000000")
    step = make_step(shape, torch.float32, [1, 3], [9, 5])
    step.batch.positions[0] = 64
    refuse(step, "token 0 has position 64 of 64")
    step = make_step(shape, torch.float32, [1, 3], [9, 5])
    step.batch.attention.block_table[1, 1] = -1
    refuse(step, "sequence 1 of length 5")
    step = make_step(shape, torch.float32, [1, 3], [9, 5])
    step.batch.attention.seq_lens_host[0] = 1000
    refuse(step, "sequence 0 of length 1000")


@pytest.mark.parametrize("backend", VARIANTS[-1:])
def test_another_cache_is_noticed(backend: str) -> None:
    shape, ops = SHAPES["whole-panels"], cpu_ops(backend)
    stack = ops.prepare_blocks(make_blocks(ops, shape, torch.float32, torch.float32))
    results = []
    for _ in range(2):
        step = make_step(shape, torch.float32, [1, 2], [9, 5])
        ops.run_blocks(stack, step.residual, step.batch, step.kv_caches)
        results.append(step)
    assert torch.equal(results[0].residual, results[1].residual)
    for cache, other in zip(results[0].kv_caches, results[1].kv_caches, strict=True):
        assert torch.equal(cache.k, other.k) and torch.equal(cache.v, other.v)
