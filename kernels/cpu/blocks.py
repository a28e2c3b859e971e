"""A model's residual blocks as the C++ reads them: one call runs them all (csrc/blocks.cpp)."""

from __future__ import annotations

import ctypes
import itertools
from typing import TYPE_CHECKING

import torch

from kernels import shapes
from kernels.blocks import mix_experts
from kernels.cpu.library import (
    ACTIVATIONS,
    ATTENTION_BLOCK,
    DTYPES,
    MLP_BLOCK,
    NativeBatch,
    NativeBlock,
    attention_limits,
    cache_codes,
    pointer,
    table_sizes,
)
from kernels.ops import AttentionBlock, BlockStack, MoeBlock

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kernels.cpu.library import Library
    from kernels.ops import Block, BlockBatch, KVCache, LinearWeight, MlpBlock, Ops

    Caches = Sequence[KVCache]


class CpuBlocks(BlockStack):
    """The blocks, and arrays of structs that point into their tensors: one array for each
    run of blocks between those with experts, which are composed of single ops."""

    def __init__(self, blocks: Sequence[Block]) -> None:
        super().__init__(blocks)
        self._parts: list[_NativeRun | MoeBlock] = []
        native: list[AttentionBlock | MlpBlock] = []
        for block in self.blocks:
            if not isinstance(block, MoeBlock):
                native.append(block)
                continue
            if native:
                self._parts.append(_NativeRun(native))
                native = []
            self._parts.append(block)
        if native:
            self._parts.append(_NativeRun(native))

    def run(
        self, ops: Ops, lib: Library, residual: torch.Tensor, batch: BlockBatch, kv_caches: Caches
    ) -> None:
        attention = batch.attention
        shapes.RUN_BLOCKS.check(
            residual,
            batch.positions,
            batch.slot_mapping,
            attention.query_start_loc_host,
            attention.seq_lens_host,
            attention.block_table,
        )
        assert residual.is_contiguous()
        first_cache = 0
        for part in self._parts:
            if isinstance(part, _NativeRun):
                part.run(lib, residual, batch, kv_caches, first_cache)
                first_cache += part.num_caches
            else:
                x = ops.rms_norm(residual, part.norm, part.eps)
                residual += mix_experts(ops, part, x)


class _NativeRun:
    """Attention and MLP blocks that one call runs."""

    def __init__(self, blocks: Sequence[AttentionBlock | MlpBlock]) -> None:
        self._blocks = tuple(blocks)
        self._native = (NativeBlock * len(blocks))(*map(_native_block, blocks))
        into = blocks[0].qkv if isinstance(blocks[0], AttentionBlock) else blocks[0].gate_up
        self._hidden = into.in_features
        self.num_caches = sum(isinstance(block, AttentionBlock) for block in blocks)
        self._caches: Caches | None = None
        """Those that the structs point into; a model has one cache for life."""

    def run(
        self,
        lib: Library,
        residual: torch.Tensor,
        batch: BlockBatch,
        kv_caches: Caches,
        first_cache: int,
    ) -> None:
        """This run's caches are those from first_cache on."""
        assert residual.shape[1] == self._hidden
        if kv_caches is not self._caches:
            self._point_into(residual, kv_caches, first_cache)
        starts, seq_lens = batch.attention.query_start_loc_host, batch.attention.seq_lens_host
        table = batch.attention.block_table
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
            len(self._blocks),
            ctypes.byref(native),
            residual.data_ptr(),
            self._hidden,
            torch.get_num_threads(),
        )
        if stray >= 0:
            raise IndexError(self._describe(stray, batch))

    def _point_into(self, residual: torch.Tensor, kv_caches: Caches, first_cache: int) -> None:
        caches = itertools.islice(kv_caches, first_cache, None)
        geometry: tuple[int, ...] | None = None
        for block, native in zip(self._blocks, self._native, strict=True):
            for weight in (block.norm, block.post_norm):
                assert weight is None or weight.dtype == residual.dtype
            if not isinstance(block, AttentionBlock):
                continue
            for weight in (block.q_norm, block.k_norm):
                assert weight is None or weight.dtype == residual.dtype
            k_cache, v_cache, *scales = next(caches)
            arguments, of_codes = (residual, k_cache, v_cache), (scales[0], scales[1])
            shapes.BLOCK_CACHE.check(k_cache, arguments, of_codes, may_be_narrow=True)
            num_blocks, block_size, kv_heads, head_dim = k_cache.shape
            assert (kv_heads, head_dim) == (block.num_kv_heads, block.head_dim)
            assert geometry in (None, (num_blocks, block_size)), (geometry, k_cache.shape)
            geometry = (num_blocks, block_size)
            native.k_cache, native.v_cache = k_cache.data_ptr(), v_cache.data_ptr()
            native.codes = cache_codes(k_cache, residual.dtype, *scales)
            native.num_blocks, native.block_size = num_blocks, block_size
            native.k_block, native.k_slot, native.k_head = k_cache.stride()[:3]
            native.v_block, native.v_slot, native.v_head = v_cache.stride()[:3]
        self._caches = kv_caches

    def _describe(self, stray: int, batch: BlockBatch) -> str:
        tokens = batch.positions.shape[0]
        natives = [native for native in self._native if native.kind == ATTENTION_BLOCK]
        native = min(natives, key=lambda native: native.max_positions)
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


def _native_block(block: AttentionBlock | MlpBlock) -> NativeBlock:
    if isinstance(block, AttentionBlock):
        return _native_attention(block)
    return _native_mlp(block)


def _native_attention(block: AttentionBlock) -> NativeBlock:
    heads, kv_heads, dim = block.num_heads, block.num_kv_heads, block.head_dim
    assert heads % kv_heads == 0, (heads, kv_heads)
    assert block.qkv.out_features == (heads + 2 * kv_heads) * dim
    assert block.out.in_features == heads * dim
    native = _common(ATTENTION_BLOCK, block, block.qkv, block.out)
    native.cos_sin = pointer(block.cos_sin)
    native.heads, native.kv_heads, native.head_dim = heads, kv_heads, dim
    native.max_positions, native.rotary_dim = table_sizes(block.cos_sin, dim)
    limits = attention_limits(block.window, block.soft_cap, block.scale)
    native.window, native.scale, native.soft_cap = limits
    q_norm, k_norm = block.q_norm, block.k_norm
    if q_norm is None or k_norm is None:
        assert q_norm is k_norm, "norms of queries and keys come together"
        return native
    assert q_norm.is_contiguous() and k_norm.is_contiguous()
    sizes = (q_norm.shape, k_norm.shape)
    assert sizes in (((dim,), (dim,)), ((heads * dim,), (kv_heads * dim,))), sizes
    native.q_norm, native.k_norm = q_norm.data_ptr(), k_norm.data_ptr()
    native.row_norms = int(q_norm.shape[0] != dim)
    return native


def _native_mlp(block: MlpBlock) -> NativeBlock:
    assert block.gate_up.out_features == 2 * block.down.in_features
    native = _common(MLP_BLOCK, block, block.gate_up, block.down)
    native.activation = ACTIVATIONS[block.activation]
    return native


def _common(
    kind: int, block: AttentionBlock | MlpBlock, into: LinearWeight, out_of: LinearWeight
) -> NativeBlock:
    hidden = into.in_features
    assert out_of.out_features == hidden
    for norm in (block.norm, block.post_norm):
        assert norm is None or (norm.is_contiguous() and norm.shape == (hidden,))
    native = NativeBlock(kind=kind, eps=block.eps)
    native.norm, native.post_norm = pointer(block.norm), pointer(block.post_norm)
    native.into, native.out_of = into.native, out_of.native  # type: ignore[attr-defined]
    return native
