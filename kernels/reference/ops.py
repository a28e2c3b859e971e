"""The definition of every op, in eager torch, on any device and in any float dtype."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kernels.blocks import ComposedBlocks
from kernels.quantized import DequantizedLinears
from kernels.reference import attention as attention_op
from kernels.reference import embedding as embedding_op
from kernels.reference import linear as linear_op
from kernels.reference import rms_norm as rms_norm_op
from kernels.reference import rope as rope_op
from kernels.reference import sample as sample_op
from kernels.reference import silu_mul as silu_mul_op

if TYPE_CHECKING:
    from kernels.ops import AttentionBatch, LinearWeight, SamplingBatch
    from kernels.reference.linear import ReferenceLinear


class ReferenceOps(ComposedBlocks, DequantizedLinears):
    """Ops by the book. compute is the dtype inside each op; parity tests pass float64."""

    name = "reference"

    def __init__(self, compute: torch.dtype = torch.float32) -> None:
        self._compute = compute

    def prepare_linear(
        self, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> ReferenceLinear:
        return linear_op.prepare_linear(weight, bias, self._compute)

    def linear(self, x: torch.Tensor, weight: LinearWeight) -> torch.Tensor:
        assert isinstance(weight, linear_op.ReferenceLinear), type(weight)
        return linear_op.linear(x, weight)

    def embedding(self, input_ids: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        return embedding_op.embedding(input_ids, table)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return rms_norm_op.rms_norm(x, weight, eps, self._compute)

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        return rms_norm_op.add_rms_norm(x, residual, weight, eps, self._compute)

    def rope_and_cache(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        positions: torch.Tensor,
        cos_sin: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        rope_op.rope_and_cache(
            q, k, v, positions, cos_sin, k_cache, v_cache, slot_mapping, self._compute
        )

    def attention(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        batch: AttentionBatch,
        scale: float,
    ) -> torch.Tensor:
        return attention_op.attention(q, k_cache, v_cache, batch, scale, self._compute)

    def copy_blocks(
        self,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        src: torch.Tensor,
        dst: torch.Tensor,
    ) -> None:
        for cache in (k_cache, v_cache):
            cache[dst] = cache[src]

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        return silu_mul_op.silu_mul(gate_up, self._compute)

    def sample(self, logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
        return sample_op.sample(logits, batch)
