"""OLMo 2 (arXiv:2501.00656): norms after attention and MLP, none before, and one norm over
all heads of q and of k."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from engine_core.model.decoder import DecoderModel
from engine_core.model.layout import GgufDialect, Layout
from engine_core.model.llama import attention_biases

if TYPE_CHECKING:
    from engine_core.model.fields import Fields


class Olmo2ForCausalLM(DecoderModel):
    hf_defaults: ClassVar[dict[str, object]] = {
        "vocab_size": 50304,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "eos_token_id": 50279,
    }
    layout = Layout(
        attention_norm=None,
        attention_post_norm="post_attention_layernorm",
        mlp_norm=None,
        mlp_post_norm="post_feedforward_layernorm",
        qk_norm="row",
    )
    gguf = GgufDialect(
        "olmo2",
        tensors={
            "post_attention_norm": "post_attention_layernorm",
            "post_ffw_norm": "post_feedforward_layernorm",
        },
    )

    @classmethod
    def read_differences(cls, fields: Fields, head_dim: int) -> dict[str, Any]:
        return attention_biases(fields)
