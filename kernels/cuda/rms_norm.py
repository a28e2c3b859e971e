"""RMSNorm, alone and fused with the residual addition before it."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.cuda.configs import ENABLE_FP_FUSION, next_power_of_2, row_warps


@triton.jit
def rms_norm_kernel(
    x_ptr,  # [T, H]
    weight_ptr,  # [H]
    out_ptr,  # [T, H]
    eps,
    stride_x,
    stride_out,
    HIDDEN: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """y = x / sqrt(mean(x^2) + eps) * weight, one row per program, float32 inside.

    Zhang and Sennrich, https://arxiv.org/abs/1910.07467.
    """
    row = tl.program_id(0).to(tl.int64)
    offs = tl.arange(0, BLOCK_H)
    in_h = offs < HIDDEN
    # [BLOCK_H]  one whole row
    x = tl.load(x_ptr + row * stride_x + offs, mask=in_h, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + offs, mask=in_h, other=0.0).to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(x * x, axis=0) / HIDDEN + eps)
    tl.store(out_ptr + row * stride_out + offs, x * scale * weight, mask=in_h)


@triton.jit
def add_rms_norm_kernel(
    x_ptr,  # [T, H]
    residual_ptr,  # [T, H], read and written
    weight_ptr,  # [H]
    out_ptr,  # [T, H]
    eps,
    stride_x,
    stride_residual,
    stride_out,
    HIDDEN: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """r = r + x in r's dtype; y = r / sqrt(mean(r^2) + eps) * weight, float32 inside.

    Zhang and Sennrich, https://arxiv.org/abs/1910.07467.
    """
    row = tl.program_id(0).to(tl.int64)
    offs = tl.arange(0, BLOCK_H)
    in_h = offs < HIDDEN
    # [BLOCK_H]  one whole row
    x = tl.load(x_ptr + row * stride_x + offs, mask=in_h, other=0.0).to(tl.float32)
    residual_row = residual_ptr + row * stride_residual + offs
    residual = tl.load(residual_row, mask=in_h, other=0.0).to(tl.float32)
    # Rounded to the stored value first, so that the norm sees what the next layer adds to.
    total = (residual + x).to(residual_ptr.dtype.element_ty)
    tl.store(residual_row, total, mask=in_h)
    r = total.to(tl.float32)
    weight = tl.load(weight_ptr + offs, mask=in_h, other=0.0).to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(r * r, axis=0) / HIDDEN + eps)
    tl.store(out_ptr + row * stride_out + offs, r * scale * weight, mask=in_h)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x [T, H], rows may be strided -> [T, H]."""
    num_tokens, hidden = x.shape
    out = torch.empty((num_tokens, hidden), dtype=x.dtype, device=x.device)
    if num_tokens == 0:
        return out
    block = next_power_of_2(hidden)
    rms_norm_kernel[(num_tokens,)](
        x,
        weight,
        out,
        eps,
        x.stride(0),
        out.stride(0),
        HIDDEN=hidden,
        BLOCK_H=block,
        num_warps=row_warps(block),
        enable_fp_fusion=ENABLE_FP_FUSION,
    )
    return out


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """residual += x in place -> rms_norm(residual) [T, H]. x, residual [T, H]."""
    num_tokens, hidden = x.shape
    out = torch.empty((num_tokens, hidden), dtype=x.dtype, device=x.device)
    if num_tokens == 0:
        return out
    block = next_power_of_2(hidden)
    add_rms_norm_kernel[(num_tokens,)](
        x,
        residual,
        weight,
        out,
        eps,
        x.stride(0),
        residual.stride(0),
        out.stride(0),
        HIDDEN=hidden,
        BLOCK_H=block,
        num_warps=row_warps(block),
        enable_fp_fusion=ENABLE_FP_FUSION,
    )
    return out
