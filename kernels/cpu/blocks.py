"""A model's residual blocks as the C++ reads them: one call runs them all (csrc/blocks.cpp)."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import torch

from kernels import shapes
from kernels.cpu.library import ATTENTION_BLOCK, DTYPES, MLP_BLOCK, NativeBatch, NativeBlock
from kernels.ops import AttentionBlock, BlockStack

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kernels.cpu.library import Library
    from kernels.ops import Block, BlockBatch, MlpBlock

    Caches = Sequence[tuple[torch.Tensor, torch.Tensor]]


class CpuBlocks(BlockStack):
    """The blocks, and the array of structs that points into their tensors."""

    def __init__(self, blocks: Sequence[Block]) -> None:
        super().__init__(blocks)
        self._native = (NativeBlock * len(self.blocks))(*map(_native_block, self.blocks))
        self._hidden = self.blocks[0].norm.shape[0]
        self._caches: Caches | None = None
        """Those that the structs point into; a model has one cache for life."""

    def run(
        self, lib: Library, residual: torch.Tensor, batch: BlockBatch, kv_caches: Caches
    ) -> None:
        attention = batch.attention
        starts, seq_lens = attention.query_start_loc_host, attention.seq_lens_host
        table = attention.block_table
        shapes.RUN_BLOCKS.check(
            residual, batch.positions, batch.slot_mapping, starts, seq_lens, table
        )
        assert residual.is_contiguous() and residual.shape[1] == self._hidden
        if kv_caches is not self._caches:
            self._point_into(residual, kv_caches)
        native = NativeBatch(
            residual.shape[0],
            seq_lens.shape[0],
            table.stride(0),
            table.shape[1],
            batch.positions.data_ptr(),
            batch.slot_mapping.data_ptr(),
            starts.data_ptr(),
            seq_lens.data_ptr(),
            table.data_ptr(),
        )
        stray = lib.run_blocks(
            DTYPES[residual.dtype],
            self._native,
            len(self.blocks),
            ctypes.byref(native),
            residual.data_ptr(),
            self._hidden,
            torch.get_num_threads(),
        )
        if stray >= 0:
            raise IndexError(self._describe(stray, batch))

    def _point_into(self, residual: torch.Tensor, kv_caches: Caches) -> None:
        caches = iter(kv_caches)
        for block, native in zip(self.blocks, self._native, strict=True):
            assert block.norm.dtype == residual.dtype and block.norm.shape == (self._hidden,)
            if not isinstance(block, AttentionBlock):
                continue
            k_cache, v_cache = next(caches)
            shapes.BLOCK_CACHE.check(residual, k_cache, v_cache)
            num_blocks, block_size, kv_heads, head_dim = k_cache.shape
            assert (kv_heads, head_dim) == (block.num_kv_heads, block.head_dim)
            native.k_cache, native.v_cache = k_cache.data_ptr(), v_cache.data_ptr()
            native.num_blocks, native.block_size = num_blocks, block_size
            native.k_block, native.k_slot, native.k_head = k_cache.stride()[:3]
            native.v_block, native.v_slot, native.v_head = v_cache.stride()[:3]
        self._caches = kv_caches

    def _describe(self, stray: int, batch: BlockBatch) -> str:
        tokens = batch.positions.shape[0]
        native = next(n for n in self._native if n.kind == ATTENTION_BLOCK)
        if stray < tokens:
            return (
                f"run_blocks: token {stray} has position {int(batch.positions[stray])} of "
                f"{native.max_positions} and slot {int(batch.slot_mapping[stray])} of "
                f"{native.num_blocks * native.block_size}"
            )
        sequence, attention = stray - tokens, batch.attention
        bounds = attention.query_start_loc_host[sequence : sequence + 2].tolist()
        return (
            f"run_blocks: sequence {sequence} of length {int(attention.seq_lens_host[sequence])}, "
            f"with query tokens {bounds} of {tokens}, has a block outside "
            f"[0, {native.num_blocks}) or bounds that contradict each other"
        )


def _native_block(block: Block) -> NativeBlock:
    if isinstance(block, AttentionBlock):
        return _native_attention(block)
    return _native_mlp(block)


def _native_attention(block: AttentionBlock) -> NativeBlock:
    cos_sin = block.cos_sin
    heads, dim = block.num_heads, block.head_dim
    assert cos_sin.is_contiguous() and cos_sin.dtype == torch.float32
    assert cos_sin.shape[1] % 2 == 0 and cos_sin.shape[1] <= dim
    assert heads % block.num_kv_heads == 0, (heads, block.num_kv_heads)
    assert block.qkv.out_features == (heads + 2 * block.num_kv_heads) * dim
    assert block.out.in_features == heads * dim
    native = _common(ATTENTION_BLOCK, block)
    native.cos_sin = cos_sin.data_ptr()
    native.heads, native.kv_heads, native.head_dim = heads, block.num_kv_heads, dim
    native.max_positions, native.rotary_dim = cos_sin.shape
    native.scale = block.scale
    return native


def _native_mlp(block: MlpBlock) -> NativeBlock:
    assert block.gate_up.out_features == 2 * block.down.in_features
    return _common(MLP_BLOCK, block)


def _common(kind: int, block: Block) -> NativeBlock:
    into, out_of = (
        (block.qkv, block.out) if isinstance(block, AttentionBlock) else (block.gate_up, block.down)
    )
    assert block.norm.is_contiguous()
    assert into.in_features == out_of.out_features == block.norm.shape[0]
    native = NativeBlock(kind=kind, norm=block.norm.data_ptr(), eps=block.eps)
    native.into, native.out_of = into.native, out_of.native  # type: ignore[attr-defined]
    return native
