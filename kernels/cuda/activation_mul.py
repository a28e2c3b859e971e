"""The gated activations of feed-forward layers."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.cuda.configs import ENABLE_FP_FUSION

BLOCK_I = 1024


@triton.jit
def activate(x, GELU: tl.constexpr):
    """silu(x) = x sigmoid(x), or gelu(x) with its tanh approximation; x float32.

    (1 + tanh(u)) / 2 = sigmoid(2 u), so gelu(x) = x sigmoid(2 sqrt(2 / pi) (x + 0.044715 x^3)).
    """
    u = 1.5957691216057308 * (x + 0.044715 * x * x * x) if GELU else x
    # exp(87) is still finite, and 1 / exp(87) as good as 0.
    return x * tl.sigmoid(tl.maximum(u, -87.0))


@triton.jit
def activation_mul_kernel(
    gate_up_ptr,  # [T, 2I]
    out_ptr,  # [T, I]
    stride_gate_up,
    stride_out,
    INTERMEDIATE: tl.constexpr,
    GELU: tl.constexpr,
    BLOCK_I: tl.constexpr,
):
    """y = activate(g) * u, with [g, u] = gate_up; float32 inside.

    SwiGLU and GeGLU: Shazeer, https://arxiv.org/abs/2002.05202.
    """
    row = tl.program_id(0).to(tl.int64)
    offs = tl.program_id(1) * BLOCK_I + tl.arange(0, BLOCK_I)
    in_i = offs < INTERMEDIATE
    gate_row = gate_up_ptr + row * stride_gate_up + offs
    # [BLOCK_I]
    gate = tl.load(gate_row, mask=in_i, other=0.0).to(tl.float32)
    up = tl.load(gate_row + INTERMEDIATE, mask=in_i, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * stride_out + offs, activate(gate, GELU) * up, mask=in_i)


def activation_mul(gate_up: torch.Tensor, *, gelu: bool) -> torch.Tensor:
    """gate_up [T, 2I], rows may be strided -> [T, I]."""
    num_tokens, width = gate_up.shape
    intermediate = width // 2
    out = torch.empty((num_tokens, intermediate), dtype=gate_up.dtype, device=gate_up.device)
    if num_tokens == 0:
        return out
    activation_mul_kernel[(num_tokens, triton.cdiv(intermediate, BLOCK_I))](
        gate_up,
        out,
        gate_up.stride(0),
        out.stride(0),
        INTERMEDIATE=intermediate,
        GELU=gelu,
        BLOCK_I=BLOCK_I,
        num_warps=4,
        enable_fp_fusion=ENABLE_FP_FUSION,
    )
    return out
