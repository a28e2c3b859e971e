"""Device functions that both attention kernels are built from."""

from __future__ import annotations

import triton
import triton.language as tl


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
def online_softmax_step(
    scores,  # [BLOCK_M, BLOCK_KV] float32, in units of log 2; -inf where masked
    v,  # [BLOCK_KV, BLOCK_D]; 0 where masked
    acc,  # [BLOCK_M, BLOCK_D] float32
    row_max,  # [BLOCK_M] float32
    row_sum,  # [BLOCK_M] float32
):
    """Folds one tile into a running softmax: returns (acc, row_max, row_sum).

    m' = max(m, max_j s_j);  l' = l 2^(m - m') + sum_j 2^(s_j - m');
    acc' = acc 2^(m - m') + sum_j 2^(s_j - m') v_j
    (Milakov and Gimelshein, https://arxiv.org/abs/1805.02867). Each row must have a
    finite score in its first tile, else m - m' is not a number.
    """
    new_max = tl.maximum(row_max, tl.max(scores, axis=1))
    rescale = tl.exp2(row_max - new_max)
    # [BLOCK_M, BLOCK_KV]
    p = tl.exp2(scores - new_max[:, None])
    row_sum = row_sum * rescale + tl.sum(p, axis=1)
    acc = acc * rescale[:, None]
    # "ieee" keeps float32 inputs out of the 10-bit TF32 path; it means nothing for 16-bit ones.
    acc = tl.dot(p.to(v.dtype), v, acc, input_precision="ieee")
    return acc, new_max, row_sum
