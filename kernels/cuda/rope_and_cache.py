"""Head norms, rotary embedding and the write of keys and values to the paged cache."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from kernels.cuda.cache_codes import (
    cache_format,
    greatest_magnitude,
    raw_cache,
    scale_of_greatest,
    scale_strides,
    to_cache,
)
from kernels.cuda.configs import ENABLE_FP_FUSION, next_power_of_2

if TYPE_CHECKING:
    import torch

BLOCK_HEADS = 8


@triton.jit
def _load_heads(
    head_ptr,  # [BLOCK_HEADS, 1] pointers to the heads' first elements
    norm_ptr,  # [D]
    in_heads,  # [BLOCK_HEADS, 1]
    eps,
    HEAD_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    HAS_NORM: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_PASS: tl.constexpr,
):
    """The three parts of each head, normed: first and second halves of what is rotated
    [BLOCK_HEADS, BLOCK_HALF], and the rest [BLOCK_HEADS, BLOCK_PASS]. float32."""
    HALF: tl.constexpr = ROTARY_DIM // 2
    offs_half = tl.arange(0, BLOCK_HALF)[None, :]
    offs_pass = ROTARY_DIM + tl.arange(0, BLOCK_PASS)[None, :]
    in_half = offs_half < HALF
    in_pass = offs_pass < HEAD_DIM
    first = tl.load(head_ptr + offs_half, mask=in_heads & in_half, other=0.0).to(tl.float32)
    second = tl.load(head_ptr + HALF + offs_half, mask=in_heads & in_half, other=0.0).to(tl.float32)
    rest = tl.load(head_ptr + offs_pass, mask=in_heads & in_pass, other=0.0).to(tl.float32)
    if HAS_NORM:
        squares = tl.sum(first * first, axis=1) + tl.sum(second * second, axis=1)
        squares += tl.sum(rest * rest, axis=1)
        scale = (1.0 / tl.sqrt(squares / HEAD_DIM + eps))[:, None]
        element = head_ptr.dtype.element_ty
        first_norm = tl.load(norm_ptr + offs_half, mask=in_half, other=0.0).to(tl.float32)
        second_norm = tl.load(norm_ptr + HALF + offs_half, mask=in_half, other=0.0).to(tl.float32)
        rest_norm = tl.load(norm_ptr + offs_pass, mask=in_pass, other=0.0).to(tl.float32)
        # Rounded as a norm by itself rounds what it returns.
        first = (first * scale * first_norm).to(element).to(tl.float32)
        second = (second * scale * second_norm).to(element).to(tl.float32)
        rest = (rest * scale * rest_norm).to(element).to(tl.float32)
    return first, second, rest


@triton.jit
def rope_and_cache_kernel(
    q_ptr,  # [T, Hq, D], changed in place
    k_ptr,  # [T, Hk, D]
    v_ptr,  # [T, Hk, D]
    positions_ptr,  # [T] int64
    cos_sin_ptr,  # [max_positions, ROTARY_DIM] float32: cosines, then sines
    k_cache_ptr,  # [N, B, Hk, D]
    v_cache_ptr,  # [N, B, Hk, D]
    slot_mapping_ptr,  # [T] int64
    q_norm_ptr,  # [D]; not touched unless HAS_NORM
    k_norm_ptr,  # [D]; not touched unless HAS_NORM
    k_scale_ptr,  # float32, [Hk] of fp8, read, [N, Hk, B] of int8, written
    v_scale_ptr,  # the same
    eps,
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
    stride_ks_block,  # this and the next three: of int8
    stride_ks_head,
    stride_vs_block,
    stride_vs_head,
    NUM_Q_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,  # 0: nothing is rotated
    BLOCK_SIZE: tl.constexpr,
    HAS_NORM: tl.constexpr,
    CODES: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_PASS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """(x_i, x_j) -> (x_i cos - x_j sin, x_j cos + x_i sin), with j = i + ROTARY_DIM / 2 and
    x = head / sqrt(mean(head^2) + eps) * norm where HAS_NORM; the cache gets k and v.

    One token and BLOCK_HEADS heads per program: first the programs of q, then those of k
    and v. float32 inside. RoPE: Su et al., https://arxiv.org/abs/2104.09864; norms of heads:
    Dehghani et al., https://arxiv.org/abs/2302.05442. CODES is a kernels.cuda.cache_codes
    format.
    """
    HALF: tl.constexpr = ROTARY_DIM // 2
    # A q that is neither normed nor rotated has no programs.
    CHANGES_Q: tl.constexpr = HAS_NORM or ROTARY_DIM > 0
    Q_TILES: tl.constexpr = (NUM_Q_HEADS + BLOCK_HEADS - 1) // BLOCK_HEADS if CHANGES_Q else 0
    token = tl.program_id(0).to(tl.int64)
    head_tile = tl.program_id(1)
    offs_half = tl.arange(0, BLOCK_HALF)[None, :]
    offs_pass = ROTARY_DIM + tl.arange(0, BLOCK_PASS)[None, :]
    in_half = offs_half < HALF
    in_pass = offs_pass < HEAD_DIM
    cos = tl.full([1, BLOCK_HALF], 1.0, dtype=tl.float32)
    sin = tl.zeros([1, BLOCK_HALF], dtype=tl.float32)
    if ROTARY_DIM > 0:
        position = tl.load(positions_ptr + token)
        # [1, BLOCK_HALF]
        angles = cos_sin_ptr + position * stride_cos_sin + offs_half
        cos = tl.load(angles, mask=in_half, other=0.0)
        sin = tl.load(angles + HALF, mask=in_half, other=0.0)

    if head_tile < Q_TILES:
        heads = (head_tile * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)).to(tl.int64)
        in_heads = (heads < NUM_Q_HEADS)[:, None]
        head_ptr = q_ptr + token * stride_q_token + heads[:, None] * stride_q_head
        first, second, rest = _load_heads(
            head_ptr, q_norm_ptr, in_heads, eps,
            HEAD_DIM, ROTARY_DIM, HAS_NORM, BLOCK_HALF, BLOCK_PASS,
        )  # fmt: skip
        tl.store(head_ptr + offs_half, first * cos - second * sin, mask=in_heads & in_half)
        tl.store(head_ptr + HALF + offs_half, second * cos + first * sin, mask=in_heads & in_half)
        if HAS_NORM and ROTARY_DIM < HEAD_DIM:
            tl.store(head_ptr + offs_pass, rest, mask=in_heads & in_pass)
    else:
        slot = tl.load(slot_mapping_ptr + token)
        if slot >= 0:
            heads = ((head_tile - Q_TILES) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)).to(tl.int64)
            in_heads = (heads < NUM_KV_HEADS)[:, None]
            block_id = slot // BLOCK_SIZE
            in_block = slot % BLOCK_SIZE
            k_scale = tl.full([BLOCK_HEADS, 1], 1.0, dtype=tl.float32)
            v_scale = k_scale
            if CODES == 1 or CODES == 2:
                k_scale = tl.load(k_scale_ptr + heads[:, None], mask=in_heads, other=1.0)
                v_scale = tl.load(v_scale_ptr + heads[:, None], mask=in_heads, other=1.0)
            element = k_ptr.dtype.element_ty
            k_in = k_ptr + token * stride_k_token + heads[:, None] * stride_k_head
            first, second, rest = _load_heads(
                k_in, k_norm_ptr, in_heads, eps,
                HEAD_DIM, ROTARY_DIM, HAS_NORM, BLOCK_HALF, BLOCK_PASS,
            )  # fmt: skip
            k_out = k_cache_ptr + block_id * stride_k_block + in_block * stride_k_slot
            k_out = k_out + heads[:, None] * stride_kc_head
            turned_first = first * cos - second * sin
            turned_second = second * cos + first * sin
            if CODES == 3:
                greatest = greatest_magnitude(rest, element)
                if ROTARY_DIM > 0:
                    greatest = tl.maximum(greatest, greatest_magnitude(turned_first, element))
                    greatest = tl.maximum(greatest, greatest_magnitude(turned_second, element))
                k_scale = scale_of_greatest(greatest)
                slots = k_scale_ptr + block_id * stride_ks_block + in_block
                tl.store(slots + heads[:, None] * stride_ks_head, k_scale, mask=in_heads)
            if ROTARY_DIM > 0:
                mask = in_heads & in_half
                rotated = to_cache(turned_first, k_scale, element, CODES)
                tl.store(k_out + offs_half, rotated, mask=mask)
                rotated = to_cache(turned_second, k_scale, element, CODES)
                tl.store(k_out + HALF + offs_half, rotated, mask=mask)
            if ROTARY_DIM < HEAD_DIM:
                rest = to_cache(rest, k_scale, element, CODES)
                tl.store(k_out + offs_pass, rest, mask=in_heads & in_pass)
            offs_d = tl.arange(0, BLOCK_D)[None, :]
            v_mask = in_heads & (offs_d < HEAD_DIM)
            v_in = v_ptr + token * stride_v_token + heads[:, None] * stride_v_head + offs_d
            v_out = v_cache_ptr + block_id * stride_v_block + in_block * stride_v_slot
            # [BLOCK_HEADS, BLOCK_D]
            v = tl.load(v_in, mask=v_mask, other=0.0).to(tl.float32)
            v_out = v_out + heads[:, None] * stride_vc_head + offs_d
            if CODES == 3:
                v_scale = scale_of_greatest(greatest_magnitude(v, element))
                slots = v_scale_ptr + block_id * stride_vs_block + in_block
                tl.store(slots + heads[:, None] * stride_vs_head, v_scale, mask=in_heads)
            tl.store(v_out, to_cache(v, v_scale, element, CODES), mask=v_mask)


def rope_and_cache(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor | None,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    eps: float = 0.0,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> None:
    """See kernels.ops.Ops.rope_and_cache. Last dimensions contiguous."""
    num_tokens, num_q_heads, head_dim = q.shape
    if num_tokens == 0:
        return
    num_kv_heads = k.shape[1]
    rotary_dim = 0 if cos_sin is None else cos_sin.shape[1]
    has_norm = q_norm is not None
    q_tiles = triton.cdiv(num_q_heads, BLOCK_HEADS) if has_norm or rotary_dim else 0
    codes = cache_format(k_cache)
    rope_and_cache_kernel[(num_tokens, q_tiles + triton.cdiv(num_kv_heads, BLOCK_HEADS))](
        q,
        k,
        v,
        positions,
        positions if cos_sin is None else cos_sin,
        raw_cache(k_cache, codes),
        raw_cache(v_cache, codes),
        slot_mapping,
        q if q_norm is None else q_norm,
        k if k_norm is None else k_norm,
        positions if k_scale is None else k_scale,
        positions if v_scale is None else v_scale,
        eps,
        q.stride(0),
        q.stride(1),
        k.stride(0),
        k.stride(1),
        v.stride(0),
        v.stride(1),
        0 if cos_sin is None else cos_sin.stride(0),
        k_cache.stride(0),
        k_cache.stride(1),
        k_cache.stride(2),
        v_cache.stride(0),
        v_cache.stride(1),
        v_cache.stride(2),
        *scale_strides(k_scale, codes),
        *scale_strides(v_scale, codes),
        NUM_Q_HEADS=num_q_heads,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        ROTARY_DIM=rotary_dim,
        BLOCK_SIZE=k_cache.shape[1],
        HAS_NORM=has_norm,
        CODES=codes,
        BLOCK_HEADS=BLOCK_HEADS,
        BLOCK_HALF=next_power_of_2(rotary_dim // 2),
        BLOCK_PASS=next_power_of_2(max(head_dim - rotary_dim, 1)),
        BLOCK_D=next_power_of_2(head_dim),
        num_warps=4,
        enable_fp_fusion=ENABLE_FP_FUSION,
    )
