"""Gemma 2 (arXiv:2408.00118): norms on both sides, soft caps, every other layer sliding."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from engine_core.model.config import LayerConfig
from engine_core.model.decoder import DecoderModel
from engine_core.model.layer_windows import (
    periodic_layer_types,
    read_layer_types,
    windows_by_type,
)
from engine_core.model.layout import GgufDialect, Layout
from engine_core.model.llama import attention_biases
from engine_core.model.rope_fields import read_rope
from pagewire.errors import ModelLoadError

if TYPE_CHECKING:
    from engine_core.model.fields import Fields

SANDWICH_TENSORS = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
"""GGUF names of the norms around attention and MLP."""


class Gemma2ForCausalLM(DecoderModel):
    hf_defaults: ClassVar[dict[str, object]] = {
        "vocab_size": 256000,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-6,
        "bos_token_id": 2,
        "eos_token_id": 1,
        "tie_word_embeddings": True,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "final_logit_softcapping": 30.0,
        "attn_logit_softcapping": 50.0,
    }
    layout = Layout(
        attention_post_norm="post_attention_layernorm",
        mlp_norm="pre_feedforward_layernorm",
        mlp_post_norm="post_feedforward_layernorm",
    )
    gguf: ClassVar[GgufDialect | None] = GgufDialect(
        "gemma2",
        tensors=SANDWICH_TENSORS,
        keys={
            "attn_logit_softcapping": "attn_logit_softcapping",
            "final_logit_softcapping": "final_logit_softcapping",
        },
        defaults={
            "hidden_activation": "gelu_pytorch_tanh",
            "sliding_window": 4096,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        },
    )
    rounds_embedding_scale: ClassVar[bool] = True
    gguf_wide_layers: ClassVar[int] = 46
    """The number of layers by which llama.cpp knows the 27B model, whose scores are scaled
    by the width for each head and not by the head's own; GGUF metadata does not say it."""

    @classmethod
    def read_layers(cls, fields: Fields, head_dim: int) -> tuple[LayerConfig, ...]:
        default = periodic_layer_types(fields.integer("num_hidden_layers"), 2)
        windows = windows_by_type(fields, read_layer_types(fields, default))
        rope = read_rope(fields, head_dim)
        return tuple(LayerConfig(rope, window) for window in windows)

    @classmethod
    def read_differences(cls, fields: Fields, head_dim: int) -> dict[str, Any]:
        if fields.flag("use_bidirectional_attention"):
            raise fields.unsupported("use_bidirectional_attention", "false")
        hidden_size = fields.integer("hidden_size")
        scalar = fields.optional_number("query_pre_attn_scalar")
        if scalar is None:
            is_wide = fields.integer("num_hidden_layers") == cls.gguf_wide_layers
            num_heads = max(fields.integer("num_attention_heads"), 1)
            scalar = hidden_size // num_heads if is_wide else head_dim
        if not scalar > 0:
            raise ModelLoadError(
                f"{fields.path}: query_pre_attn_scalar is {scalar}, expected above 0"
            )
        return attention_biases(fields) | {
            "norm_offset": 1.0,
            "embedding_scale": hidden_size**0.5,
            "attention_scale": scalar**-0.5,
            "attention_soft_cap": fields.optional_number("attn_logit_softcapping"),
            "logit_soft_cap": fields.optional_number("final_logit_softcapping"),
        }
