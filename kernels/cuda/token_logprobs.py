"""Logprobs and ranks of given tokens, without writing the log softmax of their rows.

Two passes over the logits, each with a program for every PART_V of them: the greatest logit
and the sum of exponentials of each part; then, by the parts' in a fixed order, the row's, and
how many of a part's logprobs exceed the token's. Parts do not follow the batch, so neither do
results, bit for bit.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.cuda.configs import ENABLE_FP_FUSION, next_power_of_2
from kernels.ops import TokenLogprobs

PART_V = 4096
"""Logits of a program."""
NUM_WARPS = 4


@triton.jit(do_not_specialize=["vocab_size"])
def sum_exp_parts_kernel(
    logits_ptr,  # [N, V]
    maxima_ptr,  # [N, P] float32
    sums_ptr,  # [N, P] float32
    stride_logits,
    vocab_size,
    num_parts,
    PART_V: tl.constexpr,
):
    """Each part's greatest logit m, and its sum of exp(logit - m)."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    offs = part * PART_V + tl.arange(0, PART_V)
    x = tl.load(
        logits_ptr + row * stride_logits + offs, mask=offs < vocab_size, other=float("-inf")
    ).to(tl.float32)
    greatest = tl.max(x, axis=0)
    # A part of -inf alone has a sum of 0, as its row may have others.
    weights = tl.where(x == float("-inf"), 0.0, tl.exp(x - greatest))
    tl.store(maxima_ptr + row * num_parts + part, greatest)
    tl.store(sums_ptr + row * num_parts + part, tl.sum(weights, axis=0))


@triton.jit(do_not_specialize=["vocab_size"])
def rank_parts_kernel(
    logits_ptr,  # [N, V]
    token_ids_ptr,  # [N] int64
    maxima_ptr,  # [N, P] float32
    sums_ptr,  # [N, P] float32
    logprobs_ptr,  # [N] float32
    ranks_ptr,  # [N] int64, ones
    all_logprobs_ptr,  # [N, V] float32; not touched unless WITH_ALL
    stride_logits,
    vocab_size,
    num_parts,
    WITH_ALL: tl.constexpr,
    BLOCK_P: tl.constexpr,
    PART_V: tl.constexpr,
):
    """Adds a part's likelier tokens to the rank; the first part's program writes the logprob."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    logits_ptr += row * stride_logits
    parts = tl.arange(0, BLOCK_P)
    is_part = parts < num_parts
    maxima = tl.load(maxima_ptr + row * num_parts + parts, mask=is_part, other=float("-inf"))
    sums = tl.load(sums_ptr + row * num_parts + parts, mask=is_part, other=0.0)
    greatest = tl.max(maxima, axis=0)
    # NaN, unlike -inf, has to reach the sum.
    scaled = tl.where(maxima == float("-inf"), 0.0, sums * tl.exp(maxima - greatest))
    log_sum = tl.log(tl.sum(scaled, axis=0))

    own = tl.load(logits_ptr + tl.load(token_ids_ptr + row)).to(tl.float32)
    own = (own - greatest) - log_sum
    offs = part * PART_V + tl.arange(0, PART_V)
    mask = offs < vocab_size
    x = tl.load(logits_ptr + offs, mask=mask, other=float("-inf")).to(tl.float32)
    logprobs = (x - greatest) - log_sum
    # An atomic sum of integers is the same in any order.
    num_likelier = tl.sum((mask & (logprobs > own)).to(tl.int64), axis=0)
    tl.atomic_add(ranks_ptr + row, num_likelier, sem="relaxed")
    if part == 0:
        tl.store(logprobs_ptr + row, own)
    if WITH_ALL:
        tl.store(all_logprobs_ptr + row * vocab_size + offs, logprobs, mask=mask)


def token_logprobs(
    logits: torch.Tensor, token_ids: torch.Tensor, *, with_all: bool
) -> TokenLogprobs:
    """logits [N, V], rows may be strided; token_ids [N] int64. See Ops.token_logprobs."""
    num_rows, vocab_size = logits.shape
    num_parts = triton.cdiv(vocab_size, PART_V)

    def floats(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.float32, device=logits.device)

    values = floats(num_rows)
    ranks = torch.ones(num_rows, dtype=torch.int64, device=logits.device)
    everything = floats(num_rows, vocab_size) if with_all else None
    if num_rows == 0:
        return TokenLogprobs(values, ranks, everything)
    maxima, sums = floats(2, num_rows, num_parts)
    grid = (num_rows, num_parts)
    sum_exp_parts_kernel[grid](
        logits,
        maxima,
        sums,
        logits.stride(0),
        vocab_size,
        num_parts,
        PART_V=PART_V,
        num_warps=NUM_WARPS,
        enable_fp_fusion=ENABLE_FP_FUSION,
    )
    rank_parts_kernel[grid](
        logits,
        token_ids,
        maxima,
        sums,
        values,
        ranks,
        values if everything is None else everything,
        logits.stride(0),
        vocab_size,
        num_parts,
        WITH_ALL=with_all,
        BLOCK_P=next_power_of_2(num_parts),
        PART_V=PART_V,
        num_warps=NUM_WARPS,
        enable_fp_fusion=ENABLE_FP_FUSION,
    )
    return TokenLogprobs(values, ranks, everything)
