"""A decoder layer's tensors, and the blocks that they become."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernels.ops import AttentionBlock, MlpBlock, MoeBlock

if TYPE_CHECKING:
    import torch

    from engine_core.model.config import ExpertsConfig, ModelConfig
    from engine_core.model.layout import ExpertNames, Layout
    from engine_core.model.weights import Weights
    from kernels.ops import Block

Shapes = dict[str, tuple[int, ...]]


def layer_shapes(layout: Layout, config: ModelConfig, index: int) -> Shapes:
    """Every tensor that read_layer reads, with its shape."""
    shapes: Shapes = {}
    prefix, hidden = f"model.layers.{index}", config.hidden_size
    norms = (layout.attention_norm, layout.attention_post_norm)
    for norm in (*norms, layout.mlp_norm, layout.mlp_post_norm):
        if norm is not None:
            shapes[f"{prefix}.{norm}.weight"] = (hidden,)
    q_rows, kv_rows = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    attention = f"{prefix}.self_attn"
    if layout.qk_norm is not None:
        is_row = layout.qk_norm == "row"
        shapes[f"{attention}.q_norm.weight"] = (q_rows if is_row else config.head_dim,)
        shapes[f"{attention}.k_norm.weight"] = (kv_rows if is_row else config.head_dim,)
    _add_fused(
        shapes, attention, layout.qkv, (q_rows, kv_rows, kv_rows), hidden, bias=config.qkv_bias
    )
    _add(shapes, f"{attention}.o_proj", (hidden, q_rows), bias=config.output_bias)
    experts = config.layers[index].experts
    if experts is None:
        inter, mlp = config.intermediate_size, f"{prefix}.mlp"
        _add_fused(shapes, mlp, layout.gate_up, (inter, inter), hidden, bias=config.mlp_bias)
        _add(shapes, f"{mlp}.down_proj", (hidden, inter), bias=config.mlp_bias)
        return shapes
    assert layout.experts is not None, config.architecture
    names = expert_tensors(layout.experts, prefix, experts.num_experts)
    _add(shapes, f"{prefix}.{layout.experts.router}", (experts.num_experts, hidden), bias=False)
    inner = experts.intermediate_size
    for part, shape in zip(names, ((inner, hidden), (inner, hidden), (hidden, inner)), strict=True):
        shapes |= dict.fromkeys(part, shape)
    return shapes


def _add(shapes: Shapes, name: str, shape: tuple[int, int], *, bias: bool) -> None:
    shapes[f"{name}.weight"] = shape
    if bias:
        shapes[f"{name}.bias"] = shape[:1]


def _add_fused(
    shapes: Shapes,
    prefix: str,
    names: tuple[str, ...],
    rows: tuple[int, ...],
    columns: int,
    *,
    bias: bool,
) -> None:
    stored = rows if len(names) == len(rows) else (sum(rows),)
    for name, count in zip(names, stored, strict=True):
        _add(shapes, f"{prefix}.{name}", (count, columns), bias=bias)


def expert_tensors(
    names: ExpertNames, prefix: str, num_experts: int
) -> tuple[list[str], list[str], list[str]]:
    """The weights of all experts: gates, ups, downs."""

    def all_of(name: str) -> list[str]:
        return [f"{prefix}.{name.format(number)}.weight" for number in range(num_experts)]

    return all_of(names.gate), all_of(names.up), all_of(names.down)


def read_layer(
    layout: Layout,
    weights: Weights,
    config: ModelConfig,
    index: int,
    cos_sin: torch.Tensor | None,
) -> tuple[Block, Block]:
    """cos_sin is of the layer's RoPE, None where it has none."""
    prefix = f"model.layers.{index}"
    attention = f"{prefix}.self_attn"

    def norm(name: str | None) -> torch.Tensor | None:
        return None if name is None else weights.norm(f"{name}.weight", config.norm_offset)

    def layer_norm(name: str | None) -> torch.Tensor | None:
        return None if name is None else norm(f"{prefix}.{name}")

    has_qk_norm = layout.qk_norm is not None
    scale = config.attention_scale
    attend = AttentionBlock(
        norm=layer_norm(layout.attention_norm),
        eps=config.rms_norm_eps,
        qkv=weights.linear(*(f"{attention}.{name}" for name in layout.qkv), bias=config.qkv_bias),
        out=weights.linear(f"{attention}.o_proj", bias=config.output_bias),
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        cos_sin=cos_sin,
        scale=config.head_dim**-0.5 if scale is None else scale,
        window=config.layers[index].window,
        soft_cap=config.attention_soft_cap,
        q_norm=norm(f"{attention}.q_norm" if has_qk_norm else None),
        k_norm=norm(f"{attention}.k_norm" if has_qk_norm else None),
        post_norm=layer_norm(layout.attention_post_norm),
    )
    experts, mlp_norm = config.layers[index].experts, layer_norm(layout.mlp_norm)
    if experts is not None:
        assert layout.experts is not None, config.architecture
        assert mlp_norm is not None, config.architecture
        return attend, _read_experts(layout.experts, weights, config, prefix, experts, mlp_norm)
    mlp = f"{prefix}.mlp"
    return attend, MlpBlock(
        norm=mlp_norm,
        eps=config.rms_norm_eps,
        gate_up=weights.linear(*(f"{mlp}.{name}" for name in layout.gate_up), bias=config.mlp_bias),
        down=weights.linear(f"{mlp}.down_proj", bias=config.mlp_bias),
        activation=config.activation,
        post_norm=layer_norm(layout.mlp_post_norm),
    )


def _read_experts(
    names: ExpertNames,
    weights: Weights,
    config: ModelConfig,
    prefix: str,
    experts: ExpertsConfig,
    norm: torch.Tensor,
) -> MoeBlock:
    return MoeBlock(
        norm=norm,
        eps=config.rms_norm_eps,
        router=weights.float_linear(f"{prefix}.{names.router}"),
        experts=weights.experts(*expert_tensors(names, prefix, experts.num_experts)),
        top_k=experts.top_k,
        renormalizes=experts.renormalizes,
        activation=config.activation,
    )
