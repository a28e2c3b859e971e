"""A GGUF file as a Checkpoint."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from engine_core.model.gguf_tensors import (
    check_tensor,
    read_quantized_tensor,
    read_tensor_into,
    type_name,
)

if TYPE_CHECKING:
    from pathlib import Path

    import torch

    from kernels.quantized import QuantizedTensor
    from pagewire.gguf_file import GgufFile

_TOP = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_INTERLEAVED = re.compile(r"self_attn\.[qk]_proj\.")
# Read with the configuration.
_NOT_WEIGHTS = {"rope_freqs.weight"}


class GgufCheckpoint:
    """Raises ModelLoadError naming the tensor that is cut off or of an unsupported type."""

    def __init__(self, file: GgufFile, head_dim: int) -> None:
        self._file = file
        self._head_dim = head_dim
        self._tensors = {
            hf_name(name): tensor
            for name, tensor in file.tensors.items()
            if name not in _NOT_WEIGHTS
        }
        self._num_bytes = {name: check_tensor(file, t) for name, t in self._tensors.items()}

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tensor.shape for name, tensor in self._tensors.items()}

    def file_of(self, name: str) -> Path:
        return self._file.path

    def num_bytes(self, name: str) -> int:
        return self._num_bytes[name]

    def read_into(self, name: str, out: torch.Tensor) -> None:
        interleaved = self._head_dim if _INTERLEAVED.search(name) else None
        read_tensor_into(self._file, self._tensors[name], out, interleaved)

    def quantized_format(self, name: str) -> str:
        return type_name(self._tensors[name].type_id)

    def read_quantized(self, name: str) -> QuantizedTensor:
        interleaved = self._head_dim if _INTERLEAVED.search(name) else None
        return read_quantized_tensor(self._file, self._tensors[name], interleaved)


def hf_name(name: str) -> str:
    """blk.3.attn_q.weight -> model.layers.3.self_attn.q_proj.weight; an unknown name stays."""
    stem, _, kind = name.rpartition(".")
    if stem in _TOP:
        return f"{_TOP[stem]}.{kind}"
    parts = stem.split(".")
    if len(parts) == 3 and parts[0] == "blk" and parts[2] in _LAYER:
        return f"model.layers.{parts[1]}.{_LAYER[parts[2]]}.{kind}"
    return name
