"""Adapters of a product: x down to the ranks, and the ranks up to y.

    shrink  inner [SPLITS, M, K * R] = parts of A x, of the tokens that have an adapter
    expand  y += B (the sum of the parts)

A program has a tile of tokens of one slot (LoraBatch.tiles), as in SGMV of Punica
(arXiv:2310.18547). How the inputs are cut into parts follows from their number alone, so that a
token's sums have one order in any batch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from kernels.cuda.configs import ENABLE_FP_FUSION, MIN_DOT, next_power_of_2
from kernels.lora import TILE_TOKENS

if TYPE_CHECKING:
    from kernels.lora import LoraBatch, StackedSlots

NUM_WARPS = 4
BLOCK_OUT = 64
MAX_BLOCK_RANKS = 64
"""Ranks that a program has at once."""
MAX_SPLITS = 8
MAX_PARTS = 3
"""Matrices that a product is fused of."""


def block_in_for(element_size: int) -> int:
    """Inputs in a tile of A."""
    return 128 if element_size == 2 else 64


def num_splits_for(in_features: int, block_in: int) -> int:
    """Two tiles are the least that is worth a part."""
    return max(1, min(MAX_SPLITS, -(-in_features // block_in) // 2))


def block_ranks_for(ranks: int) -> int:
    return max(MIN_DOT, min(MAX_BLOCK_RANKS, next_power_of_2(ranks)))


@triton.jit(do_not_specialize=["num_tokens"])
def lora_shrink_kernel(
    x_ptr,  # [T, IN]
    a_ptr,  # [S, RANKS, IN]
    tokens_ptr,  # [M] int64
    tiles_ptr,  # [N, 3] int32: slot, first, stop
    inner_ptr,  # [SPLITS, M, RANKS] float32
    num_tokens,  # M
    stride_x,
    IN: tl.constexpr,
    RANKS: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """A part of A x for a tile of tokens and one of ranks."""
    tile = tl.program_id(0)
    slot = tl.load(tiles_ptr + tile * 3).to(tl.int64)
    offs_m = tl.load(tiles_ptr + tile * 3 + 1) + tl.arange(0, BLOCK_M)
    in_m = offs_m < tl.load(tiles_ptr + tile * 3 + 2)
    tokens = tl.load(tokens_ptr + offs_m, mask=in_m, other=0)
    offs_n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    in_n = offs_n < RANKS
    split = tl.program_id(2)
    TILES: tl.constexpr = (IN + BLOCK_K - 1) // BLOCK_K
    acc = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    for at in range(split * TILES // SPLITS, (split + 1) * TILES // SPLITS):
        offs_k = at * BLOCK_K + tl.arange(0, BLOCK_K)
        in_k = offs_k < IN
        # [BLOCK_M, BLOCK_K]
        x = tl.load(
            x_ptr + tokens[:, None] * stride_x + offs_k[None, :],
            mask=in_m[:, None] & in_k[None, :],
            other=0.0,
        )
        # [BLOCK_N, BLOCK_K]
        a = tl.load(
            a_ptr + (slot * RANKS + offs_n)[:, None] * IN + offs_k[None, :],
            mask=in_n[:, None] & in_k[None, :],
            other=0.0,
        )
        acc = tl.dot(x, tl.trans(a), acc, input_precision="ieee")
    rows = split.to(tl.int64) * num_tokens + offs_m
    tl.store(
        inner_ptr + rows[:, None] * RANKS + offs_n[None, :],
        acc,
        mask=in_m[:, None] & in_n[None, :],
    )


@triton.jit(do_not_specialize=["num_tokens"])
def lora_expand_kernel(
    inner_ptr,  # [SPLITS, M, PARTS * RANK] float32
    b_ptr,  # [S, OUT, RANK]
    tokens_ptr,  # [M] int64
    tiles_ptr,  # [N, 3] int32: slot, first, stop
    y_ptr,  # [T, OUT], changed in place
    num_tokens,  # M
    stride_y,
    END0: tl.constexpr,
    END1: tl.constexpr,
    OUT: tl.constexpr,
    PARTS: tl.constexpr,
    RANK: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """y += B inner for a tile of tokens and one of outputs, which are all of one of the fused
    matrices: the first has outputs [0, END0), the second [END0, END1), the third the rest."""
    tile = tl.program_id(0)
    slot = tl.load(tiles_ptr + tile * 3).to(tl.int64)
    offs_m = tl.load(tiles_ptr + tile * 3 + 1) + tl.arange(0, BLOCK_M)
    in_m = offs_m < tl.load(tiles_ptr + tile * 3 + 2)
    tokens = tl.load(tokens_ptr + offs_m, mask=in_m, other=0)
    BLOCKS0: tl.constexpr = (END0 + BLOCK_N - 1) // BLOCK_N
    BLOCKS1: tl.constexpr = BLOCKS0 + (END1 - END0 + BLOCK_N - 1) // BLOCK_N
    block = tl.program_id(1)
    part = (block >= BLOCKS0).to(tl.int32) + (block >= BLOCKS1).to(tl.int32)
    first = tl.where(part == 0, 0, tl.where(part == 1, END0, END1))
    end = tl.where(part == 0, END0, tl.where(part == 1, END1, OUT))
    before = tl.where(part == 0, 0, tl.where(part == 1, BLOCKS0, BLOCKS1))
    offs_n = first + (block - before) * BLOCK_N + tl.arange(0, BLOCK_N)
    in_n = offs_n < end
    acc = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    for start in range(0, RANK, BLOCK_R):
        offs_r = start + tl.arange(0, BLOCK_R)
        in_r = offs_r < RANK
        # [BLOCK_M, BLOCK_R]
        inner = tl.zeros([BLOCK_M, BLOCK_R], dtype=tl.float32)
        for split in range(SPLITS):
            rows = tl.cast(split, tl.int64) * num_tokens + offs_m
            inner += tl.load(
                inner_ptr + rows[:, None] * (PARTS * RANK) + part * RANK + offs_r[None, :],
                mask=in_m[:, None] & in_r[None, :],
                other=0.0,
            )
        # [BLOCK_N, BLOCK_R]
        b = tl.load(
            b_ptr + (slot * OUT + offs_n)[:, None] * RANK + offs_r[None, :],
            mask=in_n[:, None] & in_r[None, :],
            other=0.0,
        )
        acc = tl.dot(inner.to(b.dtype), tl.trans(b), acc, input_precision="ieee")
    y_ptrs = y_ptr + tokens[:, None] * stride_y + offs_n[None, :]
    in_y = in_m[:, None] & in_n[None, :]
    y = tl.load(y_ptrs, mask=in_y, other=0.0).to(tl.float32)
    tl.store(y_ptrs, y + acc, mask=in_y)


def add_lora(y: torch.Tensor, x: torch.Tensor, slots: StackedSlots, batch: LoraBatch) -> None:
    """As Ops.add_lora; rows of x and y may be strided."""
    num_tiles, num_tokens = batch.tiles.shape[0], batch.tokens.shape[0]
    _, ranks, in_features = slots.a.shape
    out_features = slots.b.shape[1]
    ends = [end for _, end in slots.spans]
    assert len(ends) <= MAX_PARTS, ends
    block_in = block_in_for(x.element_size())
    splits = num_splits_for(in_features, block_in)
    block_ranks = block_ranks_for(ranks)
    inner = torch.empty((splits, num_tokens, ranks), dtype=torch.float32, device=x.device)
    lora_shrink_kernel[(num_tiles, triton.cdiv(ranks, block_ranks), splits)](
        x,
        slots.a,
        batch.tokens,
        batch.tiles,
        inner,
        num_tokens,
        x.stride(0),
        IN=in_features,
        RANKS=ranks,
        SPLITS=splits,
        BLOCK_M=TILE_TOKENS,
        BLOCK_N=block_ranks,
        BLOCK_K=block_in,
        num_warps=NUM_WARPS,
        num_stages=3,
        enable_fp_fusion=ENABLE_FP_FUSION,
    )
    num_blocks = sum(triton.cdiv(end - first, BLOCK_OUT) for first, end in slots.spans)
    lora_expand_kernel[(num_tiles, num_blocks)](
        inner,
        slots.b,
        batch.tokens,
        batch.tiles,
        y,
        num_tokens,
        y.stride(0),
        END0=ends[0],
        END1=ends[min(1, len(ends) - 1)],
        OUT=out_features,
        PARTS=len(ends),
        RANK=slots.max_rank,
        SPLITS=splits,
        BLOCK_M=TILE_TOKENS,
        BLOCK_N=BLOCK_OUT,
        BLOCK_R=block_ranks_for(slots.max_rank),
        num_warps=NUM_WARPS,
        num_stages=3,
        enable_fp_fusion=ENABLE_FP_FUSION,
    )
