"""Qwen 3 with experts (arXiv:2505.09388) in all layers, or in all but a few."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from engine_core.model.config import ExpertsConfig, LayerConfig
from engine_core.model.decoder import DecoderModel
from engine_core.model.layout import ExpertNames, GgufDialect, Layout
from engine_core.model.llama import attention_biases
from engine_core.model.rope_fields import read_rope
from pagewire.errors import ModelLoadError

if TYPE_CHECKING:
    from engine_core.model.fields import Fields


class Qwen3MoeForCausalLM(DecoderModel):
    hf_defaults: ClassVar[dict[str, object]] = {
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 24,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "sliding_window": 4096,
        "decoder_sparse_step": 1,
        "moe_intermediate_size": 768,
        "num_experts_per_tok": 8,
        "mlp_only_layers": [],
    }
    layout = Layout(
        qk_norm="head",
        experts=ExpertNames(
            router="mlp.gate",
            gate="mlp.experts.{}.gate_proj",
            up="mlp.experts.{}.up_proj",
            down="mlp.experts.{}.down_proj",
        ),
    )
    gguf = GgufDialect(
        "qwen3moe",
        "experts",
        tensors={
            "ffn_gate_inp": "mlp.gate",
            "ffn_gate_exps": "mlp.experts.{}.gate_proj",
            "ffn_up_exps": "mlp.experts.{}.up_proj",
            "ffn_down_exps": "mlp.experts.{}.down_proj",
        },
        keys={
            "expert_count": "num_experts",
            "expert_used_count": "num_experts_per_tok",
            "expert_feed_forward_length": "moe_intermediate_size",
        },
        defaults={"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []},
    )

    @classmethod
    def read_layers(cls, fields: Fields, head_dim: int) -> tuple[LayerConfig, ...]:
        # transformers 5 writes num_local_experts, the models' authors num_experts.
        key = "num_experts" if "num_experts" in fields.raw else "num_local_experts"
        experts = ExpertsConfig(
            num_experts=128 if key not in fields.raw else fields.integer(key),
            top_k=fields.integer("num_experts_per_tok"),
            intermediate_size=fields.integer("moe_intermediate_size"),
            renormalizes=fields.flag("norm_topk_prob"),
        )
        rope = read_rope(fields, head_dim)
        is_sliding = fields.flag("use_sliding_window")
        window = fields.optional_integer("sliding_window") if is_sliding else None
        step = fields.integer("decoder_sparse_step")
        if step < 1:
            raise ModelLoadError(f"{fields.path}: decoder_sparse_step is {step}, expected above 0")
        dense = set()
        if fields.raw.get("mlp_only_layers") is not None:
            dense = set(fields.integers("mlp_only_layers"))
        return tuple(
            LayerConfig(rope, window, None if index in dense or (index + 1) % step else experts)
            for index in range(fields.integer("num_hidden_layers"))
        )

    @classmethod
    def read_differences(cls, fields: Fields, head_dim: int) -> dict[str, Any]:
        return attention_biases(fields)
