"""Decode attention: one query token per sequence over the paged cache."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from kernels.cuda.cache_codes import (
    cache_format,
    raw_cache,
    scale_strides,
    slot_scales,
)
from kernels.cuda.configs import (
    ENABLE_FP_FUSION,
    AttentionConfig,
    block_d_for,
    decode_config,
    num_splits,
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
    from kernels.ops import AttentionBatch


@triton.jit
def paged_decode_kernel(
    q_ptr,  # [R, Hq, D]
    k_cache_ptr,  # [N, B, Hk, D]
    v_cache_ptr,  # [N, B, Hk, D]
    block_table_ptr,  # [R, max_blocks] int32
    seq_lens_ptr,  # [R] int32
    out_ptr,  # [R, Hq, D]; not touched if NUM_SPLITS > 1
    partial_ptr,  # [R, Hq, NUM_SPLITS, D] float32; not touched if NUM_SPLITS == 1
    lse_ptr,  # [R, Hq, NUM_SPLITS] float32; not touched if NUM_SPLITS == 1
    k_scale_ptr,  # float32, [Hk] of fp8, [N, Hk, B] of int8; not touched unless CODES
    v_scale_ptr,  # the same
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
    NUM_SPLITS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr,
    CODES: tl.constexpr,
):
    """out = softmax(scale q K^T) V over the cache positions of this split.

    The query heads of one KV head fill the rows of one tensor-core tile, so each key and
    value is read once per group. With several splits the result is normalized per split and
    kept with its log-sum-exp for paged_decode_combine_kernel: the flash-decoding scheme,
    https://crfm.stanford.edu/2023/10/12/flashdecoding.html, over the paged cache of
    Kwon et al., https://arxiv.org/abs/2309.06180. With a window, only the tiles of keys that
    reach into it are shared out. CODES is a kernels.cuda.cache_codes format.
    """
    HEAD_TILES: tl.constexpr = (GROUP + HEADS - 1) // HEADS
    seq = tl.program_id(0).to(tl.int64)
    kv_head = (tl.program_id(1) // HEAD_TILES).to(tl.int64)
    head_tile = tl.program_id(1) % HEAD_TILES
    split = tl.program_id(2)

    seq_len = tl.load(seq_lens_ptr + seq)
    seen_from = tl.maximum(seq_len - window, 0) if HAS_WINDOW else 0
    first_tile = seen_from // BLOCK_KV
    kv_tiles = tl.cdiv(seq_len, BLOCK_KV) - first_tile
    split_len = tl.cdiv(kv_tiles, NUM_SPLITS) * BLOCK_KV
    start = first_tile * BLOCK_KV + split * split_len
    end = tl.minimum(seq_len, start + split_len)

    offs_m = tl.arange(0, BLOCK_M)
    offs_d = tl.arange(0, BLOCK_D)
    offs_kv = tl.arange(0, BLOCK_KV)
    in_d = offs_d < HEAD_DIM
    group_head = head_tile * HEADS + offs_m
    in_m = (offs_m < HEADS) & (group_head < GROUP)
    q_head = kv_head * GROUP + group_head

    # [BLOCK_M, BLOCK_D]  the group's query heads
    q = tl.load(
        q_ptr + seq * stride_q_token + q_head[:, None] * stride_q_head + offs_d[None, :],
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
    for tile_start in range(start, end, BLOCK_KV):
        positions = tile_start + offs_kv
        valid = positions < end
        if HAS_WINDOW:
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
        scores = tl.where(valid[None, :], scores, float("-inf"))
        v_rows = cache_rows(table_ptr, positions, valid, stride_v_block, stride_v_slot, BLOCK_SIZE)
        v = load_tile(v_base, v_rows, valid, in_d, q.dtype, CODES, BLOCK_D)
        # The first tile of a split has keys that are seen, and so has every other.
        acc, row_max, row_sum = online_softmax_step(
            scores, v, v_scales, acc, row_max, row_sum, CODES == 3, MAY_BE_EMPTY=False
        )

    # An empty split has sum 0: its accumulator is 0 and stays so.
    denominator = tl.where(row_sum > 0.0, row_sum, 1.0)
    acc = acc / denominator[:, None]
    if CODES == 1 or CODES == 2:
        acc *= tl.load(v_scale_ptr + kv_head)
    out_mask = in_m[:, None] & in_d[None, :]
    if NUM_SPLITS == 1:
        tl.store(
            out_ptr + seq * stride_out_token + q_head[:, None] * stride_out_head + offs_d[None, :],
            acc,
            mask=out_mask,
        )
    else:
        num_q_heads = (tl.num_programs(1) // HEAD_TILES).to(tl.int64) * GROUP
        split_row = (seq * num_q_heads + q_head) * NUM_SPLITS + split
        lse = tl.where(row_sum > 0.0, row_max + tl.log2(denominator), float("-inf"))
        tl.store(lse_ptr + split_row, lse, mask=in_m)
        # The combine kernel does not read an empty split's part.
        if start < end:
            tl.store(
                partial_ptr + split_row[:, None] * HEAD_DIM + offs_d[None, :], acc, mask=out_mask
            )


@triton.jit
def paged_decode_combine_kernel(
    partial_ptr,  # [R, Hq, NUM_SPLITS, D] float32
    lse_ptr,  # [R, Hq, NUM_SPLITS] float32, in units of log 2
    out_ptr,  # [R, Hq, D]
    stride_out_token,
    stride_out_head,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
):
    """out = sum_i 2^(lse_i - m) out_i / sum_i 2^(lse_i - m), with m = max_i lse_i.

    The second half of flash-decoding,
    https://crfm.stanford.edu/2023/10/12/flashdecoding.html.
    """
    seq = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    row = seq * tl.num_programs(1) + head
    offs_split = tl.arange(0, NUM_SPLITS)
    offs_d = tl.arange(0, BLOCK_D)
    in_d = offs_d < HEAD_DIM

    # [NUM_SPLITS]
    lse = tl.load(
        lse_ptr + row * NUM_SPLITS + offs_split, mask=offs_split < NUM_SPLITS, other=float("-inf")
    )
    filled = lse > float("-inf")
    peak = tl.max(lse, axis=0)
    peak = tl.where(peak > float("-inf"), peak, 0.0)
    weights = tl.exp2(lse - peak)
    total = tl.sum(weights, axis=0)
    # [NUM_SPLITS, BLOCK_D]  each split's normalized output
    partial = tl.load(
        partial_ptr + (row * NUM_SPLITS + offs_split[:, None]) * HEAD_DIM + offs_d[None, :],
        mask=filled[:, None] & in_d[None, :],
        other=0.0,
    )
    out = tl.sum(partial * weights[:, None], axis=0) / tl.where(total > 0.0, total, 1.0)
    tl.store(out_ptr + seq * stride_out_token + head * stride_out_head + offs_d, out, mask=in_d)


def paged_decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    batch: AttentionBatch,
    scale: float,
    out: torch.Tensor,
    variant: AttentionVariant = PLAIN,
    *,
    num_sms: int,
    config: AttentionConfig | None = None,
) -> None:
    """Fills out[:num_decodes]. A row whose seq_lens is 0 (padding) becomes 0.

    q, out [T, Hq, D]; k_cache, v_cache [N, B, Hk, D]; last dimensions contiguous.
    """
    num_decodes = batch.num_decodes
    if num_decodes == 0:
        return
    num_q_heads, head_dim = q.shape[1:]
    block_size, num_kv_heads = k_cache.shape[1:3]
    group = num_q_heads // num_kv_heads
    if config is None:
        config = decode_config(head_dim, q.element_size(), group)
    heads = min(group, config.block_m)
    kv_programs = num_kv_heads * triton.cdiv(group, heads)
    longest = min(batch.max_seq_len, variant.window or batch.max_seq_len)
    splits = num_splits(num_decodes * kv_programs, longest, num_sms)
    score_scale, cap_log2 = variant.score_scales(scale)
    codes = cache_format(k_cache)
    block_d = block_d_for(head_dim)
    if splits > 1:
        partial = torch.empty(
            (num_decodes, num_q_heads, splits, head_dim), dtype=torch.float32, device=q.device
        )
        lse = torch.empty((num_decodes, num_q_heads, splits), dtype=torch.float32, device=q.device)
    else:
        partial = lse = out
    paged_decode_kernel[(num_decodes, kv_programs, splits)](
        q,
        raw_cache(k_cache, codes),
        raw_cache(v_cache, codes),
        batch.block_table,
        batch.seq_lens,
        out,
        partial,
        lse,
        q if variant.k_scale is None else variant.k_scale,
        q if variant.v_scale is None else variant.v_scale,
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
        BLOCK_D=block_d,
        BLOCK_SIZE=block_size,
        BLOCK_M=config.block_m,
        BLOCK_KV=config.block_kv,
        NUM_SPLITS=splits,
        HAS_WINDOW=variant.window is not None,
        HAS_SOFT_CAP=variant.soft_cap is not None,
        CODES=codes,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        enable_fp_fusion=ENABLE_FP_FUSION,
    )
    if splits > 1:
        paged_decode_combine_kernel[(num_decodes, num_q_heads)](
            partial,
            lse,
            out,
            out.stride(0),
            out.stride(1),
            HEAD_DIM=head_dim,
            BLOCK_D=block_d,
            NUM_SPLITS=splits,
            num_warps=4,
            enable_fp_fusion=ENABLE_FP_FUSION,
        )
