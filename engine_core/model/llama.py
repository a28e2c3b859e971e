"""Llama 2 and 3, and the many models that are Llama under another name (SmolLM2)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from engine_core.model.decoder import DecoderModel
from engine_core.model.layout import GgufDialect

if TYPE_CHECKING:
    from engine_core.model.fields import Fields


class LlamaForCausalLM(DecoderModel):
    hf_defaults: ClassVar[dict[str, object]] = {
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    gguf = GgufDialect("llama", interleaved=True)

    @classmethod
    def read_differences(cls, fields: Fields, head_dim: int) -> dict[str, Any]:
        return attention_biases(fields) | {"mlp_bias": fields.flag("mlp_bias")}


def attention_biases(fields: Fields) -> dict[str, Any]:
    """attention_bias is of all four products."""
    bias = fields.flag("attention_bias")
    return {"qkv_bias": bias, "output_bias": bias}
