"""A backend's ops on one rank's part of the weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch

from kernels.blocks import ComposedBlocks
from kernels.ops import AttentionBlock

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine_core.model.embedding import Embedding
    from engine_core.parallel.group import RankGroup
    from kernels.ops import (
        Activation,
        Block,
        BlockStack,
        ExpertWeights,
        LinearWeight,
        Ops,
        SamplingBatch,
    )


@dataclass(frozen=True, slots=True)
class RowParallelLinear:
    """Some of a weight's columns: the product is a term of the whole one. A bias is rank 0's."""

    local: LinearWeight
    out_features: int
    in_features: int


@dataclass(frozen=True, slots=True)
class VocabularyHead:
    """Some of the head's rows: the product is a part of the logits."""

    local: LinearWeight
    rows: tuple[int, ...]
    """Of each rank."""
    in_features: int

    @property
    def out_features(self) -> int:
        return sum(self.rows)


@dataclass(frozen=True, slots=True)
class VocabularyEmbedding:
    """Some of the rows of the token table."""

    local: Embedding
    group: RankGroup
    mine: range

    def rows(self, input_ids: torch.Tensor) -> torch.Tensor:
        """input_ids [T] int64 -> [T, H]."""
        index = input_ids - self.mine.start
        is_mine = (index >= 0) & (index < len(self.mine))
        found = self.local.rows(torch.where(is_mine, index, 0))
        return self.group.sum(found.masked_fill_(~is_mine.unsqueeze(1), 0))


@dataclass(frozen=True, slots=True)
class TiedVocabularyEmbedding(VocabularyEmbedding):
    table: VocabularyHead


class ParallelOps(ComposedBlocks):
    """The inner ops but where ranks meet: after row-parallel products and experts, in norms
    over a row of heads, for logits, which all ranks get whole, and for the ids drawn, which
    are rank 0's.

    So ranks cannot come to draw different ids, and what only shapes the draw (penalties,
    masks, grammars) concerns rank 0 alone. Blocks are composed of single ops.
    """

    def __init__(self, inner: Ops, group: RankGroup) -> None:
        self._inner = inner
        self._group = group
        self._row_norms: dict[int, int] = {}
        """Of each norm over a row of heads that ranks have parts of: its identity, and the
        width of the whole row. The block stack holds the tensors."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def linear(self, x: torch.Tensor, weight: LinearWeight) -> torch.Tensor:
        if isinstance(weight, RowParallelLinear):
            return self._group.sum(self._inner.linear(x, weight.local))
        if isinstance(weight, VocabularyHead):
            return self._gather_logits(self._inner.linear(x, weight.local), weight.rows)
        return self._inner.linear(x, weight)

    def _gather_logits(self, mine: torch.Tensor, rows: tuple[int, ...]) -> torch.Tensor:
        """mine [S, rows of this rank] -> [S, V]."""
        padded = torch.nn.functional.pad(mine, (0, max(rows) - mine.shape[1]))
        parts = self._group.gather(padded)
        return torch.cat([part[:, :n] for part, n in zip(parts, rows, strict=True)], dim=1)

    def prepare_blocks(self, blocks: Sequence[Block]) -> BlockStack:
        norms = [
            norm
            for block in blocks
            if isinstance(block, AttentionBlock)
            for norm in (block.q_norm, block.k_norm)
            if norm is not None and norm.shape[0] != block.head_dim
        ]
        widths = {norm.shape[0]: 0 for norm in norms}
        for width in widths:
            widths[width] = self._group.total(width, norms[0].device)
        self._row_norms |= {id(norm): widths[norm.shape[0]] for norm in norms}
        return super().prepare_blocks(blocks)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        width = self._row_norms.get(id(weight))
        if width is None:
            return self._inner.rms_norm(x, weight, eps)
        wide = x.float()
        # In float64 the order of a row's terms, which torch chooses, does not show.
        mine = wide.double().square().sum(dim=-1, keepdim=True).float()
        inverse_rms = torch.rsqrt(self._group.sum(mine) / width + eps)
        return (wide * inverse_rms * weight.float()).to(x.dtype)

    def experts(
        self,
        x: torch.Tensor,
        weights: ExpertWeights,
        expert_ids: torch.Tensor,
        expert_scales: torch.Tensor,
        activation: Activation,
    ) -> torch.Tensor:
        mine = self._inner.experts(x, weights, expert_ids, expert_scales, activation)
        return self._group.sum(mine)

    def sample(self, logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
        if self._group.rank == 0:
            return self._group.from_first(self._inner.sample(logits, batch))
        return self._group.from_first(
            torch.empty(logits.shape[0], dtype=torch.int64, device=logits.device)
        )


def parallel_ops(inner: Ops, group: RankGroup) -> Ops:
    return cast("Ops", ParallelOps(inner, group))
