"""Phi 3 and 4 (arXiv:2404.14219, arXiv:2412.08905): Llama with fused matrices, a context
extended by longrope, and in Phi-4-mini a RoPE of part of each head."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from engine_core.model.config import LayerConfig
from engine_core.model.decoder import DecoderModel
from engine_core.model.layout import GgufDialect, Layout
from engine_core.model.rope_fields import read_rope

if TYPE_CHECKING:
    from engine_core.model.fields import Fields

# As the first releases called it; both have short and long factors.
_ROPE_ALIASES = {"su": "longrope", "yarn": "longrope"}


class Phi3ForCausalLM(DecoderModel):
    hf_defaults: ClassVar[dict[str, object]] = {
        "vocab_size": 32064,
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "max_position_embeddings": 4096,
        "original_max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "bos_token_id": 1,
        "eos_token_id": 32000,
    }
    layout = Layout(qkv=("qkv_proj",), gate_up=("gate_up_proj",))
    gguf = GgufDialect(
        "phi3", tensors={"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}
    )

    @classmethod
    def read_layers(cls, fields: Fields, head_dim: int) -> tuple[LayerConfig, ...]:
        rope = read_rope(fields, head_dim, _ROPE_ALIASES)
        layer = LayerConfig(rope, fields.optional_integer("sliding_window"))
        return (layer,) * fields.integer("num_hidden_layers")
