"""What an architecture's layers are made of, and what files call it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """Below a layer, in a Hugging Face checkpoint; {} is the number of an expert."""

    router: str
    gate: str
    up: str
    down: str


@dataclass(frozen=True, slots=True)
class Layout:
    """The tensors of a layer by their Hugging Face names; None is left out."""

    attention_norm: str | None = "input_layernorm"
    attention_post_norm: str | None = None
    mlp_norm: str | None = "post_attention_layernorm"
    mlp_post_norm: str | None = None
    qk_norm: Literal["head", "row"] | None = None
    """q_norm and k_norm, of each head by itself or of all heads as one row."""
    qkv: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    """Or one that is all three."""
    gate_up: tuple[str, ...] = ("gate_proj", "up_proj")
    """Or one that is both."""
    experts: ExpertNames | None = None


_GGUF_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


@dataclass(frozen=True, slots=True)
class GgufDialect:
    """How llama.cpp's converter writes an architecture."""

    architecture: str
    """general.architecture"""
    variant: Literal["plain", "windowed", "experts"] = "plain"
    """Which of the architectures that share the name."""
    tensors: Mapping[str, str] = field(default_factory=dict)
    """Layer tensors that the common table has not or has otherwise: GGUF name to Hugging
    Face name below the layer, where {} is the number of an expert of a stacked tensor."""
    keys: Mapping[str, str] = field(default_factory=dict)
    """Metadata below the architecture to the key in config.json that says the same."""
    defaults: Mapping[str, object] = field(default_factory=dict)
    """What llama.cpp takes for granted, by the key in config.json."""
    interleaved: bool = False
    """Whether rows of q and k are stored so that RoPE pairs neighbours."""

    def layer_name(self, stem: str) -> str | None:
        """attn_q -> self_attn.q_proj; None for a stranger."""
        return self.tensors.get(stem) or _GGUF_LAYER.get(stem)
