"""From checkpoint tensors to the device's weights, fused where the model fuses them."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from engine_core.model.checkpoint import Checkpoint
    from kernels.ops import LinearWeight, Ops

logger = logging.getLogger(__name__)


class Weights:
    """Reads each tensor once, straight to where it stays: no second copy of the model.

    progress(done, total) is called after each tensor, in bytes of the checkpoint.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        ops: Ops,
        device: torch.device,
        dtype: torch.dtype,
        progress: Callable[[int, int], None],
    ) -> None:
        self._checkpoint = checkpoint
        self._shapes = checkpoint.shapes()
        self._ops = ops
        self._device = device
        self._dtype = dtype
        self._progress = progress
        self._done = 0
        self._total = sum(checkpoint.num_bytes(name) for name in self._shapes)

    def tensor(self, name: str) -> torch.Tensor:
        return self._stacked([name])

    def linear(self, *prefixes: str) -> LinearWeight:
        """One product over the rows of all prefixes' weights, with biases where they have them."""
        weight = self._stacked([f"{prefix}.weight" for prefix in prefixes])
        biases = [f"{prefix}.bias" for prefix in prefixes]
        bias = self._stacked(biases) if biases[0] in self._shapes else None
        return self._ops.prepare_linear(weight, bias)

    def tied_head(self, embedding: torch.Tensor) -> LinearWeight:
        """The output head of a model whose embedding is its head.

        Fine-tuned files may hold a head all the same; it does not count, as in
        transformers, but a different one deserves a word.
        """
        if "lm_head.weight" in self._shapes:
            stored = self.tensor("lm_head.weight")
            if not torch.equal(stored, embedding):
                logger.warning(
                    "%s: lm_head.weight differs from the embedding, but tie_word_embeddings is "
                    "true: the embedding is used",
                    self._checkpoint.file_of("lm_head.weight"),
                )
        return self._ops.prepare_linear(embedding)

    def _stacked(self, names: Sequence[str]) -> torch.Tensor:
        shapes = [self._shapes[name] for name in names]
        rows = sum(shape[0] for shape in shapes)
        out = torch.empty((rows, *shapes[0][1:]), dtype=self._dtype, device=self._device)
        start = 0
        for name, shape in zip(names, shapes, strict=True):
            self._checkpoint.read_into(name, out[start : start + shape[0]])
            start += shape[0]
            self._done += self._checkpoint.num_bytes(name)
            self._progress(self._done, self._total)
        return out
