"""Qwen 2 and 2.5 (arXiv:2407.10671, arXiv:2412.15115): biases on q, k and v, and in large
models a window in the upper layers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from engine_core.model.config import LayerConfig
from engine_core.model.decoder import DecoderModel
from engine_core.model.layer_windows import read_layer_types, windows_by_type
from engine_core.model.layout import GgufDialect
from engine_core.model.rope_fields import read_rope

if TYPE_CHECKING:
    from engine_core.model.fields import Fields


class Qwen2ForCausalLM(DecoderModel):
    hf_defaults: ClassVar[dict[str, object]] = {
        "vocab_size": 151936,
        "hidden_size": 4096,
        "intermediate_size": 22016,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "sliding_window": 4096,
        "max_window_layers": 28,
    }
    gguf = GgufDialect("qwen2")

    @classmethod
    def read_layers(cls, fields: Fields, head_dim: int) -> tuple[LayerConfig, ...]:
        num_layers = fields.integer("num_hidden_layers")
        rope = read_rope(fields, head_dim)
        if not fields.flag("use_sliding_window"):
            return (LayerConfig(rope),) * num_layers
        first = fields.integer("max_window_layers")
        default = [
            "sliding_attention" if i >= first else "full_attention" for i in range(num_layers)
        ]
        windows = windows_by_type(fields, read_layer_types(fields, default))
        return tuple(LayerConfig(rope, window) for window in windows)

    @classmethod
    def read_differences(cls, fields: Fields, head_dim: int) -> dict[str, Any]:
        return {"qkv_bias": True}
