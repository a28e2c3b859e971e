"""The pre-norm decoder that Llama and its relatives share.

Llama: arXiv:2302.13971, arXiv:2307.09288. Grouped-query attention:
arXiv:2305.13245. SwiGLU: arXiv:2002.05202. RMSNorm: arXiv:1910.07467.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from engine_core.model.rope import cos_sin_table

if TYPE_CHECKING:
    import torch

    from engine_core.model.config import ModelConfig
    from engine_core.model.inputs import KVCaches, ModelInput
    from engine_core.model.weights import Weights
    from kernels.ops import LinearWeight, Ops


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    input_norm: torch.Tensor  # [H]
    qkv: LinearWeight  # [(Hq + 2 Hk) D, H]
    attention_out: LinearWeight  # [H, Hq D]
    post_attention_norm: torch.Tensor  # [H]
    gate_up: LinearWeight  # [2I, H]
    down: LinearWeight  # [H, I]


class HiddenStates(NamedTuple):
    """After the last layer: their sum, normed, is what the head reads."""

    x: torch.Tensor  # [T, H]
    residual: torch.Tensor  # [T, H]


class DecoderModel:
    """Holds the weights; the KV cache and the batch come with each call."""

    hf_defaults: ClassVar[dict[str, object]] = {}
    """What config.json means by an absent key."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        ops: Ops,
        device: torch.device,
        max_model_len: int,
    ) -> None:
        self.config = config
        self._ops = ops
        self._heads = (config.num_heads, config.num_kv_heads, config.num_kv_heads)
        self._scale = config.head_dim**-0.5
        self._cos_sin = cos_sin_table(config.rope, config.head_dim, max_model_len).to(device)
        self._embedding = weights.tensor("model.embed_tokens.weight")
        self._layers = tuple(_read_layer(weights, i) for i in range(config.num_layers))
        self._norm = weights.tensor("model.norm.weight")
        self._head = (
            weights.tied_head(self._embedding)
            if config.tie_embeddings
            else weights.linear("lm_head")
        )

    @staticmethod
    def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
        """Every tensor the constructor reads, in Hugging Face names."""
        hidden, inter = config.hidden_size, config.intermediate_size
        q_rows, kv_rows = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        attention = {"q": (q_rows, hidden), "k": (kv_rows, hidden), "v": (kv_rows, hidden)}
        attention["o"] = (hidden, q_rows)
        mlp = {"gate": (inter, hidden), "up": (inter, hidden), "down": (hidden, inter)}
        shapes: dict[str, tuple[int, ...]] = {
            "model.embed_tokens.weight": (config.vocab_size, hidden),
            "model.norm.weight": (hidden,),
        }
        for i in range(config.num_layers):
            prefix = f"model.layers.{i}"
            shapes[f"{prefix}.input_layernorm.weight"] = (hidden,)
            shapes[f"{prefix}.post_attention_layernorm.weight"] = (hidden,)
            for part, matrices, bias in (
                ("self_attn", attention, config.attention_bias),
                ("mlp", mlp, config.mlp_bias),
            ):
                for name, shape in matrices.items():
                    shapes[f"{prefix}.{part}.{name}_proj.weight"] = shape
                    if bias:
                        shapes[f"{prefix}.{part}.{name}_proj.bias"] = shape[:1]
        if not config.tie_embeddings:
            shapes["lm_head.weight"] = (config.vocab_size, hidden)
        return shapes

    def forward(self, inputs: ModelInput, kv_caches: KVCaches) -> torch.Tensor | None:
        """Logits [S, V] of inputs.sampling_tokens; writes the batch's KV to kv_caches.

        None where no token's logits are wanted (S = 0).
        """
        tokens = inputs.sampling_tokens
        hidden = self.hidden_states(inputs, kv_caches)
        if tokens is not None and tokens.shape[0] == 0:
            return None
        return self.logits(hidden, tokens)

    def hidden_states(self, inputs: ModelInput, kv_caches: KVCaches) -> HiddenStates:
        """Of all T tokens; writes the batch's KV to kv_caches."""
        ops, eps = self._ops, self.config.rms_norm_eps
        num_tokens, head_dim = inputs.input_ids.shape[0], self.config.head_dim
        residual = ops.embedding(inputs.input_ids, self._embedding)
        # [T, H]; each block's product is added to the residual together with the next norm.
        x = ops.rms_norm(residual, self._layers[0].input_norm, eps)
        for i, layer in enumerate(self._layers):
            if i:
                x = ops.add_rms_norm(x, residual, layer.input_norm, eps)
            qkv = ops.linear(x, layer.qkv).view(num_tokens, -1, head_dim)
            q, k, v = qkv.split_with_sizes(self._heads, dim=1)
            k_cache, v_cache = kv_caches[i]
            ops.rope_and_cache(
                q, k, v, inputs.positions, self._cos_sin, k_cache, v_cache, inputs.slot_mapping
            )
            attended = ops.attention(q, k_cache, v_cache, inputs.attention, self._scale)
            x = ops.linear(attended.view(num_tokens, -1), layer.attention_out)
            x = ops.add_rms_norm(x, residual, layer.post_attention_norm, eps)
            x = ops.linear(ops.silu_mul(ops.linear(x, layer.gate_up)), layer.down)
        return HiddenStates(x, residual)

    def logits(self, hidden: HiddenStates, tokens: torch.Tensor | None) -> torch.Tensor:
        """[S, V] of tokens [S] int64, which leaves hidden as it is; None means all
        tokens and uses hidden up."""
        ops, eps = self._ops, self.config.rms_norm_eps
        x, residual = hidden if tokens is None else (hidden.x[tokens], hidden.residual[tokens])
        return ops.linear(ops.add_rms_norm(x, residual, self._norm, eps), self._head)


def _read_layer(weights: Weights, index: int) -> DecoderLayer:
    prefix = f"model.layers.{index}"
    attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
    return DecoderLayer(
        input_norm=weights.tensor(f"{prefix}.input_layernorm.weight"),
        qkv=weights.linear(f"{attention}.q_proj", f"{attention}.k_proj", f"{attention}.v_proj"),
        attention_out=weights.linear(f"{attention}.o_proj"),
        post_attention_norm=weights.tensor(f"{prefix}.post_attention_layernorm.weight"),
        gate_up=weights.linear(f"{mlp}.gate_proj", f"{mlp}.up_proj"),
        down=weights.linear(f"{mlp}.down_proj"),
    )
