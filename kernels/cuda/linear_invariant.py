"""A matrix product that sums in one order, however many rows there are."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.cuda.configs import ENABLE_FP_FUSION, LinearConfig, linear_config


# Not specialized on the number of tokens: compiled code must not depend on it either.
@triton.jit(do_not_specialize=["num_tokens"])
def linear_invariant_kernel(
    x_ptr,  # [T, in]
    weight_ptr,  # [out, in]
    bias_ptr,  # [out]; not touched unless HAS_BIAS
    out_ptr,  # [T, out]
    num_tokens,
    stride_x,
    stride_weight,
    stride_out,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """y = x weight^T + bias in float32, rounded once.

    One program makes one tile of y and passes over all of K in tiles of BLOCK_K, from the
    first on: no split of K, and no tile size that follows the number of rows, which is
    where cuBLAS changes its order of summation. A row of tl.dot does not depend on the
    other rows. https://thinkingmachines.ai/blog/defeating-nondeterminism-in-llm-inference/
    """
    offs_m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = tl.program_id(1).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    in_m = offs_m < num_tokens
    in_n = offs_n < OUT
    acc = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    for start in range(0, IN, BLOCK_K):
        offs_k = start + tl.arange(0, BLOCK_K)
        in_k = offs_k < IN
        # [BLOCK_M, BLOCK_K]
        x = tl.load(
            x_ptr + offs_m[:, None] * stride_x + offs_k[None, :],
            mask=in_m[:, None] & in_k[None, :],
            other=0.0,
        )
        # [BLOCK_N, BLOCK_K]
        weight = tl.load(
            weight_ptr + offs_n[:, None] * stride_weight + offs_k[None, :],
            mask=in_n[:, None] & in_k[None, :],
            other=0.0,
        )
        acc = tl.dot(x, tl.trans(weight), acc, input_precision="ieee")
    if HAS_BIAS:
        acc += tl.load(bias_ptr + offs_n, mask=in_n, other=0.0).to(tl.float32)[None, :]
    tl.store(
        out_ptr + offs_m[:, None] * stride_out + offs_n[None, :],
        acc,
        mask=in_m[:, None] & in_n[None, :],
    )


def linear_invariant(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    config: LinearConfig | None = None,
) -> torch.Tensor:
    """x [T, in], rows may be strided, weight [out, in] -> [T, out]."""
    num_tokens = x.shape[0]
    out_features, in_features = weight.shape
    out = torch.empty((num_tokens, out_features), dtype=x.dtype, device=x.device)
    if num_tokens == 0:
        return out
    if config is None:
        config = linear_config(x.element_size())
    grid = (
        triton.cdiv(num_tokens, config.block_m),
        triton.cdiv(out_features, config.block_n),
    )
    linear_invariant_kernel[grid](
        x,
        weight,
        weight if bias is None else bias,
        out,
        num_tokens,
        x.stride(0),
        weight.stride(0),
        out.stride(0),
        IN=in_features,
        OUT=out_features,
        HAS_BIAS=bias is not None,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        enable_fp_fusion=ENABLE_FP_FUSION,
    )
    return out
