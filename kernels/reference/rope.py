"""Rotary position embedding (Su et al., 2021, arXiv:2104.09864) and the write to the KV cache."""

from __future__ import annotations

import torch


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
    cos_sin: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    compute: torch.dtype = torch.float32,
) -> None:
    """Rotates q in place; writes rotated k, and v, to the slots. See Ops.rope_and_cache."""
    q.copy_(rotate(q, positions, cos_sin, compute))
    block_size = k_cache.shape[1]
    written = slot_mapping >= 0
    block_ids = slot_mapping[written] // block_size
    offsets = slot_mapping[written] % block_size
    rotated = rotate(k[written], positions[written], cos_sin, compute)
    k_cache[block_ids, offsets] = rotated.to(k_cache.dtype)
    v_cache[block_ids, offsets] = v[written].to(v_cache.dtype)
