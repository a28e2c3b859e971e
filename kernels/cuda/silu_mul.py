"""The gated activation of the Llama feed-forward layer."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.cuda.configs import ENABLE_FP_FUSION

BLOCK_I = 1024


@triton.jit
def silu_mul_kernel(
    gate_up_ptr,  # [T, 2I]
    out_ptr,  # [T, I]
    stride_gate_up,
    stride_out,
    INTERMEDIATE: tl.constexpr,
    BLOCK_I: tl.constexpr,
):
    """y = g / (1 + e^-g) * u, with [g, u] = gate_up; float32 inside.

    SwiGLU: Shazeer, https://arxiv.org/abs/2002.05202.
    """
    row = tl.program_id(0).to(tl.int64)
    offs = tl.program_id(1) * BLOCK_I + tl.arange(0, BLOCK_I)
    in_i = offs < INTERMEDIATE
    gate_row = gate_up_ptr + row * stride_gate_up + offs
    # [BLOCK_I]
    gate = tl.load(gate_row, mask=in_i, other=0.0).to(tl.float32)
    up = tl.load(gate_row + INTERMEDIATE, mask=in_i, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * stride_out + offs, gate * tl.sigmoid(gate) * up, mask=in_i)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """gate_up [T, 2I], rows may be strided -> [T, I]."""
    num_tokens, width = gate_up.shape
    intermediate = width // 2
    out = torch.empty((num_tokens, intermediate), dtype=gate_up.dtype, device=gate_up.device)
    if num_tokens == 0:
        return out
    silu_mul_kernel[(num_tokens, triton.cdiv(intermediate, BLOCK_I))](
        gate_up,
        out,
        gate_up.stride(0),
        out.stride(0),
        INTERMEDIATE=intermediate,
        BLOCK_I=BLOCK_I,
        num_warps=4,
        enable_fp_fusion=ENABLE_FP_FUSION,
    )
    return out
