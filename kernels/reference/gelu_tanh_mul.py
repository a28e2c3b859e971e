"""The gate of a GeGLU layer (Shazeer, 2020, arXiv:2002.05202)."""

from __future__ import annotations

import torch


def gelu_tanh_mul(gate_up: torch.Tensor, compute: torch.dtype = torch.float32) -> torch.Tensor:
    """gate_up [T, 2I] -> gelu(gate_up[:, :I]) * gate_up[:, I:], [T, I], tanh approximation."""
    gate, up = gate_up.to(compute).chunk(2, dim=-1)
    return (torch.nn.functional.gelu(gate, approximate="tanh") * up).to(gate_up.dtype)
