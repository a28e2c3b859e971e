"""CUDA ops whose every result depends on its own sequence alone, bit for bit.

Norms, RoPE and activations are made row by row anyway. Products are linear_invariant's
instead of cuBLAS's; those with quantized weights, and experts, take one tile size and do
not split K. Attention takes the prefill kernel with one tile size for everything,
a decode token being a chunk of one: it passes over the keys from the first to the last in
tiles at fixed positions, and what a row may not see adds zeros. The decode kernel's
splits, whose number follows the batch, are not used.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from kernels.cuda.cache_codes import FP8_BITS, cache_format
from kernels.cuda.configs import SHORT_PREFILL_ROWS, prefill_config
from kernels.cuda.linear_invariant import linear_invariant
from kernels.cuda.ops import CudaLinear, CudaOps
from kernels.cuda.paged_prefill import paged_prefill

if TYPE_CHECKING:
    import torch

    from kernels.cuda.tiles import AttentionVariant
    from kernels.ops import AttentionBatch


class BatchInvariantCudaOps(CudaOps):
    """See the module. What it costs on a GPU has not been measured."""

    _is_invariant = True

    def _float_linear(self, x: torch.Tensor, weight: CudaLinear) -> torch.Tensor:
        return linear_invariant(x, weight.weight, weight.bias)

    def _attend(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        batch: AttentionBatch,
        scale: float,
        variant: AttentionVariant,
        out: torch.Tensor,
    ) -> None:
        unpacks_fp8 = cache_format(k_cache) == FP8_BITS
        config = prefill_config(
            q.shape[2], q.element_size(), SHORT_PREFILL_ROWS, unpacks_fp8=unpacks_fp8
        )
        chunks = replace(batch, num_decodes=0)
        caches = (k_cache, v_cache)
        paged_prefill(q, *caches, chunks, scale, out, variant, config=config, one_loop=True)
