"""e4m3 codes on the device, by instruction where there is one and by bits where not.

e4m3: Micikevicius et al., https://arxiv.org/abs/2209.05433. Sign, 4 exponent bits of bias
7, 3 mantissa bits; 0x7f and 0xff are NaN, there is no infinity.
"""

from __future__ import annotations

import triton
import triton.language as tl

CONVERTS_E4M3 = (8, 9)
"""The first compute capability that converts e4m3."""


@triton.jit
def decode_e4m3(codes, element: tl.constexpr, BY_INSTRUCTION: tl.constexpr):
    """float8e4nv or uint8 codes -> element, exactly: fp16, bf16 and fp32 hold every e4m3."""
    if BY_INSTRUCTION:
        return codes.to(element)
    else:
        bits = codes.to(tl.uint16)
        # An fp16 has the same layout with another bias: 15 instead of 7.
        half = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7)
        scaled = half.to(tl.float16, bitcast=True).to(tl.float32) * 256.0
        return tl.where((bits & 0x7F) == 0x7F, float("nan"), scaled).to(element)


@triton.jit
def encode_e4m3(x, BY_INSTRUCTION: tl.constexpr):
    """x float32 -> float8e4nv or uint8 codes: the nearest, ties to even; beyond +-448 the
    greatest; NaN stays NaN."""
    # tl.clamp may turn NaN into a bound.
    bounded = tl.where(x > 448.0, 448.0, tl.where(x < -448.0, -448.0, x))
    if BY_INSTRUCTION:
        return bounded.to(tl.float8e4nv)
    else:
        bits = bounded.to(tl.uint32, bitcast=True)
        magnitude = bits & 0x7FFFFFFF
        # Half of what is cut off, less what makes a tie go to the even code; a carry out of
        # the mantissa is the next exponent, which is right.
        normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - (120 << 3)
        # Steps of 2^-9 below 2^-6: floats from 2^14 on have them.
        shifted = magnitude.to(tl.float32, bitcast=True) + 16384.0
        subnormal = shifted.to(tl.uint32, bitcast=True) - 0x46800000
        code = tl.where(magnitude < 0x3C800000, subnormal, normal)
        code = tl.where(magnitude > 0x7F800000, 0x7F, code)
        return (code | ((bits >> 24) & 0x80)).to(tl.uint8)
