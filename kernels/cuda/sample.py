"""Sampling on the device, in a few passes over the logits and without sorting them.

A row's weights exp((logit - max) / temperature) are integers here, in units of 2^-b of the
greatest, with b = 62 - the bits of V: 43 for 262144 logits. Their sums are exact in any
order, so neither the number of programs that share a row nor the rest of the batch can
change a draw. A draw can differ from the reference's only where u * total (or the cut of
top_p) is within V * 2^-b of the total of a step of the cumulative distribution: 2^-25 for
V = 262144 at the very worst, as each weight is off by at most half a unit.

top_k and top_p are searches for the logit above which there is less than a given mass, of
tokens or of weight: a radix selection, most significant digit first, one launch a digit.
Tokens whose logits differ by less than float64 can tell from the row's greatest are not
ties here, while they are in the reference.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from kernels.cuda.configs import ENABLE_FP_FUSION, sample_parts
from kernels.cuda.sample_math import (
    DIGIT_BITS,
    NUM_BINS,
    best_of,
    clean_logits,
    is_sampled,
    key_of,
    narrow,
    random_bits,
    scale_of,
    value_of,
    weights_of,
)

if TYPE_CHECKING:
    from kernels.ops import SamplingBatch

BLOCK_V = 1024
"""Logits of a tile."""
SELECT_BLOCK_V = 512
"""Of select_digit_kernel, which keeps 16 sums for each."""
NUM_WARPS = 4
SELECT_WARPS = 8
LOW_BITS = {torch.float32: 0, torch.bfloat16: 16, torch.float16: 12}
"""Trailing bits of a float32 that say nothing, by the type that the logits have."""

_NOT_SPECIALIZED = ["num_rows", "vocab_size", "part_size", "step"]


@triton.jit(do_not_specialize=_NOT_SPECIALIZED)
def row_max_kernel(
    logits_ptr,  # [S, V]
    best_ptr,  # [S, P] int64
    stride_logits,
    vocab_size,
    part_size,
    NUM_PARTS: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """The greatest logit of each part of a row and the lowest id that has it, as one number:
    the logit's key, then 2^31 - 1 - id."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    first = part * part_size
    end = tl.minimum(first + part_size, vocab_size)
    best = tl.full([BLOCK_V], -0x8000000000000000, dtype=tl.int64)
    for start in range(first, end, BLOCK_V):
        offs = start + tl.arange(0, BLOCK_V)
        x = clean_logits(logits_ptr + row * stride_logits + offs, offs < end)
        packed = ((key_of(x, 0) - 0x80000000) << 32) + (0x7FFFFFFF - offs)
        best = tl.where(offs < end, tl.maximum(best, packed), best)
    tl.store(best_ptr + row * NUM_PARTS + part, tl.max(best, axis=0))


@triton.jit(do_not_specialize=_NOT_SPECIALIZED)
def select_digit_kernel(
    logits_ptr,  # [S, V]
    best_ptr,  # [S, P] int64
    temperature_ptr,  # [S] float32
    top_k_ptr,  # [S] int32
    top_p_ptr,  # [S] float32
    masses_ptr,  # [2, DIGITS, S, P, 16] int64
    found_ptr,  # [2, DIGITS, S, 2] int64
    stride_logits,
    num_rows,
    vocab_size,
    part_size,
    step,
    BY_WEIGHT: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    LOW_BITS: tl.constexpr,
    DIGITS: tl.constexpr,
    UNIT_BITS: tl.constexpr,
    DIGIT_BITS: tl.constexpr,
    NUM_BINS: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Step `step` of the search for top_k's cut or, BY_WEIGHT, for top_p's.

    found holds for each step the cut's digits before it, and the mass that must come from
    logits that begin with them; masses holds how much of it each next digit has. A program
    derives the former from the step before, and sums up the latter for its part of a row.
    """
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    temperature = tl.load(temperature_ptr + row)
    top_k = tl.load(top_k_ptr + row)
    top_p = tl.load(top_p_ptr + row)
    greatest, _best_id = best_of(best_ptr + row * NUM_PARTS, NUM_PARTS)
    has_top_k = (top_k > 0) & (top_k < vocab_size)
    if BY_WEIGHT:
        is_asked = is_sampled(temperature, greatest) & (top_p < 1.0)
    else:
        is_asked = is_sampled(temperature, greatest) & has_top_k
    if not is_asked:
        return
    least = tl.full([], 0, dtype=tl.int64)
    slot = step * num_rows.to(tl.int64) + row
    if BY_WEIGHT:
        if has_top_k:
            last = (DIGITS - 1) * num_rows.to(tl.int64) + row
            least, _left = narrow(found_ptr, masses_ptr, last, top_p, False, NUM_PARTS, NUM_BINS)
        slot += DIGITS * num_rows.to(tl.int64)
    prefix = tl.full([], 0, dtype=tl.int64)
    remaining = top_k.to(tl.int64)
    if step > 0:
        is_start = BY_WEIGHT & (step == 1)
        prefix, remaining = narrow(
            found_ptr, masses_ptr, slot - num_rows, top_p, is_start, NUM_PARTS, NUM_BINS
        )
    if part == 0:
        tl.store(found_ptr + slot * 2, prefix)
        tl.store(found_ptr + slot * 2 + 1, remaining)

    scale = scale_of(temperature)
    shift = (DIGITS - 1 - step) * DIGIT_BITS
    bins = tl.arange(0, NUM_BINS)
    # [NUM_BINS, BLOCK_V]: threads lie along the last axis, so that each logit has one, which
    # weighs it for all bins. The other way round 16 threads had it, and could all weigh it.
    sums = tl.zeros([NUM_BINS, BLOCK_V], dtype=tl.int64)
    first = part * part_size
    end = tl.minimum(first + part_size, vocab_size)
    for start in range(first, end, BLOCK_V):
        offs = start + tl.arange(0, BLOCK_V)
        x = clean_logits(logits_ptr + row * stride_logits + offs, offs < end)
        key = key_of(x, LOW_BITS)
        begun = key >> shift
        is_candidate = (offs < end) & ((begun >> DIGIT_BITS) == prefix) & (key >= least)
        # After a digit or two, most tiles have none.
        if tl.max(is_candidate.to(tl.int32), axis=0) > 0:
            if BY_WEIGHT:
                mass = weights_of(x, greatest, scale, 0.0, UNIT_BITS)
            else:
                mass = tl.full([BLOCK_V], 1, dtype=tl.int64)
            mass = tl.where(is_candidate, mass, 0)
            digit = (begun & (NUM_BINS - 1)).to(tl.int32)
            sums += tl.where(bins[:, None] == digit[None, :], mass[None, :], 0)
    offs_out = (slot * NUM_PARTS + part) * NUM_BINS + bins
    tl.store(masses_ptr + offs_out, tl.sum(sums, axis=1))


@triton.jit(do_not_specialize=_NOT_SPECIALIZED)
def weigh_parts_kernel(
    logits_ptr,  # [S, V]
    best_ptr,  # [S, P] int64
    temperature_ptr,  # [S] float32
    top_k_ptr,  # [S] int32
    top_p_ptr,  # [S] float32
    min_p_ptr,  # [S] float32
    masses_ptr,  # [2, DIGITS, S, P, 16] int64; not touched unless FILTERS
    found_ptr,  # [2, DIGITS, S, 2] int64; not touched unless FILTERS
    above_ptr,  # [S, P] int64
    ties_ptr,  # [S, P] int64
    cut_ptr,  # [S, 2] int64
    stride_logits,
    num_rows,
    vocab_size,
    part_size,
    FILTERS: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    LOW_BITS: tl.constexpr,
    DIGITS: tl.constexpr,
    UNIT_BITS: tl.constexpr,
    NUM_BINS: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Each row's cut, which is a key and how many of the logits that have it stay, and each
    part's weight above the cut and its number of logits at it."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    temperature = tl.load(temperature_ptr + row)
    greatest, _best_id = best_of(best_ptr + row * NUM_PARTS, NUM_PARTS)
    if not is_sampled(temperature, greatest):
        return
    scale = scale_of(temperature)
    min_p = tl.full([], 0.0, dtype=tl.float32)
    cut = tl.full([], -1, dtype=tl.int64)
    num_kept = tl.full([], 0, dtype=tl.int64)
    if FILTERS:
        min_p = tl.load(min_p_ptr + row)
        top_k = tl.load(top_k_ptr + row)
        top_p = tl.load(top_p_ptr + row)
        if top_p < 1.0:
            last = (2 * DIGITS - 1) * num_rows.to(tl.int64) + row
            cut, remaining = narrow(found_ptr, masses_ptr, last, top_p, False, NUM_PARTS, NUM_BINS)
            tie = weights_of(value_of(cut, LOW_BITS), greatest, scale, 0.0, UNIT_BITS)
            # Of equals the highest ids stay, as many as it takes.
            num_kept = (remaining + tie - 1) // tie
        elif (top_k > 0) & (top_k < vocab_size):
            last = (DIGITS - 1) * num_rows.to(tl.int64) + row
            cut, remaining = narrow(found_ptr, masses_ptr, last, top_p, False, NUM_PARTS, NUM_BINS)
            num_kept = vocab_size.to(tl.int64)
    if part == 0:
        tl.store(cut_ptr + row * 2, cut)
        tl.store(cut_ptr + row * 2 + 1, num_kept)

    above = tl.zeros([BLOCK_V], dtype=tl.int64)
    ties = tl.zeros([BLOCK_V], dtype=tl.int64)
    first = part * part_size
    end = tl.minimum(first + part_size, vocab_size)
    for start in range(first, end, BLOCK_V):
        offs = start + tl.arange(0, BLOCK_V)
        x = clean_logits(logits_ptr + row * stride_logits + offs, offs < end)
        key = key_of(x, LOW_BITS)
        weights = weights_of(x, greatest, scale, min_p, UNIT_BITS)
        above += tl.where((offs < end) & (key > cut), weights, 0)
        ties += ((offs < end) & (key == cut)).to(tl.int64)
    tl.store(above_ptr + row * NUM_PARTS + part, tl.sum(above, axis=0))
    tl.store(ties_ptr + row * NUM_PARTS + part, tl.sum(ties, axis=0))


@triton.jit(do_not_specialize=_NOT_SPECIALIZED)
def draw_kernel(
    logits_ptr,  # [S, V]
    best_ptr,  # [S, P] int64
    temperature_ptr,  # [S] float32
    min_p_ptr,  # [S] float32
    seed_ptr,  # [S] int64, the bits of the uint64 seed
    position_ptr,  # [S] int64
    sample_index_ptr,  # [S] int32
    above_ptr,  # [S, P] int64
    ties_ptr,  # [S, P] int64
    cut_ptr,  # [S, 2] int64
    ids_ptr,  # [S] int64
    stride_logits,
    vocab_size,
    part_size,
    FILTERS: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    LOW_BITS: tl.constexpr,
    UNIT_BITS: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """The first id whose cumulative weight exceeds floor(u * total), by the program in whose
    part it lies; the greatest logit's for rows that do not draw."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    temperature = tl.load(temperature_ptr + row)
    greatest, best_id = best_of(best_ptr + row * NUM_PARTS, NUM_PARTS)
    if not is_sampled(temperature, greatest):
        if part == 0:
            tl.store(ids_ptr + row, best_id)
        return
    scale = scale_of(temperature)
    min_p = tl.full([], 0.0, dtype=tl.float32)
    if FILTERS:
        min_p = tl.load(min_p_ptr + row)
    cut = tl.load(cut_ptr + row * 2)
    num_kept = tl.load(cut_ptr + row * 2 + 1)

    parts = tl.arange(0, NUM_PARTS)
    ties = tl.load(ties_ptr + row * NUM_PARTS + parts)
    ties_after = tl.cumsum(ties, axis=0)
    num_dropped = tl.sum(ties, axis=0) - num_kept
    kept = tl.maximum(ties_after - tl.maximum(ties_after - ties, num_dropped), 0)
    tie = tl.full([], 0, dtype=tl.int64)
    if cut >= 0:
        tie = weights_of(value_of(cut, LOW_BITS), greatest, scale, min_p, UNIT_BITS)
    weights = tl.load(above_ptr + row * NUM_PARTS + parts) + kept * tie
    after = tl.cumsum(weights, axis=0)
    total = tl.sum(weights, axis=0)
    bits = random_bits(
        tl.load(seed_ptr + row), tl.load(position_ptr + row), tl.load(sample_index_ptr + row)
    )
    # floor(u * total), exactly, as u = bits / 2^53 is bits 2^11 / 2^64.
    target = tl.umulhi(bits << 11, total.to(tl.uint64)).to(tl.int64)
    seen = tl.sum(tl.where(parts == part, after - weights, 0), axis=0)
    holds = tl.sum(tl.where(parts == part, after, 0), axis=0) > target
    if (seen > target) | (not holds):
        return

    rank = tl.sum(tl.where(parts == part, ties_after - ties, 0), axis=0)
    drawn = best_id
    first = part * part_size
    end = tl.minimum(first + part_size, vocab_size)
    for start in range(first, end, BLOCK_V):
        if seen <= target:
            offs = start + tl.arange(0, BLOCK_V)
            x = clean_logits(logits_ptr + row * stride_logits + offs, offs < end)
            key = key_of(x, LOW_BITS)
            is_tie = (offs < end) & (key == cut)
            tile_ties = is_tie.to(tl.int64)
            tie_rank = rank + tl.cumsum(tile_ties, axis=0) - 1
            is_kept = ((offs < end) & (key > cut)) | (is_tie & (tie_rank >= num_dropped))
            mass = tl.where(is_kept, weights_of(x, greatest, scale, min_p, UNIT_BITS), 0)
            cumulative = seen + tl.cumsum(mass, axis=0)
            seen += tl.sum(mass, axis=0)
            rank += tl.sum(tile_ties, axis=0)
            if seen > target:
                ids = tl.where(cumulative > target, offs, 0x7FFFFFFF)
                drawn = tl.min(ids, axis=0).to(tl.int64)
    tl.store(ids_ptr + row, drawn)


def sample(
    logits: torch.Tensor, batch: SamplingBatch, *, num_sms: int, num_parts: int | None = None
) -> torch.Tensor:
    """logits [S, V], rows may be strided -> ids [S] int64. See kernels.ops.Ops.sample.

    num_parts: programs that share a row, a power of two; by num_sms if None.
    """
    num_rows, vocab_size = logits.shape
    ids = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    if num_rows == 0:
        return ids
    if num_parts is None:
        num_parts = sample_parts(num_rows, vocab_size, num_sms)
    part_size = triton.cdiv(triton.cdiv(vocab_size, num_parts), BLOCK_V) * BLOCK_V
    grid = (num_rows, num_parts)
    low_bits = LOW_BITS[logits.dtype]
    digits = triton.cdiv(32 - low_bits, DIGIT_BITS)
    unit_bits = 62 - vocab_size.bit_length()

    def scratch(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.int64, device=logits.device)

    best, above, ties = scratch(3, num_rows, num_parts)
    cut = scratch(num_rows, 2)
    common = {
        "NUM_PARTS": num_parts,
        "num_warps": NUM_WARPS,
        "enable_fp_fusion": ENABLE_FP_FUSION,
    }
    weighing = {"LOW_BITS": low_bits, "UNIT_BITS": unit_bits}
    row_max_kernel[grid](
        logits, best, logits.stride(0), vocab_size, part_size, BLOCK_V=BLOCK_V, **common
    )
    masses = found = best
    if batch.any_filter and not batch.all_greedy:
        masses = scratch(2, digits, num_rows, num_parts, NUM_BINS)
        found = scratch(2, digits, num_rows, 2)
        for by_weight in (False, True):
            for step in range(digits):
                select_digit_kernel[grid](
                    logits,
                    best,
                    batch.temperature,
                    batch.top_k,
                    batch.top_p,
                    masses,
                    found,
                    logits.stride(0),
                    num_rows,
                    vocab_size,
                    part_size,
                    step,
                    BY_WEIGHT=by_weight,
                    DIGITS=digits,
                    DIGIT_BITS=DIGIT_BITS,
                    NUM_BINS=NUM_BINS,
                    BLOCK_V=SELECT_BLOCK_V,
                    **{**common, "num_warps": SELECT_WARPS},
                    **weighing,
                )
    if not batch.all_greedy:
        weigh_parts_kernel[grid](
            logits,
            best,
            batch.temperature,
            batch.top_k,
            batch.top_p,
            batch.min_p,
            masses,
            found,
            above,
            ties,
            cut,
            logits.stride(0),
            num_rows,
            vocab_size,
            part_size,
            FILTERS=batch.any_filter,
            DIGITS=digits,
            NUM_BINS=NUM_BINS,
            BLOCK_V=BLOCK_V,
            **common,
            **weighing,
        )
    draw_kernel[(num_rows, 1) if batch.all_greedy else grid](
        logits,
        best,
        batch.temperature,
        batch.min_p,
        batch.seed,
        batch.position,
        batch.sample_index,
        above,
        ties,
        cut,
        ids,
        logits.stride(0),
        vocab_size,
        part_size,
        FILTERS=batch.any_filter,
        BLOCK_V=BLOCK_V,
        **common,
        **weighing,
    )
    return ids
