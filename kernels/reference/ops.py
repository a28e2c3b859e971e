"""The definition of every op, in eager torch, on any device and in any float dtype."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kernels.blocks import ComposedBlocks, copy_rows
from kernels.fp8 import DequantizedFp8Linears
from kernels.int4 import DequantizedInt4Linears
from kernels.lora import StackedLora, StackedSlots, add_stacked_lora
from kernels.quantized import DequantizedLinears
from kernels.reference import attention as attention_op
from kernels.reference import embedding as embedding_op
from kernels.reference import experts as experts_op
from kernels.reference import gelu_tanh_mul as gelu_tanh_mul_op
from kernels.reference import linear as linear_op
from kernels.reference import rms_norm as rms_norm_op
from kernels.reference import rope as rope_op
from kernels.reference import sample as sample_op
from kernels.reference import silu_mul as silu_mul_op
from kernels.reference.logit_ops import TorchLogitOps

if TYPE_CHECKING:
    from kernels.lora import LoraBatch, LoraSlots
    from kernels.ops import (
        Activation,
        AttentionBatch,
        ExpertWeights,
        LinearWeight,
        SamplingBatch,
    )
    from kernels.reference.linear import ReferenceLinear


class ReferenceOps(
    ComposedBlocks,
    DequantizedLinears,
    DequantizedInt4Linears,
    DequantizedFp8Linears,
    StackedLora,
    TorchLogitOps,
):
    """Ops by the book. compute is the dtype inside each op; parity tests pass float64."""

    name = "reference"
    kv_cache_dtypes = frozenset((torch.float8_e4m3fn, torch.int8))
    has_narrow_kv_caches = True

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
        cos_sin: torch.Tensor | None,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        q_norm: torch.Tensor | None = None,
        k_norm: torch.Tensor | None = None,
        eps: float = 0.0,
        k_scale: torch.Tensor | None = None,
        v_scale: torch.Tensor | None = None,
    ) -> None:
        caches = (k_cache, v_cache, slot_mapping)
        norms = (q_norm, k_norm, eps)
        scales = (k_scale, v_scale)
        rope_op.rope_and_cache(q, k, v, positions, cos_sin, *caches, self._compute, *norms, *scales)

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
        caches = (k_cache, v_cache)
        limits = (window, soft_cap)
        scales = (k_scale, v_scale)
        return attention_op.attention(q, *caches, batch, scale, self._compute, *limits, *scales)

    def copy_blocks(
        self,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        src: torch.Tensor,
        dst: torch.Tensor,
        k_scale: torch.Tensor | None = None,
        v_scale: torch.Tensor | None = None,
    ) -> None:
        copy_rows((k_cache, v_cache, k_scale, v_scale), src, dst)

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        return silu_mul_op.silu_mul(gate_up, self._compute)

    def gelu_tanh_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        return gelu_tanh_mul_op.gelu_tanh_mul(gate_up, self._compute)

    def prepare_experts(self, gate_up: torch.Tensor, down: torch.Tensor) -> ExpertWeights:
        return experts_op.prepare_experts(gate_up, down, self._compute)

    def experts(
        self,
        x: torch.Tensor,
        weights: ExpertWeights,
        expert_ids: torch.Tensor,
        expert_scales: torch.Tensor,
        activation: Activation,
    ) -> torch.Tensor:
        assert isinstance(weights, experts_op.ReferenceExperts), type(weights)
        return experts_op.experts(x, weights, expert_ids, expert_scales, activation)

    def add_lora(
        self, y: torch.Tensor, x: torch.Tensor, slots: LoraSlots, batch: LoraBatch
    ) -> None:
        assert isinstance(slots, StackedSlots), type(slots)
        add_stacked_lora(y, x, slots, batch, self._compute)

    def sample(self, logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
        return sample_op.sample(logits, batch)
