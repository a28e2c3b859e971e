"""Rotary position embedding (Su et al., 2021, arXiv:2104.09864) and the write to the KV cache."""

from __future__ import annotations

import torch

from kernels.fp8 import E4M3_MAX
from kernels.reference.rms_norm import rms_norm


def rotate(
    x: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    compute: torch.dtype = torch.float32,
) -> torch.Tensor:
    """x [T, heads, D], positions [T], cos_sin [max_positions, rotary_dim] -> [T, heads, D].

    Element i pairs with i + rotary_dim / 2 (the layout of Hugging Face
    checkpoints); elements past rotary_dim pass through.
    """
    rotary_dim = cos_sin.shape[1]
    half = rotary_dim // 2
    table = cos_sin[positions].to(compute).unsqueeze(1)  # [T, 1, rotary_dim]
    cos, sin = table[..., :half], table[..., half:]
    wide = x.to(compute)
    first, second = wide[..., :half], wide[..., half:rotary_dim]
    rotated = (first * cos - second * sin, second * cos + first * sin, wide[..., rotary_dim:])
    return torch.cat(rotated, dim=-1).to(x.dtype)


def rope_and_cache(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor | None,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    compute: torch.dtype = torch.float32,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    eps: float = 0.0,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> None:
    """Rotates q in place; writes rotated k, and v, to the slots. See Ops.rope_and_cache."""
    if q_norm is not None:
        assert k_norm is not None
        q.copy_(rms_norm(q, q_norm, eps, compute))
        k = rms_norm(k, k_norm, eps, compute)
    if cos_sin is not None:
        q.copy_(rotate(q, positions, cos_sin, compute))
    block_size = k_cache.shape[1]
    written = slot_mapping >= 0
    block_ids = slot_mapping[written] // block_size
    offsets = slot_mapping[written] % block_size
    k = k[written]
    if cos_sin is not None:
        k = rotate(k, positions[written], cos_sin, compute)
    v = v[written]
    if k_scale is not None and v_scale is not None:
        if k_cache.dtype == torch.int8:
            k, k_scale[block_ids, :, offsets] = _int8_codes(k, compute)
            v, v_scale[block_ids, :, offsets] = _int8_codes(v, compute)
        else:
            k, v = _saturated(k, k_scale, compute), _saturated(v, v_scale, compute)
    k_cache[block_ids, offsets] = k.to(k_cache.dtype)
    v_cache[block_ids, offsets] = v.to(v_cache.dtype)


def _saturated(x: torch.Tensor, scale: torch.Tensor, compute: torch.dtype) -> torch.Tensor:
    """x [T, Hk, D] / scale [Hk], within what e4m3 holds; clamp keeps NaN."""
    wide = x.to(compute) / scale.to(compute).unsqueeze(1)
    return wide.clamp(-E4M3_MAX, E4M3_MAX)


def _int8_codes(x: torch.Tensor, compute: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """x [T, Hk, D] -> codes [T, Hk, D] int8 and scales [T, Hk] float32."""
    wide = x.to(compute)
    scales = (wide.abs().amax(dim=-1) / 127).float()
    quotients = (wide / scales.to(compute).unsqueeze(-1)).clamp(-127, 127)
    return quotients.nan_to_num(0.0).round().to(torch.int8), scales
