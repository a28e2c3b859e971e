"""Gemma 3, text (arXiv:2503.19786): five sliding layers to one that sees all, each kind with
a RoPE of its own, and norms on each head's q and k in place of soft caps."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from engine_core.model.config import LayerConfig
from engine_core.model.gemma2 import SANDWICH_TENSORS, Gemma2ForCausalLM
from engine_core.model.layer_windows import (
    periodic_layer_types,
    read_layer_types,
    windows_by_type,
)
from engine_core.model.layout import GgufDialect, Layout
from engine_core.model.rope_fields import read_ropes_by_layer_type

if TYPE_CHECKING:
    from engine_core.model.fields import Fields


class Gemma3ForCausalLM(Gemma2ForCausalLM):
    hf_defaults: ClassVar[dict[str, object]] = {
        **Gemma2ForCausalLM.hf_defaults,
        "vocab_size": 262208,
        "max_position_embeddings": 131072,
        "final_logit_softcapping": None,
        "attn_logit_softcapping": None,
        "rope_theta": 1_000_000.0,
        "rope_local_base_freq": 10_000.0,
        "sliding_window_pattern": 6,
    }
    layout = Layout(
        attention_post_norm="post_attention_layernorm",
        mlp_norm="pre_feedforward_layernorm",
        mlp_post_norm="post_feedforward_layernorm",
        qk_norm="head",
    )
    gguf: ClassVar[GgufDialect | None] = GgufDialect(
        "gemma3",
        tensors=SANDWICH_TENSORS,
        keys={
            "final_logit_softcapping": "final_logit_softcapping",
            "rope.freq_base_swa": "rope_local_base_freq",
        },
        defaults={
            "hidden_activation": "gelu_pytorch_tanh",
            "rope_theta": 1_000_000.0,
            "rope_local_base_freq": 10_000.0,
            "sliding_window_pattern": 6,
        },
    )
    gguf_wide_layers: ClassVar[int] = 62

    @classmethod
    def read_layers(cls, fields: Fields, head_dim: int) -> tuple[LayerConfig, ...]:
        period = fields.integer("sliding_window_pattern")
        if period < 1:
            raise fields.wrong("sliding_window_pattern", "at least 1")
        default = periodic_layer_types(fields.integer("num_hidden_layers"), period)
        layer_types = read_layer_types(fields, default)
        ropes = read_ropes_by_layer_type(fields, head_dim)
        windows = windows_by_type(fields, layer_types)
        return tuple(
            LayerConfig(ropes[layer_type], window)
            for layer_type, window in zip(layer_types, windows, strict=True)
        )


class Gemma3ForConditionalGeneration(Gemma3ForCausalLM):
    """Gemma 3 with images, of which the text model is served."""

    hf_text_key: ClassVar[str | None] = "text_config"
    hf_prefix: ClassVar[str] = "language_model."
    gguf: ClassVar[GgufDialect | None] = None
