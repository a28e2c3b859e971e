"""Prefill attention: chunks of many query tokens over the paged cache."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from kernels.cuda.cache_codes import (
    FP8_BITS,
    cache_format,
    raw_cache,
    scale_strides,
    slot_scales,
)
from kernels.cuda.configs import (
    ENABLE_FP_FUSION,
    AttentionConfig,
    block_d_for,
    prefill_config,
)
from kernels.cuda.tiles import (
    PLAIN,
    AttentionVariant,
    cache_rows,
    load_tile,
    online_softmax_step,
    soft_capped,
)

if TYPE_CHECKING:
    import torch

    from kernels.ops import AttentionBatch


@triton.jit
def _find_seq(
    query_start_loc_ptr,  # [R + 1] int32, from the first prefill sequence on
    first_token,
    tile,
    num_seqs,
    BLOCK_Q: tl.constexpr,
):
    """The sequence that owns a query tile.

    Sequence i gets the tiles from first(i) = start(i) // BLOCK_Q + i on: at least as many as
    it needs (the spare ones return at once), without a table built on the host at every step.
    """
    low = 0
    high = num_seqs
    while low < high:
        middle = (low + high) // 2
        start = tl.load(query_start_loc_ptr + middle) - first_token
        if start // BLOCK_Q + middle <= tile:
            low = middle + 1
        else:
            high = middle
    return low - 1


@triton.jit
def _attend_tiles(
    q,  # [BLOCK_M, BLOCK_D]
    row_positions,  # [BLOCK_M] absolute positions of the query rows
    acc,
    row_max,
    row_sum,
    k_base,
    v_base,
    k_scale_base,
    v_scale_base,
    table_ptr,
    start,
    end,
    seen_from,  # the first position that any row sees
    score_scale,
    cap_log2,
    window,
    stride_k_block,
    stride_k_slot,
    stride_v_block,
    stride_v_slot,
    stride_ks_block,
    stride_vs_block,
    in_d,  # [BLOCK_D]
    BLOCK_D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_KV: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr,
    CODES: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Cache positions [start, end). Not MASKED: whole tiles that every row sees."""
    offs_kv = tl.arange(0, BLOCK_KV)
    for tile_start in range(start, end, BLOCK_KV):
        positions = tile_start + offs_kv
        valid = positions < end
        if MASKED and HAS_WINDOW:
            valid &= positions >= seen_from
        k_rows = cache_rows(table_ptr, positions, valid, stride_k_block, stride_k_slot, BLOCK_SIZE)
        k = load_tile(k_base, k_rows, valid, in_d, q.dtype, CODES, BLOCK_D)
        # [BLOCK_M, BLOCK_KV]
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        v_scales = score_scale  # as a stand-in of the right type
        if CODES == 3:
            k_scales = slot_scales(
                k_scale_base, table_ptr, positions, valid, stride_ks_block, BLOCK_SIZE
            )
            v_scales = slot_scales(
                v_scale_base, table_ptr, positions, valid, stride_vs_block, BLOCK_SIZE
            )
            scores *= k_scales[None, :]
        if HAS_SOFT_CAP:
            scores = soft_capped(scores, score_scale, cap_log2, q.dtype)
        else:
            scores *= score_scale
        if MASKED:
            seen = valid[None, :] & (positions[None, :] <= row_positions[:, None])
            if HAS_WINDOW:
                seen &= positions[None, :] > row_positions[:, None] - window
            scores = tl.where(seen, scores, float("-inf"))
        v_rows = cache_rows(table_ptr, positions, valid, stride_v_block, stride_v_slot, BLOCK_SIZE)
        v = load_tile(v_base, v_rows, valid, in_d, q.dtype, CODES, BLOCK_D)
        # A row's window may start after the tile that the first row's starts in.
        acc, row_max, row_sum = online_softmax_step(
            scores, v, v_scales, acc, row_max, row_sum, CODES == 3, MAY_BE_EMPTY=HAS_WINDOW
        )
    return acc, row_max, row_sum


# Not specialized on the numbers that change with every step: each new divisibility would compile.
@triton.jit(do_not_specialize=["first_seq", "num_seqs"])
def paged_prefill_kernel(
    q_ptr,  # [T, Hq, D]
    k_cache_ptr,  # [N, B, Hk, D]
    v_cache_ptr,  # [N, B, Hk, D]
    block_table_ptr,  # [R, max_blocks] int32
    seq_lens_ptr,  # [R] int32
    query_start_loc_ptr,  # [R + 1] int32
    out_ptr,  # [T, Hq, D]
    k_scale_ptr,  # float32, [Hk] of fp8, [N, Hk, B] of int8; not touched unless CODES
    v_scale_ptr,  # the same
    first_seq,
    num_seqs,
    score_scale,  # scale in units of log 2, or scale / cap with a soft cap
    cap_log2,  # the soft cap in units of log 2; not used unless HAS_SOFT_CAP
    window,  # not used unless HAS_WINDOW
    stride_q_token,
    stride_q_head,
    stride_k_block,
    stride_k_slot,
    stride_k_head,
    stride_v_block,
    stride_v_slot,
    stride_v_head,
    stride_ks_block,  # this and the next three: of int8
    stride_ks_head,
    stride_vs_block,
    stride_vs_head,
    stride_table,
    stride_out_token,
    stride_out_head,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_KV: tl.constexpr,
    ONE_LOOP: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr,
    CODES: tl.constexpr,
):
    """out_t = softmax(scale q_t K^T) V over cache positions [0, position(t)], or with a
    window over (position(t) - window, position(t)]. CODES is a kernels.cuda.cache_codes format.

    A tile holds BLOCK_M // HEADS tokens times the HEADS query heads of one KV head.
    FlashAttention-2 (Dao, https://arxiv.org/abs/2307.08691) over the paged cache of
    Kwon et al., https://arxiv.org/abs/2309.06180, for chunks that follow a cached context.

    ONE_LOOP masks every tile of keys. Otherwise those that all rows see have a loop without,
    which is compiled by itself and may round otherwise, and which rows share a tile, so which
    loop takes which keys, depends on how a prompt is cut.
    """
    BLOCK_Q: tl.constexpr = BLOCK_M // HEADS
    HEAD_TILES: tl.constexpr = (GROUP + HEADS - 1) // HEADS
    # Last tiles first: under the causal mask they are the long ones.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    kv_head = (tl.program_id(1) // HEAD_TILES).to(tl.int64)
    head_tile = tl.program_id(1) % HEAD_TILES

    starts_ptr = query_start_loc_ptr + first_seq
    first_token = tl.load(starts_ptr)
    index = _find_seq(starts_ptr, first_token, tile, num_seqs, BLOCK_Q)
    query_start = tl.load(starts_ptr + index)
    query_len = tl.load(starts_ptr + index + 1) - query_start
    tile_in_seq = tile - ((query_start - first_token) // BLOCK_Q + index)
    token_start = tile_in_seq * BLOCK_Q
    if token_start >= query_len:
        return
    seq = (first_seq + index).to(tl.int64)
    seq_len = tl.load(seq_lens_ptr + seq)
    context_len = seq_len - query_len

    offs_m = tl.arange(0, BLOCK_M)
    offs_d = tl.arange(0, BLOCK_D)
    in_d = offs_d < HEAD_DIM
    token = token_start + offs_m // HEADS
    group_head = head_tile * HEADS + offs_m % HEADS
    in_m = (offs_m < BLOCK_Q * HEADS) & (token < query_len) & (group_head < GROUP)
    q_head = kv_head * GROUP + group_head
    token_row = (query_start + token).to(tl.int64)

    # [BLOCK_M, BLOCK_D]  row m: token m // HEADS, head m % HEADS
    q = tl.load(
        q_ptr
        + token_row[:, None] * stride_q_token
        + q_head[:, None] * stride_q_head
        + offs_d[None, :],
        mask=in_m[:, None] & in_d[None, :],
        other=0.0,
    )
    table_ptr = block_table_ptr + seq * stride_table
    k_base = k_cache_ptr + kv_head * stride_k_head
    v_base = v_cache_ptr + kv_head * stride_v_head
    k_scale_base = k_scale_ptr + kv_head * stride_ks_head
    v_scale_base = v_scale_ptr + kv_head * stride_vs_head
    if CODES == 1 or CODES == 2:
        score_scale *= tl.load(k_scale_ptr + kv_head)
    acc = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
    row_max = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    row_sum = tl.zeros([BLOCK_M], dtype=tl.float32)

    # kv_start              shared_start          shared_end            kv_end
    # | where windows start | tiles all rows see  | the causal diagonal |
    # Every edge but the last is at a whole tile, counted from position 0.
    first_position = context_len + token_start
    kv_end = tl.minimum(first_position + BLOCK_Q, seq_len)
    seen_from = 0
    kv_start = 0
    shared_start = 0
    if HAS_WINDOW:
        seen_from = tl.maximum(first_position - window + 1, 0)
        kv_start = seen_from // BLOCK_KV * BLOCK_KV
        shared_start = tl.cdiv(tl.maximum(kv_end - window, 0), BLOCK_KV) * BLOCK_KV
    shared_end = kv_start if ONE_LOOP else (first_position + 1) // BLOCK_KV * BLOCK_KV
    row_positions = context_len + token
    if not ONE_LOOP:
        if HAS_WINDOW:
            shared_start = tl.minimum(shared_start, shared_end)
            acc, row_max, row_sum = _attend_tiles(
                q, row_positions, acc, row_max, row_sum, k_base, v_base,
                k_scale_base, v_scale_base, table_ptr,
                kv_start, shared_start, seen_from, score_scale, cap_log2, window,
                stride_k_block, stride_k_slot, stride_v_block, stride_v_slot,
                stride_ks_block, stride_vs_block,
                in_d, BLOCK_D, BLOCK_SIZE, BLOCK_KV, HAS_WINDOW, HAS_SOFT_CAP, CODES, MASKED=True,
            )  # fmt: skip
        acc, row_max, row_sum = _attend_tiles(
            q, row_positions, acc, row_max, row_sum, k_base, v_base,
            k_scale_base, v_scale_base, table_ptr,
            shared_start, shared_end, seen_from, score_scale, cap_log2, window,
            stride_k_block, stride_k_slot, stride_v_block, stride_v_slot,
            stride_ks_block, stride_vs_block,
            in_d, BLOCK_D, BLOCK_SIZE, BLOCK_KV, HAS_WINDOW, HAS_SOFT_CAP, CODES, MASKED=False,
        )  # fmt: skip
    acc, row_max, row_sum = _attend_tiles(
        q, row_positions, acc, row_max, row_sum, k_base, v_base,
        k_scale_base, v_scale_base, table_ptr,
        shared_end, kv_end, seen_from, score_scale, cap_log2, window,
        stride_k_block, stride_k_slot, stride_v_block, stride_v_slot,
        stride_ks_block, stride_vs_block,
        in_d, BLOCK_D, BLOCK_SIZE, BLOCK_KV, HAS_WINDOW, HAS_SOFT_CAP, CODES, MASKED=True,
    )  # fmt: skip

    # Without a window every row, padding too, sees position 0, so no row_sum is 0.
    if HAS_WINDOW:
        row_sum = tl.where(row_sum > 0.0, row_sum, 1.0)
    acc = acc / row_sum[:, None]
    if CODES == 1 or CODES == 2:
        acc *= tl.load(v_scale_ptr + kv_head)
    tl.store(
        out_ptr
        + token_row[:, None] * stride_out_token
        + q_head[:, None] * stride_out_head
        + offs_d[None, :],
        acc,
        mask=in_m[:, None] & in_d[None, :],
    )


def paged_prefill(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    batch: AttentionBatch,
    scale: float,
    out: torch.Tensor,
    variant: AttentionVariant = PLAIN,
    *,
    config: AttentionConfig | None = None,
    one_loop: bool = False,
) -> None:
    """Fills the rows of out that belong to sequences [num_decodes, R).

    q, out [T, Hq, D]; k_cache, v_cache [N, B, Hk, D]; last dimensions contiguous. one_loop,
    with a config that is always the same, makes a row independent of those beside it.
    """
    first_seq = batch.num_decodes
    num_seqs = batch.seq_lens.shape[0] - first_seq
    if num_seqs == 0:
        return
    starts = batch.query_start_loc_host
    num_tokens = int(starts[-1]) - int(starts[first_seq])
    if num_tokens == 0:
        return
    num_q_heads, head_dim = q.shape[1:]
    block_size, num_kv_heads = k_cache.shape[1:3]
    group = num_q_heads // num_kv_heads
    codes = cache_format(k_cache)
    if config is None:
        rows = batch.max_query_len * group
        config = prefill_config(head_dim, q.element_size(), rows, unpacks_fp8=codes == FP8_BITS)
    heads = min(group, config.block_m)
    block_q = config.block_m // heads
    score_scale, cap_log2 = variant.score_scales(scale)
    grid = (num_tokens // block_q + num_seqs, num_kv_heads * triton.cdiv(group, heads))
    paged_prefill_kernel[grid](
        q,
        raw_cache(k_cache, codes),
        raw_cache(v_cache, codes),
        batch.block_table,
        batch.seq_lens,
        batch.query_start_loc,
        out,
        q if variant.k_scale is None else variant.k_scale,
        q if variant.v_scale is None else variant.v_scale,
        first_seq,
        num_seqs,
        score_scale,
        cap_log2,
        variant.window or 0,
        q.stride(0),
        q.stride(1),
        k_cache.stride(0),
        k_cache.stride(1),
        k_cache.stride(2),
        v_cache.stride(0),
        v_cache.stride(1),
        v_cache.stride(2),
        *scale_strides(variant.k_scale, codes),
        *scale_strides(variant.v_scale, codes),
        batch.block_table.stride(0),
        out.stride(0),
        out.stride(1),
        GROUP=group,
        HEADS=heads,
        HEAD_DIM=head_dim,
        BLOCK_D=block_d_for(head_dim),
        BLOCK_SIZE=block_size,
        BLOCK_M=config.block_m,
        BLOCK_KV=config.block_kv,
        ONE_LOOP=one_loop,
        HAS_WINDOW=variant.window is not None,
        HAS_SOFT_CAP=variant.soft_cap is not None,
        CODES=codes,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        enable_fp_fusion=ENABLE_FP_FUSION,
    )
