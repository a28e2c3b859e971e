"""From checkpoint tensors to the device's weights, fused where the model fuses them."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch

from engine_core.model.embedding import FloatEmbedding, QuantizedEmbedding
from kernels.quantized import FORMATS, QuantizedTensor, quantize_q8_0

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from engine_core.model.checkpoint import Checkpoint
    from engine_core.model.embedding import Embedding
    from engine_core.model.quantization import Quantization
    from kernels.ops import LinearWeight, Ops

logger = logging.getLogger(__name__)

_INT8_BLOCK = FORMATS["Q8_0"].block


class Weights:
    """Reads each tensor once, straight to where it stays: no second copy of the model.

    progress(done, total) is called after each tensor, in bytes of the checkpoint.
    quantization is what matrices become where they can: see why_floats for the others.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        ops: Ops,
        device: torch.device,
        dtype: torch.dtype,
        progress: Callable[[int, int], None],
        quantization: Quantization = "none",
    ) -> None:
        self._checkpoint = checkpoint
        self._shapes = checkpoint.shapes()
        self._ops = ops
        self._device = device
        self._dtype = dtype
        self._progress = progress
        self._quantization = quantization
        self._done = 0
        self._total = sum(checkpoint.num_bytes(name) for name in self._shapes)
        self.quantized_formats: set[str] = set()
        """Of the matrices kept quantized."""
        self.why_floats: dict[str, list[str]] = {}
        """Of the matrices that were to be quantized and are not: reason to names."""

    def tensor(self, name: str) -> torch.Tensor:
        return self._stacked([name])

    def linear(self, *prefixes: str) -> LinearWeight:
        """One product over the rows of all prefixes' weights, with biases where they have them."""
        names = [f"{prefix}.weight" for prefix in prefixes]
        biases = [f"{prefix}.bias" for prefix in prefixes]
        parts = self._quantized(names)
        weight = self._stacked(names) if parts is None else None
        bias = self._stacked(biases) if biases[0] in self._shapes else None
        if weight is None:
            assert parts is not None
            return self._ops.prepare_quantized_linear(parts, bias, self._dtype)
        return self._ops.prepare_linear(weight, bias)

    def embedding(self, name: str) -> Embedding:
        parts = self._quantized([name])
        if parts is None:
            return FloatEmbedding(name, self._ops, self.tensor(name))
        table = self._ops.prepare_quantized_linear(parts, None, self._dtype)
        return QuantizedEmbedding(name, self._ops, table, self._dtype)

    def tied_head(self, embedding: Embedding) -> LinearWeight:
        """The output head of a model whose embedding is its head.

        Fine-tuned files may hold a head all the same; it does not count, as in
        transformers, but a different one deserves a word.
        """
        if "lm_head.weight" in self._shapes:
            stored = self.tensor("lm_head.weight")
            used = torch.empty_like(stored)
            self._checkpoint.read_into(embedding.name, used)
            if not torch.equal(stored, used):
                logger.warning(
                    "%s: lm_head.weight differs from the embedding, but tie_word_embeddings is "
                    "true: the embedding is used",
                    self._checkpoint.file_of("lm_head.weight"),
                )
        return embedding.head()

    def _quantized(self, names: Sequence[str]) -> list[QuantizedTensor] | None:
        """None where any of them has to be floats."""
        if self._quantization == "none":
            return None
        reasons = {name: self._why_float(name) for name in names}
        for name, reason in reasons.items():
            if reason is not None:
                self.why_floats.setdefault(reason, []).append(name)
        if any(reasons.values()):
            return None
        parts = []
        for name in names:
            part = self._quantize(name) if self._quantization == "int8" else self._read_packed(name)
            parts.append(part)
            self.quantized_formats.add(part.format)
            self._count(name)
        return parts

    def _why_float(self, name: str) -> str | None:
        if self._quantization == "packed":
            stored = self._checkpoint.quantized_format(name)
            return None if stored in FORMATS else f"stored as {stored}"
        in_features = self._shapes[name][1]
        if in_features % _INT8_BLOCK:
            return f"{in_features} input features are no multiple of {_INT8_BLOCK}"
        return None

    def _read_packed(self, name: str) -> QuantizedTensor:
        part = self._checkpoint.read_quantized(name)
        return QuantizedTensor(part.format, part.shape, part.data.to(self._device))

    def _quantize(self, name: str) -> QuantizedTensor:
        floats = torch.empty(self._shapes[name], device=self._device)
        self._checkpoint.read_into(name, floats)
        return quantize_q8_0(floats)

    def _stacked(self, names: Sequence[str]) -> torch.Tensor:
        shapes = [self._shapes[name] for name in names]
        rows = sum(shape[0] for shape in shapes)
        out = torch.empty((rows, *shapes[0][1:]), dtype=self._dtype, device=self._device)
        start = 0
        for name, shape in zip(names, shapes, strict=True):
            self._checkpoint.read_into(name, out[start : start + shape[0]])
            start += shape[0]
            self._count(name)
        return out

    def _count(self, name: str) -> None:
        self._done += self._checkpoint.num_bytes(name)
        self._progress(self._done, self._total)
