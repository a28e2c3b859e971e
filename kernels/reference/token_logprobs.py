"""Logprobs and ranks of given tokens."""

from __future__ import annotations

import torch

from kernels.ops import TokenLogprobs


def token_logprobs(
    logits: torch.Tensor, token_ids: torch.Tensor, *, with_all: bool
) -> TokenLogprobs:
    """See Ops.token_logprobs. Makes all logprobs of the rows, which takes 4 N V bytes."""
    logprobs = torch.log_softmax(logits, dim=-1, dtype=torch.float32)
    own = logprobs.gather(1, token_ids.unsqueeze(1))
    ranks = 1 + (logprobs > own).sum(dim=1)
    return TokenLogprobs(own.squeeze(1), ranks, logprobs if with_all else None)
