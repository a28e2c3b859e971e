"""Mixtral (arXiv:2401.04088): Mistral whose MLPs are experts, two for each token."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

from engine_core.model.config import ExpertsConfig
from engine_core.model.layout import ExpertNames, GgufDialect, Layout
from engine_core.model.mistral import MistralForCausalLM

if TYPE_CHECKING:
    from engine_core.model.config import LayerConfig
    from engine_core.model.fields import Fields


class MixtralForCausalLM(MistralForCausalLM):
    hf_defaults: ClassVar[dict[str, object]] = {
        **MistralForCausalLM.hf_defaults,
        "rms_norm_eps": 1e-5,
        "sliding_window": None,
        "rope_theta": 1_000_000.0,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    }
    layout = Layout(
        experts=ExpertNames(
            router="block_sparse_moe.gate",
            gate="block_sparse_moe.experts.{}.w1",
            up="block_sparse_moe.experts.{}.w3",
            down="block_sparse_moe.experts.{}.w2",
        )
    )
    gguf = GgufDialect(
        "llama",
        "experts",
        tensors={
            "ffn_gate_inp": "block_sparse_moe.gate",
            "ffn_gate_exps": "block_sparse_moe.experts.{}.w1",
            "ffn_up_exps": "block_sparse_moe.experts.{}.w3",
            "ffn_down_exps": "block_sparse_moe.experts.{}.w2",
        },
        keys={"expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok"},
        interleaved=True,
    )

    @classmethod
    def read_layers(cls, fields: Fields, head_dim: int) -> tuple[LayerConfig, ...]:
        experts = ExpertsConfig(
            num_experts=fields.integer("num_local_experts"),
            top_k=fields.integer("num_experts_per_tok"),
            intermediate_size=fields.integer("intermediate_size"),
            renormalizes=True,
        )
        layers = super().read_layers(fields, head_dim)
        return tuple(replace(layer, experts=experts) for layer in layers)
