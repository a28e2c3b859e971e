"""Causal attention over the paged KV cache, one sequence at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from kernels.ops import AttentionBatch


def attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    batch: AttentionBatch,
    scale: float,
    compute: torch.dtype = torch.float32,
    window: int | None = None,
    soft_cap: float | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """q [T, Hq, D] -> [T, Hq, D]. See Ops.attention.

    Tokens that belong to no sequence, and sequences of length 0, get zeros.
    """
    out = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
    group = q.shape[1] // k_cache.shape[2]
    starts = batch.query_start_loc_host.tolist()
    for row, seq_len in enumerate(batch.seq_lens_host.tolist()):
        start, end = starts[row], starts[row + 1]
        if start == end or seq_len == 0:
            continue
        # What lies before every token's window is not read: it may be anything.
        first = 0 if window is None else max(0, seq_len - (end - start) + 1 - window)
        # [seq_len - first, Hq, D]
        table = batch.block_table[row]
        keys = _context(k_cache, k_scale, table, first, seq_len, compute)
        values = _context(v_cache, v_scale, table, first, seq_len, compute)
        keys, values = (kv.repeat_interleave(group, dim=1) for kv in (keys, values))
        scores = torch.einsum("qhd,khd->hqk", q[start:end].to(compute), keys) * scale
        if soft_cap is not None:
            scores = soft_cap * torch.tanh(scores / soft_cap)
        # Token i of the chunk is at absolute position seq_len - query_len + i.
        positions = torch.arange(seq_len - (end - start), seq_len, device=q.device)
        seen = torch.arange(first, seq_len, device=q.device)
        hidden = seen > positions.unsqueeze(1)
        if window is not None:
            hidden |= seen <= positions.unsqueeze(1) - window
        weights = scores.masked_fill(hidden, float("-inf")).softmax(dim=-1)
        out[start:end] = torch.einsum("hqk,khd->qhd", weights, values).to(q.dtype)
    return out


def _context(
    cache: torch.Tensor,
    scale: torch.Tensor | None,
    block_ids: torch.Tensor,
    first: int,
    end: int,
    compute: torch.dtype,
) -> torch.Tensor:
    """cache [N, B, Hk, D] -> the sequence's tokens [first, end), [end - first, Hk, D]."""
    block_size = cache.shape[1]
    first_block = first // block_size
    ids = block_ids[first_block : -(-end // block_size)].long()
    taken = slice(first - first_block * block_size, end - first_block * block_size)
    tokens = cache[ids].flatten(0, 1)[taken].to(compute)
    if scale is None:
        return tokens
    if scale.ndim == 1:
        return tokens * scale.to(compute).unsqueeze(1)
    of_slots = scale[ids].transpose(1, 2).flatten(0, 1)[taken]
    return tokens * of_slots.to(compute).unsqueeze(2)
