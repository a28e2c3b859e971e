"""Rotary embedding fused with the write of keys and values to the paged cache."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from kernels.cuda.configs import ENABLE_FP_FUSION, next_power_of_2

if TYPE_CHECKING:
    import torch

BLOCK_HEADS = 8


@triton.jit
def rope_and_cache_kernel(
    q_ptr,  # [T, Hq, D], rotated in place
    k_ptr,  # [T, Hk, D]
    v_ptr,  # [T, Hk, D]
    positions_ptr,  # [T] int64
    cos_sin_ptr,  # [max_positions, ROTARY_DIM] float32: cosines, then sines
    k_cache_ptr,  # [N, B, Hk, D]
    v_cache_ptr,  # [N, B, Hk, D]
    slot_mapping_ptr,  # [T] int64
    stride_q_token,
    stride_q_head,
    stride_k_token,
    stride_k_head,
    stride_v_token,
    stride_v_head,
    stride_cos_sin,
    stride_k_block,
    stride_k_slot,
    stride_kc_head,
    stride_v_block,
    stride_v_slot,
    stride_vc_head,
    NUM_Q_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_PASS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """(x_i, x_j) -> (x_i cos - x_j sin, x_j cos + x_i sin), with j = i + ROTARY_DIM / 2.

    One token and BLOCK_HEADS heads per program: first the programs of q, then those of k
    and v. float32 inside. RoPE: Su et al., https://arxiv.org/abs/2104.09864.
    """
    HALF: tl.constexpr = ROTARY_DIM // 2
    Q_TILES: tl.constexpr = (NUM_Q_HEADS + BLOCK_HEADS - 1) // BLOCK_HEADS
    token = tl.program_id(0).to(tl.int64)
    head_tile = tl.program_id(1)
    offs_half = tl.arange(0, BLOCK_HALF)
    in_half = offs_half < HALF
    position = tl.load(positions_ptr + token)
    # [BLOCK_HALF]
    angles = cos_sin_ptr + position * stride_cos_sin + offs_half
    cos = tl.load(angles, mask=in_half, other=0.0)[None, :]
    sin = tl.load(angles + HALF, mask=in_half, other=0.0)[None, :]

    if head_tile < Q_TILES:
        heads = (head_tile * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)).to(tl.int64)
        mask = (heads < NUM_Q_HEADS)[:, None] & in_half[None, :]
        x_ptr = q_ptr + token * stride_q_token + heads[:, None] * stride_q_head
        x_ptr += offs_half[None, :]
        # [BLOCK_HEADS, BLOCK_HALF]  first and second halves of the rotated part
        first = tl.load(x_ptr, mask=mask, other=0.0).to(tl.float32)
        second = tl.load(x_ptr + HALF, mask=mask, other=0.0).to(tl.float32)
        tl.store(x_ptr, first * cos - second * sin, mask=mask)
        tl.store(x_ptr + HALF, second * cos + first * sin, mask=mask)
    else:
        slot = tl.load(slot_mapping_ptr + token)
        if slot >= 0:
            heads = ((head_tile - Q_TILES) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)).to(tl.int64)
            in_heads = (heads < NUM_KV_HEADS)[:, None]
            block_id = slot // BLOCK_SIZE
            in_block = slot % BLOCK_SIZE
            k_in = k_ptr + token * stride_k_token + heads[:, None] * stride_k_head
            k_out = k_cache_ptr + block_id * stride_k_block + in_block * stride_k_slot
            k_out = k_out + heads[:, None] * stride_kc_head
            mask = in_heads & in_half[None, :]
            # [BLOCK_HEADS, BLOCK_HALF]
            first = tl.load(k_in + offs_half[None, :], mask=mask, other=0.0).to(tl.float32)
            second = tl.load(k_in + HALF + offs_half[None, :], mask=mask, other=0.0).to(tl.float32)
            tl.store(k_out + offs_half[None, :], first * cos - second * sin, mask=mask)
            tl.store(k_out + HALF + offs_half[None, :], second * cos + first * sin, mask=mask)
            if ROTARY_DIM < HEAD_DIM:
                offs_pass = ROTARY_DIM + tl.arange(0, BLOCK_PASS)[None, :]
                pass_mask = in_heads & (offs_pass < HEAD_DIM)
                # [BLOCK_HEADS, BLOCK_PASS]  elements that are not rotated
                rest = tl.load(k_in + offs_pass, mask=pass_mask, other=0.0)
                tl.store(k_out + offs_pass, rest, mask=pass_mask)
            offs_d = tl.arange(0, BLOCK_D)[None, :]
            v_mask = in_heads & (offs_d < HEAD_DIM)
            v_in = v_ptr + token * stride_v_token + heads[:, None] * stride_v_head + offs_d
            v_out = v_cache_ptr + block_id * stride_v_block + in_block * stride_v_slot
            # [BLOCK_HEADS, BLOCK_D]
            v = tl.load(v_in, mask=v_mask, other=0.0)
            tl.store(v_out + heads[:, None] * stride_vc_head + offs_d, v, mask=v_mask)


def rope_and_cache(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """See kernels.ops.Ops.rope_and_cache. Last dimensions contiguous."""
    num_tokens, num_q_heads, head_dim = q.shape
    if num_tokens == 0:
        return
    num_kv_heads = k.shape[1]
    rotary_dim = cos_sin.shape[1]
    grid = (
        num_tokens,
        triton.cdiv(num_q_heads, BLOCK_HEADS) + triton.cdiv(num_kv_heads, BLOCK_HEADS),
    )
    rope_and_cache_kernel[grid](
        q,
        k,
        v,
        positions,
        cos_sin,
        k_cache,
        v_cache,
        slot_mapping,
        q.stride(0),
        q.stride(1),
        k.stride(0),
        k.stride(1),
        v.stride(0),
        v.stride(1),
        cos_sin.stride(0),
        k_cache.stride(0),
        k_cache.stride(1),
        k_cache.stride(2),
        v_cache.stride(0),
        v_cache.stride(1),
        v_cache.stride(2),
        NUM_Q_HEADS=num_q_heads,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        ROTARY_DIM=rotary_dim,
        BLOCK_SIZE=k_cache.shape[1],
        BLOCK_HEADS=BLOCK_HEADS,
        BLOCK_HALF=next_power_of_2(rotary_dim // 2),
        BLOCK_PASS=next_power_of_2(max(head_dim - rotary_dim, 1)),
        BLOCK_D=next_power_of_2(head_dim),
        num_warps=4,
        enable_fp_fusion=ENABLE_FP_FUSION,
    )
