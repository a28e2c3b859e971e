"""Sums up products whose K was cut among several programs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from kernels.cuda.configs import ENABLE_FP_FUSION

if TYPE_CHECKING:
    import torch

BLOCK_N = 512


@triton.jit
def split_combine_kernel(
    partial_ptr,  # [SPLITS, T, out] float32
    bias_ptr,  # [out]; not touched unless HAS_BIAS
    out_ptr,  # [T, out]
    OUT: tl.constexpr,
    SPLITS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """y = the sum over splits, in their order, + bias; rounded once."""
    row = tl.program_id(0).to(tl.int64)
    stride_split = tl.num_programs(0).to(tl.int64) * OUT
    offs = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    in_n = offs < OUT
    # [BLOCK_N]
    acc = tl.zeros([BLOCK_N], dtype=tl.float32)
    for split in range(SPLITS):
        acc += tl.load(partial_ptr + split * stride_split + row * OUT + offs, mask=in_n, other=0.0)
    if HAS_BIAS:
        acc += tl.load(bias_ptr + offs, mask=in_n, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * OUT + offs, acc, mask=in_n)


def combine_splits(partial: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> None:
    """partial [SPLITS, T, out] float32, bias [out] -> out [T, out], dense."""
    num_splits, num_tokens, out_features = partial.shape
    split_combine_kernel[(num_tokens, triton.cdiv(out_features, BLOCK_N))](
        partial,
        out if bias is None else bias,
        out,
        OUT=out_features,
        SPLITS=num_splits,
        HAS_BIAS=bias is not None,
        BLOCK_N=BLOCK_N,
        num_warps=4,
        enable_fp_fusion=ENABLE_FP_FUSION,
    )
