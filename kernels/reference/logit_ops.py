"""The ops on logits around the draw, in torch: what backends without kernels for them use."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernels import shapes
from kernels.reference import logit_bias as logit_bias_op
from kernels.reference import penalties as penalties_op
from kernels.reference import token_logprobs as token_logprobs_op

if TYPE_CHECKING:
    import torch

    from kernels.ops import PenaltyBatch, TokenLists, TokenLogprobs


class TorchLogitOps:
    """apply_penalties, add_logit_bias and token_logprobs of Ops, on any device."""

    def apply_penalties(self, logits: torch.Tensor, batch: PenaltyBatch) -> None:
        shapes.check_penalties(logits, batch)
        penalties_op.apply_penalties(logits, batch)

    def add_logit_bias(self, logits: torch.Tensor, ids: TokenLists, values: torch.Tensor) -> None:
        shapes.ADD_LOGIT_BIAS.check(logits, ids.rows, ids.starts, ids.ids, values)
        logit_bias_op.add_logit_bias(logits, ids, values)

    def token_logprobs(
        self, logits: torch.Tensor, token_ids: torch.Tensor, *, with_all: bool = False
    ) -> TokenLogprobs:
        shapes.TOKEN_LOGPROBS.check(logits, token_ids)
        return token_logprobs_op.token_logprobs(logits, token_ids, with_all=with_all)
