"""CPU ops whose every result depends on its own sequence alone, bit for bit.

The C++ products, norms and the rest sum each row in one order, whatever the batch. So does
attention, but for bfloat16 by dot products (the variant avx512_bf16): there a lone query
token reads its keys in spans at fixed positions, and a chunk goes through tiles of keys
without spans. So there each query token is made a sequence of its own, with the keys up to
itself, and takes the lone token's way: chunked, batched, cached or decoded, it sums the
same numbers in the same order.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from kernels.blocks import run_blocks
from kernels.cpu import library
from kernels.cpu.library import DTYPES, Library
from kernels.cpu.ops import CpuOps
from kernels.ops import AttentionBatch, AttentionBlock
from kernels.registry import UnsupportedOps

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kernels.ops import BlockBatch, BlockStack, KVCache, Ops


def load_batch_invariant_cpu_ops() -> Ops:
    """Raises UnsupportedOps if the C++ is not built: torch's products promise no order."""
    supported = library.supported_variants()
    if not supported:
        raise UnsupportedOps(f"results that do not depend on the batch: {library.why_missing()}")
    return BatchInvariantCpuOps(Library(supported[-1]))


class BatchInvariantCpuOps(CpuOps):
    """See the module."""

    def __init__(self, lib: Library) -> None:
        super().__init__(lib)
        self._attends_alone = {
            dtype for dtype, code in DTYPES.items() if not lib.attention_is_batch_invariant(code)
        }

    def run_blocks(
        self,
        stack: BlockStack,
        residual: torch.Tensor,
        batch: BlockBatch,
        kv_caches: Sequence[KVCache],
    ) -> None:
        alone = replace(batch, attention=self._invariant(batch.attention, residual.dtype))
        if residual.dtype != torch.float32 and _has_slots(stack):
            # Composed blocks round in more places, and so they do whoever has an adapter.
            run_blocks(self, stack, residual, alone, kv_caches)
        else:
            super().run_blocks(stack, residual, alone, kv_caches)

    def attention(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        batch: AttentionBatch,
        scale: float,
        window: int | None = None,
        soft_cap: float | None = None,
        k_scale: torch.Tensor | None = None,
        v_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        options = (window, soft_cap, k_scale, v_scale)
        alone = self._invariant(batch, q.dtype)
        return super().attention(q, k_cache, v_cache, alone, scale, *options)

    def _invariant(self, batch: AttentionBatch, dtype: torch.dtype) -> AttentionBatch:
        return one_token_sequences(batch) if dtype in self._attends_alone else batch


def _has_slots(stack: BlockStack) -> bool:
    first = stack.blocks[0]
    return isinstance(first, AttentionBlock) and first.qkv_lora is not None


def one_token_sequences(batch: AttentionBatch) -> AttentionBatch:
    """The same attention with each query token as a sequence [0, its position].

    Tokens of a sequence of length 0 stay in one that has no keys.
    """
    starts, seq_lens = batch.query_start_loc_host.long(), batch.seq_lens_host.long()
    query_lens = starts.diff()
    num_tokens = int(query_lens.sum())
    if batch.num_decodes == seq_lens.shape[0] == num_tokens:
        return batch
    row = torch.repeat_interleave(query_lens)
    index = torch.arange(num_tokens) - (starts[:-1] - starts[0])[row]
    lens = (seq_lens - query_lens)[row] + index + 1
    lens[seq_lens[row] == 0] = 0
    token_starts = torch.arange(num_tokens + 1, dtype=torch.int32) + int(starts[0])
    token_lens = lens.int()
    return AttentionBatch(
        query_start_loc=token_starts,
        seq_lens=token_lens,
        block_table=batch.block_table[row],
        num_decodes=num_tokens,
        max_query_len=1,
        max_seq_len=batch.max_seq_len,
        query_start_loc_host=token_starts,
        seq_lens_host=token_lens,
    )
