"""Mistral 7B (arXiv:2310.06825): Llama with a sliding window in every layer."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from engine_core.model.config import LayerConfig
from engine_core.model.decoder import DecoderModel
from engine_core.model.layout import GgufDialect
from engine_core.model.rope_fields import read_rope

if TYPE_CHECKING:
    from engine_core.model.fields import Fields


class MistralForCausalLM(DecoderModel):
    hf_defaults: ClassVar[dict[str, object]] = {
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-6,
        "sliding_window": 4096,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    # llama.cpp's converter has one name for Llama and Mistral.
    gguf: ClassVar[GgufDialect | None] = GgufDialect("llama", "windowed", interleaved=True)

    @classmethod
    def read_layers(cls, fields: Fields, head_dim: int) -> tuple[LayerConfig, ...]:
        layer = LayerConfig(read_rope(fields, head_dim), fields.optional_integer("sliding_window"))
        return (layer,) * fields.integer("num_hidden_layers")
