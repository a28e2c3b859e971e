"""A matrix product with 4-bit weights, in the layout of kernels/int4.py."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from kernels.cuda.configs import (
    ENABLE_FP_FUSION,
    LinearConfig,
    num_k_splits,
    weight_only_config,
)
from kernels.cuda.split_k import combine_splits
from kernels.int4 import merge_rows

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kernels.int4 import Int4Tensor


@triton.jit
def _differences(codes, zeros, element: tl.constexpr):
    """codes [N, K] uint8 below 16 and zeros [N] uint8 up to 16 -> codes - zeros [N, K] in
    element, exactly.

    A code in the low bits of a power of two's mantissa is that power plus the code, which
    spares the conversion from integers.
    """
    if element == tl.bfloat16:
        wide = (codes.to(tl.int16) | 0x4300).to(tl.bfloat16, bitcast=True)
        return wide - (zeros.to(tl.int16) | 0x4300).to(tl.bfloat16, bitcast=True)[:, None]
    elif element == tl.float16:
        wide = (codes.to(tl.int16) | 0x6400).to(tl.float16, bitcast=True)
        return wide - (zeros.to(tl.int16) | 0x6400).to(tl.float16, bitcast=True)[:, None]
    else:
        wide = (codes.to(tl.int32) | 0x4B000000).to(tl.float32, bitcast=True)
        return wide - (zeros.to(tl.int32) | 0x4B000000).to(tl.float32, bitcast=True)[:, None]


@triton.jit(do_not_specialize=["num_tokens"])
def int4_linear_kernel(
    x_ptr,  # [T, in]
    codes_ptr,  # [out, in / 2] uint8
    scales_ptr,  # [out, in / GROUP] float
    zeros_ptr,  # [out, in / GROUP] uint8; not touched unless HAS_ZEROS
    bias_ptr,  # [out]; not touched unless HAS_BIAS and SPLITS is 1
    out_ptr,  # [T, out], or [SPLITS, T, out] float32
    num_tokens,
    stride_x,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    GROUP: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """y = x w^T + bias with w = scale (code - zero), in float32, rounded once.

    BLOCK_K divides GROUP, so that a tile has one scale for each of its rows: it multiplies
    the tile's product, and what the tensor cores see are small integers, which all types
    hold exactly. Byte j of 16 holds features j and 16 + j of 32, hence two products of half
    a tile each. A program makes one of SPLITS parts of K.
    """
    offs_m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = tl.program_id(1).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    split = tl.program_id(2)
    in_m = offs_m < num_tokens
    in_n = offs_n < OUT
    offs_byte = tl.arange(0, BLOCK_K // 2)
    offs_low = offs_byte // 16 * 32 + offs_byte % 16
    TILES: tl.constexpr = IN // BLOCK_K
    first = split * TILES // SPLITS
    last = (split + 1) * TILES // SPLITS
    acc = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    for tile in range(first, last):
        start = tile * BLOCK_K
        # [BLOCK_M, BLOCK_K / 2]
        x_ptrs = x_ptr + offs_m[:, None] * stride_x + start + offs_low[None, :]
        x_low = tl.load(x_ptrs, mask=in_m[:, None], other=0.0)
        x_high = tl.load(x_ptrs + 16, mask=in_m[:, None], other=0.0)
        # [BLOCK_N, BLOCK_K / 2]
        codes = tl.load(
            codes_ptr + offs_n[:, None] * (IN // 2) + start // 2 + offs_byte[None, :],
            mask=in_n[:, None],
            other=0,
        )
        # [BLOCK_N]
        offs_group = offs_n * (IN // GROUP) + start // GROUP
        scales = tl.load(scales_ptr + offs_group, mask=in_n, other=0.0).to(tl.float32)
        if HAS_ZEROS:
            zeros = tl.load(zeros_ptr + offs_group, mask=in_n, other=0)
        else:
            zeros = tl.full([BLOCK_N], 8, dtype=tl.uint8)
        low = _differences(codes & 15, zeros, x_low.dtype)
        high = _differences(codes >> 4, zeros, x_low.dtype)
        product = tl.dot(x_low, tl.trans(low), input_precision="ieee")
        product = tl.dot(x_high, tl.trans(high), product, input_precision="ieee")
        acc += product * scales[None, :]
    if HAS_BIAS and SPLITS == 1:
        acc += tl.load(bias_ptr + offs_n, mask=in_n, other=0.0).to(tl.float32)[None, :]
    rows = split.to(tl.int64) * num_tokens + offs_m
    tl.store(
        out_ptr + rows[:, None] * OUT + offs_n[None, :], acc, mask=in_m[:, None] & in_n[None, :]
    )


@dataclass(frozen=True, slots=True)
class CudaInt4Linear:
    parts: tuple[Int4Tensor, ...]
    """Rows that share a group size and a perm, side by side in y."""
    bias: torch.Tensor | None  # [out]
    out_features: int
    in_features: int

    @classmethod
    def prepare(cls, parts: Sequence[Int4Tensor], bias: torch.Tensor | None) -> CudaInt4Linear:
        merged = tuple(merge_rows(parts))
        return cls(merged, bias, sum(part.shape[0] for part in merged), merged[0].shape[1])


def block_k_for(config: LinearConfig, group_size: int) -> int:
    """The greatest power of two up to the config's that divides a group."""
    return min(config.block_k, group_size & -group_size)


def int4_linear(
    x: torch.Tensor, weight: CudaInt4Linear, *, num_sms: int, is_invariant: bool = False
) -> torch.Tensor:
    """x [T, in], rows may be strided -> [T, out]. is_invariant: with one order of summation,
    whatever T is."""
    pieces = []
    start = 0
    for part in weight.parts:
        end = start + part.shape[0]
        bias = None if weight.bias is None else weight.bias[start:end]
        columns = x if part.perm is None else x.index_select(1, part.perm)
        pieces.append(_product(columns, part, bias, num_sms, is_invariant))
        start = end
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=1)


def _product(
    x: torch.Tensor,
    weight: Int4Tensor,
    bias: torch.Tensor | None,
    num_sms: int,
    is_invariant: bool,
) -> torch.Tensor:
    num_tokens = x.shape[0]
    out_features, in_features = weight.shape
    out = torch.empty((num_tokens, out_features), dtype=x.dtype, device=x.device)
    if num_tokens == 0:
        return out
    config = weight_only_config(x.element_size(), 16 if is_invariant else num_tokens)
    block_k = block_k_for(config, weight.group_size)
    rows = triton.cdiv(num_tokens, config.block_m)
    columns = triton.cdiv(out_features, config.block_n)
    splits = 1 if is_invariant else num_k_splits(rows * columns, in_features // block_k, num_sms)
    target = out
    if splits > 1:
        shape = (splits, num_tokens, out_features)
        target = torch.empty(shape, dtype=torch.float32, device=x.device)
    int4_linear_kernel[(rows, columns, splits)](
        x,
        weight.codes,
        weight.scales,
        weight.codes if weight.zeros is None else weight.zeros,
        out if bias is None else bias,
        target,
        num_tokens,
        x.stride(0),
        IN=in_features,
        OUT=out_features,
        GROUP=weight.group_size,
        HAS_ZEROS=weight.zeros is not None,
        HAS_BIAS=bias is not None,
        SPLITS=splits,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        BLOCK_K=block_k,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        enable_fp_fusion=ENABLE_FP_FUSION,
    )
    if splits > 1:
        combine_splits(target, bias, out)
    return out
