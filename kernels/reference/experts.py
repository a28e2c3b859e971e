"""A sparse mixture of gated experts (arXiv:1701.06538), one expert at a time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from kernels.reference.gelu_tanh_mul import gelu_tanh_mul
from kernels.reference.silu_mul import silu_mul

if TYPE_CHECKING:
    from kernels.ops import Activation


@dataclass(frozen=True, slots=True)
class ReferenceExperts:
    gate_up: torch.Tensor  # [E, 2I, H], already in the compute dtype
    down: torch.Tensor  # [E, H, I], the same
    num_experts: int
    in_features: int


def prepare_experts(
    gate_up: torch.Tensor, down: torch.Tensor, compute: torch.dtype = torch.float32
) -> ReferenceExperts:
    num_experts, _, in_features = gate_up.shape
    return ReferenceExperts(gate_up.to(compute), down.to(compute), num_experts, in_features)


def experts(
    x: torch.Tensor,
    weights: ReferenceExperts,
    expert_ids: torch.Tensor,
    expert_scales: torch.Tensor,
    activation: Activation,
) -> torch.Tensor:
    """x [T, H] -> [T, H] in x's dtype. See Ops.experts."""
    compute = weights.gate_up.dtype
    gate = silu_mul if activation == "silu" else gelu_tanh_mul
    wide = x.to(compute)
    out = torch.zeros_like(wide)
    for expert in sorted(set(expert_ids.flatten().tolist())):
        tokens, slots = torch.where(expert_ids == expert)
        inner = gate(wide[tokens] @ weights.gate_up[expert].T, compute)
        scales = expert_scales[tokens, slots].to(compute).unsqueeze(1)
        out.index_add_(0, tokens, (inner @ weights.down[expert].T) * scales)
    return out.to(x.dtype)
