"""One rank's part of the weights, as ParallelOps takes it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from engine_core.model.weights import Weights
from engine_core.parallel.ops import (
    RowParallelLinear,
    TiedVocabularyEmbedding,
    VocabularyEmbedding,
    VocabularyHead,
)
from engine_core.parallel.split import EMBEDDING, HEAD, share

if TYPE_CHECKING:
    from engine_core.model.embedding import Embedding, TiedEmbedding
    from engine_core.parallel.group import RankGroup
    from kernels.ops import LinearWeight


class ParallelWeights(Weights):
    """parts as split.share_tensors has them."""

    def __init__(self, group: RankGroup, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._group = group

    def linear(self, *prefixes: str, bias: bool = False) -> LinearWeight:
        name = f"{prefixes[0]}.weight"
        if name == HEAD:
            return self._head(super().linear(*prefixes, bias=bias))
        part = self._parts.get(name)
        if part is None or part.columns is None:
            return super().linear(*prefixes, bias=bias)
        local = super().linear(*prefixes, bias=bias and self._group.rank == 0)
        return RowParallelLinear(local, local.out_features, local.in_features)

    def embedding(self, name: str) -> Embedding:
        return VocabularyEmbedding(super().embedding(name), self._group, self._mine(name))

    def tied_embedding(self, name: str) -> TiedEmbedding:
        local = super().tied_embedding(name)
        return TiedVocabularyEmbedding(
            local, self._group, self._mine(name), self._head(local.table)
        )

    def _mine(self, name: str) -> range:
        (rows,) = self._parts[name].rows
        return rows

    def _head(self, local: LinearWeight) -> VocabularyHead:
        vocab_size = self._checkpoint.shapes()[EMBEDDING][0]
        ranks = range(self._group.size)
        rows = tuple(len(share(vocab_size, rank, self._group.size)) for rank in ranks)
        return VocabularyHead(local, rows, local.in_features)
