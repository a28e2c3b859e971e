"""Matrix products with weights of 8-bit floats (kernels/fp8.py).

Where the device multiplies e4m3 (compute capability 8.9 and later), x is quantized and the
tensor cores get codes on both sides. Before that, codes become the floats that they are,
and x stays as it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from kernels.cuda.configs import ENABLE_FP_FUSION, fp8_config, num_k_splits, weight_only_config
from kernels.cuda.float8 import decode_e4m3, encode_e4m3
from kernels.cuda.split_k import combine_splits
from kernels.fp8 import E4M3, QuantizedActivations, merge_rows

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kernels.fp8 import Fp8Tensor

MIN_BLOCK_K = 32
"""tl.dot of 8-bit floats wants at least 32."""
MAX_BLOCK_K = 128
QUANTIZE_BLOCK = 1024


@triton.jit
def quantize_activations_kernel(
    x_ptr,  # [T, in]
    input_scale_ptr,  # [1] float32; not touched unless IS_STATIC
    codes_ptr,  # [T, in] e4m3
    x_scales_ptr,  # [T, in / GROUP] float32
    stride_x,
    IN: tl.constexpr,
    GROUP: tl.constexpr,
    IS_STATIC: tl.constexpr,
    BY_INSTRUCTION: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """codes = x / scale to the nearest, with scale = max |x| / 448 of GROUP features of a
    token, 1 where all are 0. A program for each group; a second look at it comes from cache."""
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    first = group * GROUP
    end = tl.minimum(first + GROUP, IN)
    if IS_STATIC:
        scale = tl.load(input_scale_ptr)
    else:
        largest = tl.zeros([BLOCK_K], dtype=tl.float32)
        for start in range(first, end, BLOCK_K):
            offs = start + tl.arange(0, BLOCK_K)
            x = tl.load(x_ptr + row * stride_x + offs, mask=offs < end, other=0.0)
            largest = tl.maximum(largest, tl.abs(x.to(tl.float32)))
        greatest = tl.max(largest, axis=0)
        scale = tl.where(greatest > 0, tl.div_rn(greatest, 448.0), 1.0)
    for start in range(first, end, BLOCK_K):
        offs = start + tl.arange(0, BLOCK_K)
        x = tl.load(x_ptr + row * stride_x + offs, mask=offs < end, other=0.0).to(tl.float32)
        # Division that rounds once: a code must not depend on the backend.
        codes = encode_e4m3(tl.div_rn(x, tl.zeros_like(x) + scale), BY_INSTRUCTION)
        tl.store(codes_ptr + row * IN + offs, codes, mask=offs < end)
    tl.store(x_scales_ptr + row * tl.num_programs(1) + group, scale)


@triton.jit(do_not_specialize=["num_tokens"])
def fp8_linear_kernel(
    x_ptr,  # [T, in]: e4m3 if X_IS_FP8, else float
    x_scales_ptr,  # [T, ceil(in / SCALE_K)] float32; not touched unless X_IS_FP8
    weight_ptr,  # [out, in] e4m3
    scales_ptr,  # [ceil(out / SCALE_N), ceil(in / SCALE_K)] float32
    bias_ptr,  # [out]; not touched unless HAS_BIAS and SPLITS is 1
    out_ptr,  # [T, out], or [SPLITS, T, out] float32
    num_tokens,
    stride_x,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    SCALE_N: tl.constexpr,
    SCALE_K: tl.constexpr,
    X_IS_FP8: tl.constexpr,
    BY_INSTRUCTION: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """y = (codes of x  codes of w^T) x_scale w_scale + bias in float32, rounded once.

    Scales are outside of the products that they are constant for: all of K, or tiles of
    SCALE_K, which BLOCK_K divides. Hopper's tensor cores add up products of 8-bit floats
    in fewer bits than float32; BLOCK_K of them go to float32 each time
    (DeepSeek-V3, https://arxiv.org/abs/2412.19437, section 3.3.2).
    """
    offs_m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = tl.program_id(1).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    split = tl.program_id(2)
    in_m = offs_m < num_tokens
    in_n = offs_n < OUT
    TILES: tl.constexpr = (IN + BLOCK_K - 1) // BLOCK_K
    SCALES: tl.constexpr = (IN + SCALE_K - 1) // SCALE_K
    first = split * TILES // SPLITS
    last = (split + 1) * TILES // SPLITS
    x_scale_ptrs = x_scales_ptr + offs_m * SCALES
    scale_ptrs = scales_ptr + offs_n // SCALE_N * SCALES
    acc = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    for tile in range(first, last):
        start = tile * BLOCK_K
        offs_k = start + tl.arange(0, BLOCK_K)
        in_k = offs_k < IN
        # [BLOCK_M, BLOCK_K]
        x_ptrs = x_ptr + offs_m[:, None] * stride_x + offs_k[None, :]
        x = tl.load(x_ptrs, mask=in_m[:, None] & in_k[None, :], other=0.0)
        # [BLOCK_N, BLOCK_K]
        weight_ptrs = weight_ptr + offs_n[:, None] * IN + offs_k[None, :]
        weight = tl.load(weight_ptrs, mask=in_n[:, None] & in_k[None, :], other=0.0)
        if X_IS_FP8:
            if not BY_INSTRUCTION:
                x = decode_e4m3(x, tl.float16, False)
                weight = decode_e4m3(weight, tl.float16, False)
        else:
            weight = decode_e4m3(weight, x.dtype, BY_INSTRUCTION)
        if SCALES == 1:
            acc = tl.dot(
                x, tl.trans(weight), acc, input_precision="ieee", max_num_imprecise_acc=BLOCK_K
            )
        else:
            product = tl.dot(x, tl.trans(weight), input_precision="ieee")
            at = start // SCALE_K
            product *= tl.load(scale_ptrs + at, mask=in_n, other=0.0)[None, :]
            if X_IS_FP8:
                product *= tl.load(x_scale_ptrs + at, mask=in_m, other=0.0)[:, None]
            acc += product
    if SCALES == 1:
        acc *= tl.load(scale_ptrs, mask=in_n, other=0.0)[None, :]
        if X_IS_FP8:
            acc *= tl.load(x_scale_ptrs, mask=in_m, other=0.0)[:, None]
    if HAS_BIAS and SPLITS == 1:
        acc += tl.load(bias_ptr + offs_n, mask=in_n, other=0.0).to(tl.float32)[None, :]
    rows = split.to(tl.int64) * num_tokens + offs_m
    tl.store(
        out_ptr + rows[:, None] * OUT + offs_n[None, :], acc, mask=in_m[:, None] & in_n[None, :]
    )


@dataclass(frozen=True, slots=True)
class CudaFp8Linear:
    weight: Fp8Tensor
    bias: torch.Tensor | None  # [out]
    out_features: int
    in_features: int

    @classmethod
    def prepare(cls, parts: Sequence[Fp8Tensor], bias: torch.Tensor | None) -> CudaFp8Linear:
        """Raises ValueError for parts that cannot be one weight or have NaN codes, and for
        blocks that tiles do not fit in."""
        weight = merge_rows(parts)
        columns, in_features = weight.block[1], weight.shape[1]
        if columns < in_features and columns % MIN_BLOCK_K:
            raise ValueError(
                f"fp8 linear: a scale for each {columns} features; want all of them, or a "
                f"multiple of {MIN_BLOCK_K}"
            )
        if bool((weight.data.view(torch.uint8) & 0x7F == 0x7F).any()):
            raise ValueError(f"fp8 linear: NaN among the codes of a weight {list(weight.shape)}")
        return cls(weight, bias, *weight.shape)


def quantize_activations(
    x: torch.Tensor, group: int, input_scale: torch.Tensor | None, *, by_instruction: bool
) -> QuantizedActivations:
    """As kernels.fp8.quantize_activations. x [T, in], rows may be strided."""
    num_tokens, in_features = x.shape
    num_groups = triton.cdiv(in_features, group)
    codes = torch.empty((num_tokens, in_features), dtype=E4M3, device=x.device)
    scales = torch.empty((num_tokens, num_groups), dtype=torch.float32, device=x.device)
    if num_tokens:
        quantize_activations_kernel[(num_tokens, num_groups)](
            x,
            scales if input_scale is None else input_scale,
            _codes(codes, by_instruction),
            scales,
            x.stride(0),
            IN=in_features,
            GROUP=min(group, in_features),
            IS_STATIC=input_scale is not None,
            BY_INSTRUCTION=by_instruction,
            BLOCK_K=min(QUANTIZE_BLOCK, triton.next_power_of_2(min(group, in_features))),
            num_warps=4,
            enable_fp_fusion=ENABLE_FP_FUSION,
        )
    return QuantizedActivations(codes, scales)


def _codes(tensor: torch.Tensor, by_instruction: bool) -> torch.Tensor:
    """As the kernels take it: devices without the instructions do not have the type."""
    return tensor if by_instruction else tensor.view(torch.uint8)


def fp8_linear(
    x: torch.Tensor,
    weight: CudaFp8Linear,
    *,
    multiplies_fp8: bool,
    num_sms: int,
    is_invariant: bool = False,
) -> torch.Tensor:
    """x [T, in], rows may be strided -> [T, out]. is_invariant: with one order of summation,
    whatever T is."""
    by_instruction = multiplies_fp8 and x.device.type == "cuda"
    num_tokens = x.shape[0]
    out_features, in_features = weight.weight.shape
    out = torch.empty((num_tokens, out_features), dtype=x.dtype, device=x.device)
    if num_tokens == 0:
        return out
    tensor = weight.weight
    scale_k = min(tensor.block[1], in_features)
    tokens_for_config = 16 if is_invariant else num_tokens
    if multiplies_fp8:
        config = fp8_config(tokens_for_config)
        quantized = quantize_activations(
            x, scale_k, tensor.input_scale, by_instruction=by_instruction
        )
        left, x_scales = _codes(quantized.codes, by_instruction), quantized.scales
    else:
        config = weight_only_config(x.element_size(), tokens_for_config)
        left, x_scales = x, tensor.scales
    block_k = config.block_k
    if scale_k < in_features:
        block_k = min(MAX_BLOCK_K, block_k, scale_k & -scale_k)
    rows = triton.cdiv(num_tokens, config.block_m)
    columns = triton.cdiv(out_features, config.block_n)
    tiles = triton.cdiv(in_features, block_k)
    splits = 1 if is_invariant else num_k_splits(rows * columns, tiles, num_sms)
    target = out
    if splits > 1:
        shape = (splits, num_tokens, out_features)
        target = torch.empty(shape, dtype=torch.float32, device=x.device)
    fp8_linear_kernel[(rows, columns, splits)](
        left,
        x_scales,
        _codes(tensor.data, by_instruction),
        tensor.scales,
        out if weight.bias is None else weight.bias,
        target,
        num_tokens,
        left.stride(0),
        IN=in_features,
        OUT=out_features,
        SCALE_N=tensor.block[0],
        SCALE_K=scale_k,
        X_IS_FP8=multiplies_fp8,
        BY_INSTRUCTION=by_instruction,
        HAS_BIAS=weight.bias is not None,
        SPLITS=splits,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        BLOCK_K=block_k,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        enable_fp_fusion=ENABLE_FP_FUSION,
    )
    if splits > 1:
        combine_splits(target, weight.bias, out)
    return out
