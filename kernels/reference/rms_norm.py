"""RMSNorm (Zhang and Sennrich, 2019, arXiv:1910.07467), alone and after a residual add."""

from __future__ import annotations

import torch


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, compute: torch.dtype = torch.float32
) -> torch.Tensor:
    """x [T, H], weight [H] -> x / sqrt(mean(x^2) + eps) * weight, [T, H] in x's dtype."""
    wide = x.to(compute)
    inverse_rms = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    return (wide * inverse_rms * weight.to(compute)).to(x.dtype)


def add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    compute: torch.dtype = torch.float32,
) -> torch.Tensor:
    """residual += x in place, rounded to its dtype; returns rms_norm of what it now holds."""
    residual.copy_(residual.to(compute) + x.to(compute))
    return rms_norm(residual, weight, eps, compute)
