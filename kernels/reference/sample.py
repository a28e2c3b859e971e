"""Picking one token per row: greedy, or by inverting the cumulative distribution.

Everything is float64: probabilities of a 256k vocabulary add up without loss,
and a temperature so small that it is subnormal in float32 divides cleanly.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kernels.reference.philox import uniform

if TYPE_CHECKING:
    from kernels.ops import SamplingBatch


def sample(logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
    """logits [S, V] -> ids [S] int64. See Ops.sample.

    NaN counts as -inf. A row whose greatest logit is not finite is greedy.
    """
    clean = logits.double().masked_fill(logits.isnan(), float("-inf"))
    greedy = clean.argmax(dim=-1)
    if batch.all_greedy:
        return greedy
    kept = kept_weights(clean, batch)
    cumulative = kept.cumsum(dim=-1)
    u = uniform(batch.seed, batch.position, batch.sample_index)
    target = (u * cumulative[:, -1]).unsqueeze(1)
    drawn = torch.searchsorted(cumulative, target, right=True).squeeze(1)
    # u * total may round up to total, beyond which there is nothing.
    token_index = torch.arange(logits.shape[1], device=logits.device)
    last_kept = torch.where(kept > 0, token_index, -1).amax(dim=-1)
    drawn = torch.minimum(drawn, last_kept)
    finite = clean.amax(dim=-1).isfinite()
    return torch.where((batch.temperature > 0) & finite, drawn, greedy)


def kept_weights(logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
    """logits [S, V] float64 -> exp((logit - max) / temperature), 0 where filtered out.

    Greedy rows are computed as if their temperature were 1; the caller ignores them.
    """
    temperature = torch.where(batch.temperature > 0, batch.temperature, 1.0).double()
    # The greatest logit becomes 0 before the division, so nothing overflows.
    scores = (logits - logits.amax(dim=-1, keepdim=True)) / temperature.unsqueeze(1)
    if batch.any_filter:
        scores = _filter_top_k(scores, batch.top_k)
        scores = _filter_top_p(scores, batch.top_p)
        scores = _filter_min_p(scores, batch.min_p)
    return scores.exp()


def _filter_top_k(scores: torch.Tensor, top_k: torch.Tensor) -> torch.Tensor:
    """Keeps what is at least the k-th greatest; ties with it stay too."""
    vocab_size = scores.shape[1]
    k = torch.where(top_k > 0, top_k, vocab_size).clamp(max=vocab_size).long()
    descending = scores.sort(dim=-1, descending=True).values
    threshold = descending.gather(1, (k - 1).unsqueeze(1))
    return scores.masked_fill(scores < threshold, float("-inf"))


def _filter_top_p(scores: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Drops the least likely tokens while their sum is at most 1 - top_p.

    Ties go lowest id first; the greatest (of the highest id) always stays.
    """
    ascending, order = scores.sort(dim=-1, stable=True)
    cumulative = ascending.softmax(dim=-1).cumsum(dim=-1)
    drop = cumulative <= 1 - top_p.double().unsqueeze(1)
    drop[:, -1] = False
    drop &= (top_p < 1).unsqueeze(1)
    return scores.masked_fill(torch.zeros_like(drop).scatter(1, order, drop), float("-inf"))


def _filter_min_p(scores: torch.Tensor, min_p: torch.Tensor) -> torch.Tensor:
    """Drops what is less likely than min_p times the most likely, whose score is 0."""
    return scores.masked_fill(scores.exp() < min_p.double().unsqueeze(1), float("-inf"))
