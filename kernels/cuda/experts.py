"""A mixture of experts: each expert's tokens side by side, two grouped products, one sum.

Gale et al., "MegaBlocks", 2022, https://arxiv.org/abs/2211.15841: tokens are sorted by
expert, and tiles of rows never cross from one expert to the next.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kernels.cuda.activation_mul import activate
from kernels.cuda.configs import ENABLE_FP_FUSION, LinearConfig, experts_config, next_power_of_2

COMBINE_BLOCK_H = 512


@triton.jit
def _rows_of_tile(tile, starts_ptr, NUM_EXPERTS: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_M):
    """(expert, first row, end of the expert's rows) of a tile; NUM_EXPERTS for tiles past the
    last. An expert owns ceil(rows / BLOCK_M) tiles."""
    offs = tl.arange(0, BLOCK_E)
    in_e = offs < NUM_EXPERTS
    starts = tl.load(starts_ptr + offs, mask=in_e, other=0)
    ends = tl.load(starts_ptr + offs + 1, mask=in_e, other=0)
    tiles = (ends - starts + BLOCK_M - 1) // BLOCK_M
    tile_ends = tl.cumsum(tiles, axis=0)
    expert = tl.sum((in_e & (tile_ends <= tile)).to(tl.int32), axis=0)
    is_own = offs == expert
    first_tile = tl.sum(tl.where(is_own, tile_ends - tiles, 0), axis=0)
    start = tl.sum(tl.where(is_own, starts, 0), axis=0)
    end = tl.sum(tl.where(is_own, ends, 0), axis=0)
    return expert.to(tl.int64), start + (tile - first_tile) * BLOCK_M, end


@triton.jit
def expert_gate_up_kernel(
    x_ptr,  # [T, H]
    weight_ptr,  # [E, 2I, H]
    pairs_ptr,  # [T K] int64: token * K + slot, by expert
    starts_ptr,  # [E + 1] int64
    inner_ptr,  # [T K, I]: by expert
    stride_x,
    TOP_K: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    HIDDEN: tl.constexpr,
    INTERMEDIATE: tl.constexpr,
    GELU: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """inner = act(x gate^T) * (x up^T), the same tile of both at a time."""
    expert, first, end = _rows_of_tile(tl.program_id(0), starts_ptr, NUM_EXPERTS, BLOCK_E, BLOCK_M)
    if expert == NUM_EXPERTS:
        return
    rows = first + tl.arange(0, BLOCK_M)
    in_m = rows < end
    tokens = tl.load(pairs_ptr + rows, mask=in_m, other=0) // TOP_K
    offs_n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    in_n = offs_n < INTERMEDIATE
    weight_rows = weight_ptr + (expert * 2 * INTERMEDIATE + offs_n[:, None]) * HIDDEN
    gate = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    up = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    for start in range(0, HIDDEN, BLOCK_K):
        offs_k = start + tl.arange(0, BLOCK_K)
        in_k = offs_k < HIDDEN
        mask = in_n[:, None] & in_k[None, :]
        # [BLOCK_M, BLOCK_K]
        x = tl.load(
            x_ptr + tokens[:, None] * stride_x + offs_k[None, :],
            mask=in_m[:, None] & in_k[None, :],
            other=0.0,
        )
        # [BLOCK_N, BLOCK_K]
        ptrs = weight_rows + offs_k[None, :]
        gate_weight = tl.load(ptrs, mask=mask, other=0.0)
        up_weight = tl.load(ptrs + INTERMEDIATE * HIDDEN, mask=mask, other=0.0)
        gate = tl.dot(x, tl.trans(gate_weight), gate, input_precision="ieee")
        up = tl.dot(x, tl.trans(up_weight), up, input_precision="ieee")
    tl.store(
        inner_ptr + rows[:, None] * INTERMEDIATE + offs_n[None, :],
        activate(gate, GELU) * up,
        mask=in_m[:, None] & in_n[None, :],
    )


@triton.jit
def expert_down_kernel(
    inner_ptr,  # [T K, I]: by expert
    weight_ptr,  # [E, H, I]
    pairs_ptr,  # [T K] int64
    starts_ptr,  # [E + 1] int64
    expert_scales_ptr,  # [T K] float32
    partial_ptr,  # [T K, H] float32: by token
    NUM_EXPERTS: tl.constexpr,
    HIDDEN: tl.constexpr,
    INTERMEDIATE: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """partial = scale * inner down^T, back in the order of tokens."""
    expert, first, end = _rows_of_tile(tl.program_id(0), starts_ptr, NUM_EXPERTS, BLOCK_E, BLOCK_M)
    if expert == NUM_EXPERTS:
        return
    rows = first + tl.arange(0, BLOCK_M)
    in_m = rows < end
    offs_n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    in_n = offs_n < HIDDEN
    weight_rows = weight_ptr + (expert * HIDDEN + offs_n[:, None]) * INTERMEDIATE
    acc = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    for start in range(0, INTERMEDIATE, BLOCK_K):
        offs_k = start + tl.arange(0, BLOCK_K)
        in_k = offs_k < INTERMEDIATE
        # [BLOCK_M, BLOCK_K]
        inner = tl.load(
            inner_ptr + rows[:, None] * INTERMEDIATE + offs_k[None, :],
            mask=in_m[:, None] & in_k[None, :],
            other=0.0,
        )
        # [BLOCK_N, BLOCK_K]
        weight = tl.load(
            weight_rows + offs_k[None, :], mask=in_n[:, None] & in_k[None, :], other=0.0
        )
        acc = tl.dot(inner, tl.trans(weight), acc, input_precision="ieee")
    pairs = tl.load(pairs_ptr + rows, mask=in_m, other=0)
    scales = tl.load(expert_scales_ptr + pairs, mask=in_m, other=0.0)
    tl.store(
        partial_ptr + pairs[:, None] * HIDDEN + offs_n[None, :],
        acc * scales[:, None],
        mask=in_m[:, None] & in_n[None, :],
    )


@triton.jit
def expert_combine_kernel(
    partial_ptr,  # [T, K, H] float32
    out_ptr,  # [T, H]
    TOP_K: tl.constexpr,
    HIDDEN: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """y = the sum over a token's experts, in the order of its slots; rounded once."""
    row = tl.program_id(0).to(tl.int64)
    offs = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    in_h = offs < HIDDEN
    # [BLOCK_H]
    acc = tl.zeros([BLOCK_H], dtype=tl.float32)
    for slot in range(TOP_K):
        acc += tl.load(partial_ptr + (row * TOP_K + slot) * HIDDEN + offs, mask=in_h, other=0.0)
    tl.store(out_ptr + row * HIDDEN + offs, acc, mask=in_h)


@dataclass(frozen=True, slots=True)
class CudaExperts:
    gate_up: torch.Tensor  # [E, 2I, H], dense
    down: torch.Tensor  # [E, H, I], dense
    num_experts: int
    in_features: int


class _Grouping(NamedTuple):
    pairs: torch.Tensor
    """[T K] int64: token * K + slot, by expert, and by token within one."""
    starts: torch.Tensor
    """[E + 1] int64: where each expert's begin."""


def _group(expert_ids: torch.Tensor, num_experts: int) -> _Grouping:
    by_expert, pairs = expert_ids.flatten().sort(stable=True)
    bounds = torch.arange(num_experts + 1, device=expert_ids.device)
    return _Grouping(pairs, torch.searchsorted(by_expert, bounds))


def experts(
    x: torch.Tensor,
    weights: CudaExperts,
    expert_ids: torch.Tensor,
    expert_scales: torch.Tensor,
    *,
    gelu: bool,
    config: LinearConfig | None = None,
) -> torch.Tensor:
    """x [T, H], rows may be strided -> [T, H]. See kernels.ops.Ops.experts.

    No size depends on how tokens are spread over experts: nothing waits for the device.
    """
    num_tokens, hidden = x.shape
    top_k = expert_ids.shape[1]
    num_experts, intermediate = weights.num_experts, weights.down.shape[2]
    out = torch.empty((num_tokens, hidden), dtype=x.dtype, device=x.device)
    if num_tokens == 0:
        return out
    num_pairs = num_tokens * top_k
    if config is None:
        config = experts_config(x.element_size(), triton.cdiv(num_pairs, num_experts))
    pairs, starts = _group(expert_ids, num_experts)
    # Each expert but those without a token has one tile that is not full.
    partly_filled = min(num_experts, num_pairs)
    tiles = min(num_pairs, num_pairs // config.block_m + partly_filled)
    inner = torch.empty((num_pairs, intermediate), dtype=x.dtype, device=x.device)
    partial = torch.empty((num_pairs, hidden), dtype=torch.float32, device=x.device)
    tile_options = {
        "NUM_EXPERTS": num_experts,
        "HIDDEN": hidden,
        "INTERMEDIATE": intermediate,
        "BLOCK_E": next_power_of_2(num_experts),
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "BLOCK_K": config.block_k,
        "num_warps": config.num_warps,
        "num_stages": config.num_stages,
        "enable_fp_fusion": ENABLE_FP_FUSION,
    }
    expert_gate_up_kernel[(tiles, triton.cdiv(intermediate, config.block_n))](
        x, weights.gate_up, pairs, starts, inner, x.stride(0), TOP_K=top_k, GELU=gelu,
        **tile_options,
    )  # fmt: skip
    expert_down_kernel[(tiles, triton.cdiv(hidden, config.block_n))](
        inner, weights.down, pairs, starts, expert_scales, partial, **tile_options
    )
    expert_combine_kernel[(num_tokens, triton.cdiv(hidden, COMBINE_BLOCK_H))](
        partial,
        out,
        TOP_K=top_k,
        HIDDEN=hidden,
        BLOCK_H=COMBINE_BLOCK_H,
        num_warps=4,
        enable_fp_fusion=ENABLE_FP_FUSION,
    )
    return out
