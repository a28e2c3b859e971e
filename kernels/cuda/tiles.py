"""What both attention kernels are built from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import triton
import triton.language as tl

from kernels.cuda.float8 import decode_e4m3

if TYPE_CHECKING:
    import torch

LOG2_E = 1.4426950408889634


@dataclass(frozen=True, slots=True)
class AttentionVariant:
    """What Ops.attention takes that most models do not have."""

    window: int | None = None
    soft_cap: float | None = None
    k_scale: torch.Tensor | None = None
    """As Ops.rope_and_cache has it: there if and only if caches are of 8 bits."""
    v_scale: torch.Tensor | None = None

    def score_scales(self, scale: float) -> tuple[float, float]:
        """score_scale and cap_log2, as both attention kernels take them."""
        if self.soft_cap is None:
            return scale * LOG2_E, 0.0
        return scale / self.soft_cap, self.soft_cap * LOG2_E


PLAIN = AttentionVariant()


@triton.jit
def cache_rows(
    table_ptr,  # one sequence's row of the block table
    positions,  # [BLOCK_KV]
    valid,  # [BLOCK_KV]
    stride_block,
    stride_slot,
    BLOCK_SIZE: tl.constexpr,
):
    """Offsets of cache positions, through the block table: [BLOCK_KV] int64."""
    block_ids = tl.load(table_ptr + positions // BLOCK_SIZE, mask=valid, other=0)
    offsets = block_ids.to(tl.int64) * stride_block
    return offsets + (positions % BLOCK_SIZE).to(tl.int64) * stride_slot


@triton.jit
def load_tile(
    base,  # pointer to the head's first element
    rows,  # [BLOCK_KV] offsets of the tile's slots
    valid,  # [BLOCK_KV]
    in_d,  # [BLOCK_D]
    element: tl.constexpr,
    CODES: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """[BLOCK_KV, BLOCK_D]  keys or values through the block table, without the scale that codes
    have; 0 where not valid: such slots may hold anything, NaN too."""
    tile = tl.load(
        base + rows[:, None] + tl.arange(0, BLOCK_D)[None, :],
        mask=valid[:, None] & in_d[None, :],
        other=0.0 if CODES == 0 or CODES == 2 else 0,
    )
    if CODES == 0:
        return tile
    elif CODES == 3:
        return tile.to(element)
    else:
        return decode_e4m3(tile, element, CODES == 2)


@triton.jit
def soft_capped(
    products,  # [BLOCK_M, BLOCK_KV] float32, q k
    scale_over_cap,
    cap_log2,
    element: tl.constexpr,
):
    """cap tanh(q k scale / cap), in units of log 2.

    tanh(|t|) = (1 - e) / (1 + e) with e = exp(-2 |t|). Where 1 - e cancels, float32 models
    take the series; for others that error, 2^-24 cap, is far below their own.
    """
    t = products * scale_over_cap
    e = tl.exp2(tl.abs(t) * -2.8853900817779268)
    tanh = (1.0 - e) / (1.0 + e)
    tanh = tl.where(t < 0.0, -tanh, tanh)
    if element == tl.float32:
        u = t * t
        series = 62.0 / 2835.0
        series = series * u - 17.0 / 315.0
        series = series * u + 2.0 / 15.0
        series = series * u - 1.0 / 3.0
        tanh = tl.where(tl.abs(t) < 0.25, t + t * u * series, tanh)
    return tanh * cap_log2


@triton.jit
def online_softmax_step(
    scores,  # [BLOCK_M, BLOCK_KV] float32, in units of log 2; -inf where masked
    v,  # [BLOCK_KV, BLOCK_D]; 0 where masked
    v_scales,  # [BLOCK_KV] float32 that v is times, 0 where masked; not used unless HAS_SCALES
    acc,  # [BLOCK_M, BLOCK_D] float32
    row_max,  # [BLOCK_M] float32
    row_sum,  # [BLOCK_M] float32
    HAS_SCALES: tl.constexpr,
    MAY_BE_EMPTY: tl.constexpr,
):
    """Folds one tile into a running softmax: returns (acc, row_max, row_sum).

    m' = max(m, max_j s_j);  l' = l 2^(m - m') + sum_j 2^(s_j - m');
    acc' = acc 2^(m - m') + sum_j 2^(s_j - m') v_j
    (Milakov and Gimelshein, https://arxiv.org/abs/1805.02867). Unless MAY_BE_EMPTY, each
    row must have a finite score in its first tile, else m - m' is not a number; a tile that
    a row sees nothing of leaves its acc, row_max and row_sum as they are, to the last bit.
    """
    new_max = tl.maximum(row_max, tl.max(scores, axis=1))
    shift = new_max
    if MAY_BE_EMPTY:
        shift = tl.where(new_max > float("-inf"), new_max, 0.0)
    rescale = tl.exp2(row_max - shift)
    # [BLOCK_M, BLOCK_KV]
    p = tl.exp2(scores - shift[:, None])
    row_sum = row_sum * rescale + tl.sum(p, axis=1)
    acc = acc * rescale[:, None]
    # "ieee" keeps float32 inputs out of the 10-bit TF32 path; it means nothing for 16-bit ones.
    if HAS_SCALES and v.dtype == tl.float16:
        # Small scales would make weights that fp16 does not hold.
        peak = tl.max(v_scales, axis=0)
        peak = tl.where(peak > 0.0, peak, 1.0)
        p *= (v_scales / peak)[None, :]
        acc += tl.dot(p.to(v.dtype), v, input_precision="ieee") * peak
    else:
        if HAS_SCALES:
            p *= v_scales[None, :]
        acc = tl.dot(p.to(v.dtype), v, acc, input_precision="ieee")
    return acc, new_max, row_sum
