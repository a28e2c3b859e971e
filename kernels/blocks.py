"""Residual blocks composed of single ops, for backends that have no faster way."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernels.ops import AttentionBlock, BlockStack

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from kernels.ops import Block, BlockBatch, MlpBlock, Ops


def run_blocks(
    ops: Ops,
    stack: BlockStack,
    residual: torch.Tensor,
    batch: BlockBatch,
    kv_caches: Sequence[tuple[torch.Tensor, torch.Tensor]],
) -> None:
    """As Ops.run_blocks."""
    caches = iter(kv_caches)
    branch: torch.Tensor | None = None
    for block in stack.blocks:
        # A block's branch is added together with the next norm.
        if branch is None:
            x = ops.rms_norm(residual, block.norm, block.eps)
        else:
            x = ops.add_rms_norm(branch, residual, block.norm, block.eps)
        if isinstance(block, AttentionBlock):
            branch = _attend(ops, block, x, batch, *next(caches))
        else:
            branch = _mlp(ops, block, x)
    if branch is not None:
        residual += branch


def _attend(
    ops: Ops,
    block: AttentionBlock,
    x: torch.Tensor,
    batch: BlockBatch,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
) -> torch.Tensor:
    heads = (block.num_heads, block.num_kv_heads, block.num_kv_heads)
    qkv = ops.linear(x, block.qkv).view(x.shape[0], -1, block.head_dim)
    q, k, v = qkv.split_with_sizes(heads, dim=1)
    ops.rope_and_cache(
        q, k, v, batch.positions, block.cos_sin, k_cache, v_cache, batch.slot_mapping
    )
    attended = ops.attention(q, k_cache, v_cache, batch.attention, block.scale)
    return ops.linear(attended.view(x.shape[0], -1), block.out)


def _mlp(ops: Ops, block: MlpBlock, x: torch.Tensor) -> torch.Tensor:
    return ops.linear(ops.silu_mul(ops.linear(x, block.gate_up)), block.down)


class ComposedBlocks:
    """The two methods for a backend whose blocks are composed."""

    def prepare_blocks(self, blocks: Sequence[Block]) -> BlockStack:
        return BlockStack(blocks)

    def run_blocks(
        self: Ops,
        stack: BlockStack,
        residual: torch.Tensor,
        batch: BlockBatch,
        kv_caches: Sequence[tuple[torch.Tensor, torch.Tensor]],
    ) -> None:
        run_blocks(self, stack, residual, batch, kv_caches)
