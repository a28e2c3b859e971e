"""Residual blocks composed of single ops, for backends that have no faster way."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kernels.ops import AttentionBlock, BlockStack, MlpBlock

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kernels.lora import LoraBatch, LoraSlots
    from kernels.ops import (
        Activation,
        Block,
        BlockBatch,
        KVCache,
        LinearWeight,
        MoeBlock,
        Ops,
    )


def run_blocks(
    ops: Ops,
    stack: BlockStack,
    residual: torch.Tensor,
    batch: BlockBatch,
    kv_caches: Sequence[KVCache],
) -> None:
    """As Ops.run_blocks."""
    caches = iter(kv_caches)
    branch: torch.Tensor | None = None
    for block in stack.blocks:
        # A block's branch is added together with the next norm.
        if block.norm is None:
            if branch is not None:
                residual += branch
            x = residual
        elif branch is None:
            x = ops.rms_norm(residual, block.norm, block.eps)
        else:
            x = ops.add_rms_norm(branch, residual, block.norm, block.eps)
        if isinstance(block, AttentionBlock):
            branch = _attend(ops, block, x, batch, next(caches))
        elif isinstance(block, MlpBlock):
            branch = _mlp(ops, block, x, batch.lora)
        else:
            branch = mix_experts(ops, block, x)
    if branch is not None:
        residual += branch


def route(
    logits: torch.Tensor, top_k: int, *, renormalizes: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Router logits [T, E] -> expert_ids [T, K] int64, expert_scales [T, K] float32, of the
    top_k greatest probabilities of a float32 softmax over all experts."""
    scales, ids = logits.float().softmax(dim=-1).topk(top_k, dim=-1)
    return ids, scales / scales.sum(dim=-1, keepdim=True) if renormalizes else scales


def activation_mul(ops: Ops, gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
    """gate_up [T, 2I] -> [T, I]."""
    return ops.silu_mul(gate_up) if activation == "silu" else ops.gelu_tanh_mul(gate_up)


def _attend(
    ops: Ops,
    block: AttentionBlock,
    x: torch.Tensor,
    batch: BlockBatch,
    cache: KVCache,
) -> torch.Tensor:
    tokens, eps = x.shape[0], block.eps
    heads = (block.num_heads, block.num_kv_heads, block.num_kv_heads)
    lora = batch.lora
    qkv = _product(ops, x, block.qkv, block.qkv_lora, lora).view(tokens, -1, block.head_dim)
    q, k, v = qkv.split_with_sizes(heads, dim=1)
    q_norm, k_norm = block.q_norm, block.k_norm
    if q_norm is not None and k_norm is not None and q_norm.shape[0] != block.head_dim:
        q = ops.rms_norm(q.flatten(1), q_norm, eps).view(q.shape)
        k = ops.rms_norm(k.flatten(1), k_norm, eps).view(k.shape)
        q_norm = k_norm = None
    slots = (cache.k, cache.v, batch.slot_mapping)
    norms = (q_norm, k_norm, eps)
    scales = (cache.k_scale, cache.v_scale)
    ops.rope_and_cache(q, k, v, batch.positions, block.cos_sin, *slots, *norms, *scales)
    limits = (block.window, block.soft_cap)
    attended = ops.attention(q, cache.k, cache.v, batch.attention, block.scale, *limits, *scales)
    branch = _product(ops, attended.view(tokens, -1), block.out, block.out_lora, lora)
    return _post_norm(ops, block, branch)


def _mlp(ops: Ops, block: MlpBlock, x: torch.Tensor, lora: LoraBatch | None) -> torch.Tensor:
    gate_up = _product(ops, x, block.gate_up, block.gate_up_lora, lora)
    inner = activation_mul(ops, gate_up, block.activation)
    return _post_norm(ops, block, _product(ops, inner, block.down, block.down_lora, lora))


def _product(
    ops: Ops,
    x: torch.Tensor,
    weight: LinearWeight,
    slots: LoraSlots | None,
    lora: LoraBatch | None,
) -> torch.Tensor:
    y = ops.linear(x, weight)
    if lora is not None and slots is not None:
        ops.add_lora(y, x, slots, lora)
    return y


def mix_experts(ops: Ops, block: MoeBlock, x: torch.Tensor) -> torch.Tensor:
    ids, scales = route(ops.linear(x, block.router), block.top_k, renormalizes=block.renormalizes)
    return ops.experts(x, block.experts, ids, scales, block.activation)


def _post_norm(ops: Ops, block: AttentionBlock | MlpBlock, branch: torch.Tensor) -> torch.Tensor:
    return branch if block.post_norm is None else ops.rms_norm(branch, block.post_norm, block.eps)


def copy_rows(paged: Sequence[torch.Tensor | None], src: torch.Tensor, dst: torch.Tensor) -> None:
    """Rows dst [C] of each tensor become copies of its rows src, as Ops.copy_blocks does it."""
    for rows in paged:
        if rows is None:
            continue
        if rows.dtype == torch.float8_e4m3fn:
            # torch indexes no float8 on some devices; what is copied is bytes.
            rows = rows.view(torch.uint8)
        rows.index_copy_(0, dst, rows.index_select(0, src))


class ComposedBlocks:
    """The two methods for a backend whose blocks are composed."""

    def prepare_blocks(self, blocks: Sequence[Block]) -> BlockStack:
        return BlockStack(blocks)

    def run_blocks(
        self: Ops,
        stack: BlockStack,
        residual: torch.Tensor,
        batch: BlockBatch,
        kv_caches: Sequence[KVCache],
    ) -> None:
        run_blocks(self, stack, residual, batch, kv_caches)
