"""The products of a model's layers that adapters may be of, and the slots that they have."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from kernels.ops import AttentionBlock, MoeBlock

if TYPE_CHECKING:
    import torch

    from engine_core.model.config import ModelConfig
    from engine_core.model.layout import Layout
    from kernels.lora import LoraSlots
    from kernels.ops import Block, Ops


@dataclass(frozen=True, slots=True)
class LoraShape:
    """What adapters are given room for."""

    num_slots: int
    max_rank: int


class Product(NamedTuple):
    """A product by the matrices that it is fused of, one below the other."""

    modules: tuple[str, ...]
    """model.layers.0.self_attn.q_proj"""
    in_features: int
    rows: tuple[int, ...]
    """Of each of the modules."""


class AdaptedProduct(NamedTuple):
    product: Product
    slots: LoraSlots


def attention_products(layout: Layout, config: ModelConfig, index: int) -> tuple[Product, Product]:
    """qkv and out of a layer."""
    prefix, hidden = f"model.layers.{index}.self_attn", config.hidden_size
    q_rows, kv_rows = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    qkv = _fused(prefix, layout.qkv, hidden, (q_rows, kv_rows, kv_rows))
    return qkv, Product((f"{prefix}.o_proj",), q_rows, (hidden,))


def mlp_products(layout: Layout, config: ModelConfig, index: int) -> tuple[Product, Product]:
    """gate_up and down of a layer without experts."""
    prefix, inter = f"model.layers.{index}.mlp", config.intermediate_size
    gate_up = _fused(prefix, layout.gate_up, config.hidden_size, (inter, inter))
    return gate_up, Product((f"{prefix}.down_proj",), inter, (config.hidden_size,))


def _fused(prefix: str, names: tuple[str, ...], in_features: int, rows: tuple[int, ...]) -> Product:
    stored = rows if len(names) == len(rows) else (sum(rows),)
    return Product(tuple(f"{prefix}.{name}" for name in names), in_features, stored)


def all_products(layout: Layout, config: ModelConfig) -> list[Product]:
    products: list[Product] = []
    for index, layer in enumerate(config.layers):
        products += attention_products(layout, config, index)
        if layer.experts is None:
            products += mlp_products(layout, config, index)
    return products


class SlotMaker:
    """Gives blocks their slots, and remembers whose they are."""

    def __init__(
        self,
        shape: LoraShape,
        layout: Layout,
        config: ModelConfig,
        ops: Ops,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.made: list[AdaptedProduct] = []
        self._shape = shape
        self._layout = layout
        self._config = config
        self._ops = ops
        self._dtype = dtype
        self._device = device

    def adapt(self, block: Block, index: int) -> Block:
        """A block of layer `index`, with room for adapters; experts have none."""
        if isinstance(block, AttentionBlock):
            qkv, out = attention_products(self._layout, self._config, index)
            return replace(block, qkv_lora=self._make(qkv), out_lora=self._make(out))
        if isinstance(block, MoeBlock):
            return block
        gate_up, down = mlp_products(self._layout, self._config, index)
        return replace(block, gate_up_lora=self._make(gate_up), down_lora=self._make(down))

    def _make(self, product: Product) -> LoraSlots:
        shape = self._shape
        slots = self._ops.lora_slots(
            shape.num_slots,
            shape.max_rank,
            product.in_features,
            product.rows,
            self._dtype,
            self._device,
        )
        self.made.append(AdaptedProduct(product, slots))
        return slots
