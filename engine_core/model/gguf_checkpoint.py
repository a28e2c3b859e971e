"""A GGUF file as a Checkpoint."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING

from engine_core.model.gguf_tensors import (
    check_tensor,
    read_part_into,
    read_quantized_tensor,
    read_tensor_into,
    type_name,
)
from engine_core.model.layout import GgufDialect
from kernels.quantized import QuantizedTensor

if TYPE_CHECKING:
    from pathlib import Path

    import torch

    from engine_core.model.part import Part
    from pagewire.gguf_file import GgufFile, GgufTensor

_TOP = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_INTERLEAVED = re.compile(r"self_attn\.[qk]_proj\.")
_LLAMA = GgufDialect("llama", interleaved=True)
# Read with the configuration.
_NOT_WEIGHTS = {"rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"}


class GgufCheckpoint:
    """Raises ModelLoadError naming the tensor that is cut off or of an unsupported type."""

    def __init__(self, file: GgufFile, head_dim: int, dialect: GgufDialect = _LLAMA) -> None:
        self._file = file
        self._head_dim = head_dim
        self._dialect = dialect
        self._tensors: dict[str, GgufTensor] = {}
        self._num_bytes: dict[str, int] = {}
        for name, tensor in file.tensors.items():
            if name not in _NOT_WEIGHTS:
                self._add(hf_name(name, dialect), tensor, check_tensor(file, tensor))

    def _add(self, name: str, tensor: GgufTensor, num_bytes: int) -> None:
        """A stacked tensor becomes one for each expert."""
        if "{}" not in name:
            self._tensors[name], self._num_bytes[name] = tensor, num_bytes
            return
        num_experts, *shape = tensor.shape
        each = num_bytes // num_experts
        for number in range(num_experts):
            part = replace(tensor, shape=tuple(shape), offset=tensor.offset + number * each)
            self._add(name.format(number), part, each)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tensor.shape for name, tensor in self._tensors.items()}

    def file_of(self, name: str) -> Path:
        return self._file.path

    def num_bytes(self, name: str) -> int:
        return self._num_bytes[name]

    def read_into(self, name: str, out: torch.Tensor, part: Part | None = None) -> None:
        tensor, interleaved = self._tensors[name], self._interleaved(name)
        if part is None:
            read_tensor_into(self._file, tensor, out, interleaved)
        else:
            read_part_into(self._file, tensor, part, out, interleaved)

    def quantized_format(self, name: str) -> str:
        return type_name(self._tensors[name].type_id)

    def read_quantized(self, name: str, device: torch.device) -> QuantizedTensor:
        part = read_quantized_tensor(self._file, self._tensors[name], self._interleaved(name))
        return QuantizedTensor(part.format, part.shape, part.data.to(device))

    def _interleaved(self, name: str) -> int | None:
        is_interleaved = self._dialect.interleaved and _INTERLEAVED.search(name)
        return self._head_dim if is_interleaved else None


def hf_name(name: str, dialect: GgufDialect = _LLAMA) -> str:
    """blk.3.attn_q.weight -> model.layers.3.self_attn.q_proj.weight; an unknown name stays.

    A name with {} is of a tensor that stacks all experts.
    """
    stem, _, kind = name.rpartition(".")
    if stem in _TOP:
        return f"{_TOP[stem]}.{kind}"
    parts = stem.split(".")
    if len(parts) == 3 and parts[0] == "blk":
        layer_name = dialect.layer_name(parts[2])
        if layer_name is not None:
            return f"model.layers.{parts[1]}.{layer_name}.{kind}"
    return name
