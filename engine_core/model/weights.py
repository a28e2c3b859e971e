"""From checkpoint tensors to the device's weights, fused where the model fuses them."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch

from engine_core.model.embedding import FloatEmbedding, PackedEmbedding
from engine_core.model.packed_forms import (
    PackedTensor,
    check_one_product,
    pack,
    prepare_packed_linear,
)
from engine_core.model.part import Part
from engine_core.model.part_codes import take_part
from engine_core.model.quantized.checkpoint import QuantizedCheckpoint
from engine_core.model.quantized.codes import NoPackedForm
from kernels.fp8 import quantize_fp8
from kernels.int4 import quantize_int4
from kernels.quantized import FORMATS, QuantizedTensor, quantize_q8_0

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from engine_core.model.checkpoint import Checkpoint
    from engine_core.model.embedding import Embedding, TiedEmbedding
    from engine_core.model.quantization import Quantization
    from kernels.ops import ExpertWeights, LinearWeight, Ops

logger = logging.getLogger(__name__)

_BLOCK = 32
"""Features that share a scale in int8, and of which int4's groups are made."""
_INT4_GROUPS = (128, _BLOCK)
"""The first that divides the input features."""
_ENDS = {"model.embed_tokens.weight", "lm_head.weight"}
"""Stay floats where int4 or fp8 is made at load: they are the most sensitive."""


class Weights:
    """Reads each tensor once, straight to where it stays: no second copy of the model.

    parts: of the tensors that are not read whole, by name.
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
        parts: Mapping[str, Part] | None = None,
    ) -> None:
        self._checkpoint = checkpoint
        self._parts = parts or {}
        whole = checkpoint.shapes()
        self._shapes = dict(whole)
        self._shapes |= {n: p.shape(whole[n]) for n, p in self._parts.items() if n in whole}
        self._ops = ops
        self._device = device
        self.dtype = dtype
        self._progress = progress
        self._quantization = quantization
        self._done = 0
        self._total = sum(checkpoint.num_bytes(name) for name in self._shapes)
        self.quantized_formats: set[str] = set()
        """Of the matrices kept quantized."""
        self.why_floats: dict[str, list[str]] = {}
        """Of the matrices that were to be quantized and are not: reason to names."""
        self.left_floats: list[str] = []
        """The matrices that were not to be quantized, though others are."""

    def tensor(self, name: str) -> torch.Tensor:
        return self._stacked([name])

    def norm(self, name: str, offset: float) -> torch.Tensor:
        """The weight of a norm with offset added, in float32 before it is rounded."""
        if offset == 0:
            return self.tensor(name)
        folded = torch.empty(self._shapes[name], dtype=torch.float32, device=self._device)
        self._checkpoint.read_into(name, folded, self._parts.get(name))
        self._count(name)
        return folded.add_(offset).to(self.dtype)

    def linear(self, *prefixes: str, bias: bool = False) -> LinearWeight:
        """One product over the rows of all prefixes' weights, and biases where asked for."""
        names = [f"{prefix}.weight" for prefix in prefixes]
        parts = self._packed(names)
        weight = self._stacked(names) if parts is None else None
        added = self._stacked([f"{prefix}.bias" for prefix in prefixes]) if bias else None
        if weight is None:
            assert parts is not None
            return prepare_packed_linear(self._ops, parts, added, self.dtype)
        return self._ops.prepare_linear(weight, added)

    def float_linear(self, prefix: str) -> LinearWeight:
        """A product so small and so sensitive that it is never quantized (a router)."""
        return self._ops.prepare_linear(self.tensor(f"{prefix}.weight"))

    def experts(
        self, gates: Sequence[str], ups: Sequence[str], downs: Sequence[str]
    ) -> ExpertWeights:
        """The matrices of all experts of a layer, gates and ups [I, H], downs [H, I]."""
        if self._quantization != "none":
            names = [*gates, *ups, *downs]
            self.why_floats.setdefault("of a mixture of experts", []).extend(names)
        inner, hidden = self._shapes[gates[0]]
        device = self._device
        gate_up = torch.empty((len(gates), 2 * inner, hidden), dtype=self.dtype, device=device)
        down = torch.empty((len(downs), hidden, inner), dtype=self.dtype, device=device)
        for number, (gate, up) in enumerate(zip(gates, ups, strict=True)):
            self._read(gate, gate_up[number, :inner])
            self._read(up, gate_up[number, inner:])
            self._read(downs[number], down[number])
        return self._ops.prepare_experts(gate_up, down)

    def embedding(self, name: str) -> Embedding:
        """The token table of a model with a head of its own."""
        packed = self._packed_embedding(name)
        return FloatEmbedding(self._ops, self.tensor(name)) if packed is None else packed

    def tied_embedding(self, name: str) -> TiedEmbedding:
        """The token table of a model whose output head it is too.

        Fine-tuned files may hold a head all the same; it does not count, as in
        transformers, but a different one deserves a word.
        """
        if "lm_head.weight" in self._shapes:
            stored = self.tensor("lm_head.weight")
            used = torch.empty_like(stored)
            self._checkpoint.read_into(name, used, self._parts.get(name))
            if not torch.equal(stored, used):
                logger.warning(
                    "%s: lm_head.weight differs from the embedding, but tie_word_embeddings is "
                    "true: the embedding is used",
                    self._checkpoint.file_of("lm_head.weight"),
                )
        packed = self._packed_embedding(name)
        if packed is not None:
            return packed
        table = self._ops.prepare_linear(self.tensor(name))
        return PackedEmbedding(self._ops, table, self.dtype)

    def _packed_embedding(self, name: str) -> PackedEmbedding | None:
        """None where it has to be floats."""
        parts = self._packed([name])
        rows = [part for part in parts or () if isinstance(part, QuantizedTensor)]
        if not rows:
            return None
        table = self._ops.prepare_quantized_linear(rows, None, self.dtype)
        return PackedEmbedding(self._ops, table, self.dtype)

    def _packed(self, names: Sequence[str]) -> list[PackedTensor] | None:
        """None where any of them has to be floats."""
        if self._quantization == "none":
            return None
        if self._are_left_floats(names):
            self.left_floats.extend(names)
            return None
        parts: list[PackedTensor] = []
        name = names[0]
        try:
            for name in names:
                self._check_packable(name)
            for name in names:
                parts.append(self._pack(name))  # name is of the error
            check_one_product(parts)
        except NoPackedForm as error:
            others = [other for other in names if other != name]
            self.why_floats.setdefault(str(error), []).extend([name, *others])
            return None
        for name, part in zip(names, parts, strict=True):
            self.quantized_formats.add(self._format(name, part))
            self._count(name)
        return parts

    def _format(self, name: str, part: PackedTensor) -> str:
        """For people."""
        if self._quantization == "packed":
            return self._checkpoint.quantized_format(name)
        return part.format if isinstance(part, QuantizedTensor) else self._quantization

    def _are_left_floats(self, names: Sequence[str]) -> bool:
        """By whoever made the checkpoint, or by what is quantized at load."""
        if self._quantization == "packed" and isinstance(self._checkpoint, QuantizedCheckpoint):
            return not any(map(self._checkpoint.has_codes, names))
        return self._quantization in ("int4", "fp8") and not _ENDS.isdisjoint(names)

    def _check_packable(self, name: str) -> None:
        """By its header. Raises NoPackedForm."""
        if self._quantization == "packed":
            stored = self._checkpoint.quantized_format(name)
            if isinstance(self._checkpoint, QuantizedCheckpoint):
                is_packable = self._checkpoint.has_codes(name)
            else:
                is_packable = stored in FORMATS
            if not is_packable:
                raise NoPackedForm(f"stored as {stored}")
            return
        in_features = self._checkpoint.shapes()[name][1]
        if self._quantization != "fp8" and in_features % _BLOCK:
            raise NoPackedForm(f"{in_features} input features are no multiple of {_BLOCK}")

    def _pack(self, name: str) -> PackedTensor:
        """Raises NoPackedForm."""
        part = self._parts.get(name)
        if self._quantization == "packed":
            codes = self._checkpoint.read_quantized(name, self._device)
            return pack(codes if part is None else take_part(codes, part, name), self._ops)
        if part is None or part.columns is None:
            return self._quantize(self._floats(name, part))
        # Scales go along rows: they are those of the whole row.
        quantized = self._quantize(self._floats(name, Part(part.rows)))
        return take_part(quantized, Part((range(part.num_rows),), part.columns), name)

    def _floats(self, name: str, part: Part | None) -> torch.Tensor:
        whole = self._checkpoint.shapes()[name]
        shape = whole if part is None else part.shape(whole)
        floats = torch.empty(shape, device=self._device)
        self._checkpoint.read_into(name, floats, part)
        return floats

    def _quantize(self, floats: torch.Tensor) -> PackedTensor:
        if self._quantization == "int8":
            return quantize_q8_0(floats)
        if self._quantization == "fp8":
            return quantize_fp8(floats, (1, 0))
        size = next(size for size in _INT4_GROUPS if floats.shape[1] % size == 0)
        return quantize_int4(floats, size)

    def _stacked(self, names: Sequence[str]) -> torch.Tensor:
        shapes = [self._shapes[name] for name in names]
        rows = sum(shape[0] for shape in shapes)
        out = torch.empty((rows, *shapes[0][1:]), dtype=self.dtype, device=self._device)
        start = 0
        for name, shape in zip(names, shapes, strict=True):
            self._read(name, out[start : start + shape[0]])
            start += shape[0]
        return out

    def _read(self, name: str, out: torch.Tensor) -> None:
        self._checkpoint.read_into(name, out, self._parts.get(name))
        self._count(name)

    def _count(self, name: str) -> None:
        self._done += self._checkpoint.num_bytes(name)
        self._progress(self._done, self._total)
