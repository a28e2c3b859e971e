"""Penalties on the logits of known ids, and biases, in place: one launch each.

Roundings are the reference's: the quotient is the correctly rounded one, and the product of
frequency and count is rounded before it is subtracted. So results are equal bit for bit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from kernels.cuda.configs import ENABLE_FP_FUSION

if TYPE_CHECKING:
    import torch

    from kernels.ops import PenaltyBatch, TokenLists

BLOCK_K = 512
"""Ids of a program, all of one list."""
NUM_WARPS = 4

# These may be views of what was uploaded as one.
_LISTS = ["rows_ptr", "list_starts_ptr", "token_ids_ptr"]
_PENALTIES = ["counts_ptr", "repetition_ptr", "frequency_ptr", "presence_ptr"]


@triton.jit(do_not_specialize_on_alignment=[*_LISTS, *_PENALTIES])
def apply_penalties_kernel(
    logits_ptr,  # [S, V] float32, in place
    rows_ptr,  # [R] int64
    list_starts_ptr,  # [R + 1] int64
    token_ids_ptr,  # [K] int64
    counts_ptr,  # [K] float32
    repetition_ptr,  # [R] float32
    frequency_ptr,  # [R] float32
    presence_ptr,  # [R] float32
    stride_logits,
    BLOCK_K: tl.constexpr,
):
    number = tl.program_id(0)
    start = tl.load(list_starts_ptr + number) + tl.program_id(1) * BLOCK_K
    end = tl.load(list_starts_ptr + number + 1)
    if start >= end:
        return
    offs = start + tl.arange(0, BLOCK_K)
    mask = offs < end
    row = tl.load(rows_ptr + number)
    places = logits_ptr + row * stride_logits + tl.load(token_ids_ptr + offs, mask=mask, other=0)
    counts = tl.load(counts_ptr + offs, mask=mask, other=0.0)
    x = tl.load(places, mask=mask, other=0.0)
    repetition = tl.load(repetition_ptr + number)
    presence = tl.load(presence_ptr + number)
    penalized = _finite(
        tl.where(x > 0, tl.div_rn(x, repetition + tl.zeros_like(x)), x * repetition)
    )
    # Exact in float64, then rounded to float32: a product that cannot be fused into the difference.
    frequency = tl.load(frequency_ptr + number).to(tl.float64)
    penalized -= (frequency * counts.to(tl.float64)).to(tl.float32)
    penalized -= tl.where(counts > 0, presence, 0.0)
    is_infinite = tl.abs(x) == float("inf")
    tl.store(places, tl.where(is_infinite, x, _finite(penalized)), mask=mask)


@triton.jit
def _finite(x):
    """x float32, infinities replaced by the largest number of their sign; NaN stays."""
    largest = 3.4028234663852886e38
    x = tl.where(x > largest, largest, x)
    return tl.where(x < -largest, -largest, x)


@triton.jit(do_not_specialize_on_alignment=_LISTS)
def add_logit_bias_kernel(
    logits_ptr,  # [S, V] float32, in place
    rows_ptr,  # [R] int64
    list_starts_ptr,  # [R + 1] int64
    token_ids_ptr,  # [K] int64
    values_ptr,  # [K] float32
    stride_logits,
    BLOCK_K: tl.constexpr,
):
    number = tl.program_id(0)
    start = tl.load(list_starts_ptr + number) + tl.program_id(1) * BLOCK_K
    end = tl.load(list_starts_ptr + number + 1)
    if start >= end:
        return
    offs = start + tl.arange(0, BLOCK_K)
    mask = offs < end
    row = tl.load(rows_ptr + number)
    places = logits_ptr + row * stride_logits + tl.load(token_ids_ptr + offs, mask=mask, other=0)
    values = tl.load(values_ptr + offs, mask=mask, other=0.0)
    tl.store(places, tl.load(places, mask=mask, other=0.0) + values, mask=mask)


def apply_penalties(logits: torch.Tensor, batch: PenaltyBatch) -> None:
    """logits [S, V] float32, rows may be strided. See kernels.ops.Ops.apply_penalties."""
    known = batch.known
    if known.longest == 0:
        return
    apply_penalties_kernel[_grid(known)](
        logits,
        known.rows,
        known.starts,
        known.ids,
        batch.counts,
        batch.repetition,
        batch.frequency,
        batch.presence,
        logits.stride(0),
        BLOCK_K=BLOCK_K,
        num_warps=NUM_WARPS,
        enable_fp_fusion=ENABLE_FP_FUSION,
    )


def add_logit_bias(logits: torch.Tensor, ids: TokenLists, values: torch.Tensor) -> None:
    """logits [S, V] float32, rows may be strided. See kernels.ops.Ops.add_logit_bias."""
    if ids.longest == 0:
        return
    add_logit_bias_kernel[_grid(ids)](
        logits,
        ids.rows,
        ids.starts,
        ids.ids,
        values,
        logits.stride(0),
        BLOCK_K=BLOCK_K,
        num_warps=NUM_WARPS,
        enable_fp_fusion=ENABLE_FP_FUSION,
    )


def _grid(lists: TokenLists) -> tuple[int, int]:
    return len(lists.rows), triton.cdiv(lists.longest, BLOCK_K)
