"""What a KV cache of 8 bits holds, and int8 codes on the device."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.cuda.float8 import CONVERTS_E4M3, encode_e4m3

FLOATS = 0
FP8_BITS = 1
"""e4m3 that is put together from bits."""
FP8_INSTRUCTION = 2
"""e4m3 where there are instructions for it."""
INT8 = 3
"""Integers, with a scale for each slot and head."""


def cache_format(cache: torch.Tensor) -> int:
    """What the CODES constant of a kernel is for a KV cache of this dtype and device. The
    interpreter counts as a device without the instructions: it rounds otherwise than they do.
    """
    if cache.dtype == torch.int8:
        return INT8
    if cache.dtype != torch.float8_e4m3fn:
        return FLOATS
    if cache.device.type != "cuda":
        return FP8_BITS
    capability = torch.cuda.get_device_capability(cache.device)
    return FP8_INSTRUCTION if capability >= CONVERTS_E4M3 else FP8_BITS


def raw_cache(cache: torch.Tensor, codes: int) -> torch.Tensor:
    """The cache as kernels take it in this format."""
    return cache.view(torch.uint8) if codes == FP8_BITS else cache


def scale_strides(scale: torch.Tensor | None, codes: int) -> tuple[int, int]:
    """Of blocks and of heads, where a scale is of a slot."""
    if scale is None or codes != INT8:
        return 0, 0
    return scale.stride(0), scale.stride(1)


@triton.jit
def greatest_magnitude(x, element: tl.constexpr):
    """x [R, C] float32, rounded to element -> the bits of the greatest |x| of each row, [R]:
    in the order of magnitudes, and NaN above all."""
    rounded = x.to(element).to(tl.float32)
    return tl.max(rounded.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1)


@triton.jit
def scale_of_greatest(bits):
    """bits [R] of greatest_magnitude -> [R, 1] float32."""
    greatest = bits.to(tl.float32, bitcast=True)
    return tl.div_rn(greatest, tl.full(greatest.shape, 127.0, tl.float32))[:, None]


@triton.jit
def encode_int8(x, scale):
    """x, scale float32, of one shape -> the nearest codes of x / scale, ties to even; 0 where
    that is no number."""
    # A head of zeros has a scale of 0.
    quotient = tl.div_rn(x, tl.where(scale == 0.0, 1.0, scale))
    quotient = tl.where(quotient > 127.0, 127.0, tl.where(quotient < -127.0, -127.0, quotient))
    quotient = tl.where(quotient == quotient, quotient, 0.0)
    # 1.5 * 2^23: adding it rounds to an integer, which is then in the low bits.
    return ((quotient + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000).to(tl.int8)


@triton.jit
def to_cache(
    x,  # [BLOCK_HEADS, ...] float32
    scale,  # [BLOCK_HEADS, 1] float32
    element: tl.constexpr,
    CODES: tl.constexpr,
):
    """x as caches of its own dtype hold it, or the code of that over scale."""
    rounded = x.to(element)
    if CODES == 0:
        return rounded
    else:
        wide_scale = scale + tl.zeros_like(x)
        if CODES == 3:
            return encode_int8(rounded.to(tl.float32), wide_scale)
        else:
            return encode_e4m3(tl.div_rn(rounded.to(tl.float32), wide_scale), CODES == 2)


@triton.jit
def slot_scales(
    base,  # pointer to the head's scale of the first slot
    table_ptr,  # one sequence's row of the block table
    positions,  # [BLOCK_KV]
    valid,  # [BLOCK_KV]
    stride_block,
    BLOCK_SIZE: tl.constexpr,
):
    """[BLOCK_KV] float32, of int8 codes; 0 where not valid."""
    block_ids = tl.load(table_ptr + positions // BLOCK_SIZE, mask=valid, other=0)
    rows = base + block_ids.to(tl.int64) * stride_block
    return tl.load(rows + positions % BLOCK_SIZE, mask=valid, other=0.0)
