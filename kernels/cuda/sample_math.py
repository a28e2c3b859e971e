"""Device functions that the sampling kernels are built from.

A logit's key is its bits in an order that integers share, its low LOW_BITS left out where
the type it came from has fewer than float32. Keys and masses are int64.
"""

from __future__ import annotations

import triton
import triton.language as tl

DIGIT_BITS = 4
NUM_BINS = 1 << DIGIT_BITS


@triton.jit
def clean_logits(
    logits_ptr,
    mask,
):
    """float32; NaN counts as -inf, and both zeros as one."""
    x = tl.load(logits_ptr, mask=mask, other=float("-inf")).to(tl.float32)
    x = tl.where(x == x, x, float("-inf"))
    return tl.where(x == 0, 0.0, x)


@triton.jit
def key_of(x, LOW_BITS: tl.constexpr):
    """x float32, clean -> int64 in [0, 2^(32 - LOW_BITS))."""
    bits = x.to(tl.int32, bitcast=True)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (ordered.to(tl.int64) + 0x80000000) >> LOW_BITS


@triton.jit
def value_of(key, LOW_BITS: tl.constexpr):
    """The float32 that has the key."""
    ordered = ((key << LOW_BITS) - 0x80000000).to(tl.int32)
    # The bits that key_of left out are zeros of a positive number, and flipped of a negative.
    ordered = tl.where(ordered < 0, ordered | ((1 << LOW_BITS) - 1), ordered)
    bits = ordered ^ ((ordered >> 31) & 0x7FFFFFFF)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def best_of(best_ptr, NUM_PARTS: tl.constexpr):
    """(greatest logit, its lowest id) of a row, from what row_max_kernel wrote."""
    best = tl.max(tl.load(best_ptr + tl.arange(0, NUM_PARTS)), axis=0)
    greatest = value_of((best >> 32) + 0x80000000, 0)
    return greatest, 0x7FFFFFFF - (best & 0xFFFFFFFF)


@triton.jit
def is_sampled(temperature, greatest):
    """Whether a row draws; one that does not takes its greatest logit."""
    return (temperature > 0) & (tl.abs(greatest) < float("inf"))


@triton.jit
def scale_of(temperature):
    """1 / temperature in float64, where it is finite for each float32 that is not 0."""
    return 1.0 / temperature.to(tl.float64)


@triton.jit
def weights_of(x, greatest, scale, min_p, UNIT_BITS: tl.constexpr):
    """exp((x - greatest) * scale) in units of 2^-UNIT_BITS, 0 for what is below min_p."""
    weight = tl.exp((x.to(tl.float64) - greatest.to(tl.float64)) * scale)
    units = (weight * (1 << UNIT_BITS) + 0.5).to(tl.int64)
    return tl.where(weight < min_p, 0, units)


@triton.jit
def narrow(
    found_ptr,  # [slots, 2] int64
    masses_ptr,  # [slots, P, 16] int64
    slot,  # int64: the search and its step, then the row
    top_p,
    is_start_of_top_p,
    NUM_PARTS: tl.constexpr,
    NUM_BINS: tl.constexpr,
):
    """(prefix, remaining) with one more digit: the smallest whose greater ones have less
    mass than remaining.

    top_p drops what has a cumulative weight of at most (1 - top_p) * total from below, so
    that the mass to be found from above is what is left, and at least the greatest logit.
    """
    bins = tl.arange(0, NUM_BINS)
    parts = slot * NUM_PARTS + tl.arange(0, NUM_PARTS)
    masses = tl.sum(tl.load(masses_ptr + parts[:, None] * NUM_BINS + bins[None, :]), axis=0)
    total = tl.sum(masses, axis=0)
    prefix = tl.load(found_ptr + slot * 2)
    remaining = tl.load(found_ptr + slot * 2 + 1)
    if is_start_of_top_p:
        dropped = ((1.0 - top_p.to(tl.float64)) * total.to(tl.float64)).to(tl.int64)
        remaining = tl.maximum(total - dropped, 1)
    above = total - tl.cumsum(masses, axis=0)
    digit = tl.min(tl.where(above < remaining, bins, NUM_BINS - 1), axis=0)
    taken = tl.sum(tl.where(bins == digit, above, 0), axis=0)
    return prefix * NUM_BINS + digit, remaining - taken


@triton.jit
def random_bits(seed, position, sample_index):
    """53 bits: u = bits / 2^53 is w0 2^21 + floor(w1 / 2^11), with w = Philox4x32-10 of
    key = seed and counter = (low word of position, sample_index, 0, 0).

    Salmon et al., SC 2011, https://doi.org/10.1145/2063384.2063405.
    """
    zero = tl.zeros_like(sample_index).to(tl.uint32)
    w0, w1, _w2, _w3 = tl.philox(
        seed, (position & 0xFFFFFFFF).to(tl.uint32), sample_index.to(tl.uint32), zero, zero
    )
    return (w0.to(tl.uint64) << 21) | (w1.to(tl.uint64) >> 11)
