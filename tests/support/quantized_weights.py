"""Random weights in GGUF's formats, and activations that quantizing does not change."""

from __future__ import annotations

import torch

from kernels.quantized import FORMATS, QuantizedTensor

WITH_MIN = ("Q4_1", "Q5_1", "Q4_K", "Q5_K")


def half_floats_at(name: str) -> list[int]:
    """Where in a block of the format its half floats lie, in bytes."""
    return [208] if name == "Q6_K" else [0, 2] if name in WITH_MIN else [0]


def random_weight(name: str, rows: int, blocks: int, seed: int = 0) -> QuantizedTensor:
    """Random codes and block scales under half floats that are sound."""
    kind = FORMATS[name]
    generator = torch.Generator().manual_seed(seed)
    size = (rows, blocks * kind.block_bytes)
    data = torch.randint(0, 256, size, dtype=torch.uint8, generator=generator)
    for at in half_floats_at(name):
        values = (torch.rand(rows, blocks, 1, generator=generator) - 0.5) / 32
        view = data.view(rows, blocks, kind.block_bytes)
        view[..., at : at + 2] = values.half().view(torch.uint8)
    return QuantizedTensor(name, (rows, blocks * kind.block), data)


def exact_activations(tokens: int, in_features: int, dtype: torch.dtype) -> torch.Tensor:
    """Whose quantization loses nothing: integers of which each block has one of +-127,
    times a power of two of its own."""
    generator = torch.Generator().manual_seed(1)
    codes = torch.randint(-127, 128, (tokens, in_features // 32, 32), generator=generator)
    codes[:, ::2, 5], codes[:, 1::2, 31] = 127, -127
    exponents = torch.randint(-9, -4, (tokens, in_features // 32, 1), generator=generator)
    return (codes * 2.0**exponents).view(tokens, in_features).to(dtype)
