"""The pre-norm decoder that Llama and its relatives share.

Llama: arXiv:2302.13971, arXiv:2307.09288. Grouped-query attention:
arXiv:2305.13245. SwiGLU: arXiv:2002.05202. RMSNorm: arXiv:1910.07467.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from engine_core.model.rope import cos_sin_table
from kernels.ops import AttentionBlock, BlockBatch, MlpBlock

if TYPE_CHECKING:
    import torch

    from engine_core.model.config import ModelConfig
    from engine_core.model.inputs import KVCaches, ModelInput
    from engine_core.model.weights import Weights
    from kernels.ops import Ops


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
        cos_sin = cos_sin_table(config.rope, config.head_dim, max_model_len).to(device)
        self._embedding = weights.embedding("model.embed_tokens.weight")
        self._blocks = ops.prepare_blocks(
            [
                block
                for layer in range(config.num_layers)
                for block in _read_layer(weights, config, layer, cos_sin)
            ]
        )
        self._norm = weights.tensor("model.norm.weight")
        self._head = (
            weights.tied_head(self._embedding)
            if config.tie_embeddings
            else weights.linear("lm_head")
        )
        self.quantized_formats = frozenset(weights.quantized_formats)
        """Of the matrices kept quantized, as kernels.quantized.FORMATS names them."""

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

    def hidden_states(self, inputs: ModelInput, kv_caches: KVCaches) -> torch.Tensor:
        """[T, H] after the last layer, before the last norm; writes the batch's KV to kv_caches."""
        residual = self._embedding.rows(inputs.input_ids)
        batch = BlockBatch(inputs.positions, inputs.slot_mapping, inputs.attention)
        self._ops.run_blocks(self._blocks, residual, batch, kv_caches)
        return residual

    def logits(self, hidden: torch.Tensor, tokens: torch.Tensor | None) -> torch.Tensor:
        """[S, V] of tokens [S] int64; None means all tokens."""
        x = hidden if tokens is None else hidden[tokens]
        return self._ops.linear(
            self._ops.rms_norm(x, self._norm, self.config.rms_norm_eps), self._head
        )


def _read_layer(
    weights: Weights, config: ModelConfig, index: int, cos_sin: torch.Tensor
) -> tuple[AttentionBlock, MlpBlock]:
    prefix = f"model.layers.{index}"
    attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
    return (
        AttentionBlock(
            norm=weights.tensor(f"{prefix}.input_layernorm.weight"),
            eps=config.rms_norm_eps,
            qkv=weights.linear(f"{attention}.q_proj", f"{attention}.k_proj", f"{attention}.v_proj"),
            out=weights.linear(f"{attention}.o_proj"),
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            cos_sin=cos_sin,
            scale=config.head_dim**-0.5,
        ),
        MlpBlock(
            norm=weights.tensor(f"{prefix}.post_attention_layernorm.weight"),
            eps=config.rms_norm_eps,
            gate_up=weights.linear(f"{mlp}.gate_proj", f"{mlp}.up_proj"),
            down=weights.linear(f"{mlp}.down_proj"),
        ),
    )
