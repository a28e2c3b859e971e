"""The decoder that all architectures are variants of.

Llama: arXiv:2302.13971, arXiv:2307.09288. Grouped-query attention:
arXiv:2305.13245. SwiGLU: arXiv:2002.05202. RMSNorm: arXiv:1910.07467.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch

from engine_core.model.config import LayerConfig
from engine_core.model.layers import layer_shapes, read_layer
from engine_core.model.layout import GgufDialect, Layout
from engine_core.model.lora import SlotMaker
from engine_core.model.rope import cos_sin_table
from engine_core.model.rope_fields import read_rope
from kernels.ops import BlockBatch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine_core.model.config import ModelConfig, RopeConfig
    from engine_core.model.embedding import Embedding
    from engine_core.model.fields import Fields
    from engine_core.model.inputs import KVCaches, ModelInput
    from engine_core.model.lora import AdaptedProduct, LoraShape
    from engine_core.model.weights import Weights
    from kernels.ops import LinearWeight, Ops

_EMBEDDING = "model.embed_tokens.weight"


class DecoderModel:
    """Holds the weights; the KV cache and the batch come with each call.

    A subclass is an architecture: its class variables and the two read_ methods say what
    differs from Llama.
    """

    hf_defaults: ClassVar[dict[str, object]] = {}
    """What config.json means by an absent key."""
    hf_text_key: ClassVar[str | None] = None
    """Where config.json has this model, in a checkpoint of more than text."""
    hf_prefix: ClassVar[str] = ""
    """Of this model's tensors, likewise."""
    layout: ClassVar[Layout] = Layout()
    gguf: ClassVar[GgufDialect | None] = None
    rounds_embedding_scale: ClassVar[bool] = False
    """Whether the model was trained with embedding_scale in the dtype of the weights."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        ops: Ops,
        device: torch.device,
        max_model_len: int,
        lora: LoraShape | None = None,
    ) -> None:
        """lora: what adapters get room for; None gives them none."""
        self.config = config
        self.device = device
        slots = (
            None
            if lora is None
            else SlotMaker(lora, self.layout, config, ops, weights.dtype, device)
        )
        self._ops = ops
        tables: dict[RopeConfig | None, torch.Tensor | None] = {None: None}
        for rope in dict.fromkeys(layer.rope for layer in config.layers):
            if rope is not None:
                tables[rope] = cos_sin_table(rope, config.head_dim, max_model_len).to(device)
        self._embedding: Embedding
        self._head: LinearWeight
        if config.tie_embeddings:
            tied = weights.tied_embedding(_EMBEDDING)
            self._embedding, self._head = tied, tied.table
        else:
            self._embedding = weights.embedding(_EMBEDDING)
            self._head = weights.linear("lm_head")
        self._blocks = ops.prepare_blocks(
            [
                block if slots is None else slots.adapt(block, index)
                for index, layer in enumerate(config.layers)
                for block in read_layer(self.layout, weights, config, index, tables[layer.rope])
            ]
        )
        self.adapted: Sequence[AdaptedProduct] = () if slots is None else slots.made
        """The products that have slots for adapters, and these."""
        self._norm = weights.norm("model.norm.weight", config.norm_offset)
        self._embedding_scale = config.embedding_scale
        if self.rounds_embedding_scale:
            self._embedding_scale = torch.tensor(config.embedding_scale, dtype=weights.dtype).item()
        self.quantized_formats = frozenset(weights.quantized_formats)
        """Of the matrices kept quantized, as kernels.quantized.FORMATS names them."""

    @classmethod
    def read_layers(cls, fields: Fields, head_dim: int) -> tuple[LayerConfig, ...]:
        """From the keys of config.json, or of a GGUF under the same names. Raises
        ModelLoadError naming the file and the key at fault."""
        return (LayerConfig(read_rope(fields, head_dim)),) * fields.integer("num_hidden_layers")

    @classmethod
    def read_differences(cls, fields: Fields, head_dim: int) -> dict[str, Any]:
        """Fields of ModelConfig that are not what Llama has. Raises like read_layers."""
        return {}

    @classmethod
    def tensor_shapes(cls, config: ModelConfig) -> dict[str, tuple[int, ...]]:
        """Every tensor the constructor reads, in Hugging Face names."""
        shapes: dict[str, tuple[int, ...]] = {
            _EMBEDDING: (config.vocab_size, config.hidden_size),
            "model.norm.weight": (config.hidden_size,),
        }
        for index in range(config.num_layers):
            shapes |= layer_shapes(cls.layout, config, index)
        if not config.tie_embeddings:
            shapes["lm_head.weight"] = (config.vocab_size, config.hidden_size)
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
        if self._embedding_scale != 1:
            residual *= self._embedding_scale
        batch = BlockBatch(inputs.positions, inputs.slot_mapping, inputs.attention, inputs.lora)
        self._ops.run_blocks(self._blocks, residual, batch, kv_caches)
        return residual

    def logits(self, hidden: torch.Tensor, tokens: torch.Tensor | None) -> torch.Tensor:
        """[S, V] of tokens [S] int64; None means all tokens."""
        x = hidden if tokens is None else hidden[tokens]
        normed = self._ops.rms_norm(x, self._norm, self.config.rms_norm_eps)
        logits = self._ops.linear(normed, self._head)
        if self.config.logit_scale != 1:
            logits *= self.config.logit_scale
        cap = self.config.logit_soft_cap
        return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)
