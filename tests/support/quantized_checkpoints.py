"""Checkpoints of codes as their formats are published, packed one code at a time.

Nothing here shares code with what reads them. A matrix is a random one rounded to codes,
scales and zeros; dense() is what they mean, in float32, for transformers.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from tests.support.tiny_model import TinySpec, write_hf

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""AutoAWQ's: place i of a word is of column AWQ_ORDER[i] of eight."""


@dataclass
class Rounded:
    """w[o, i] = scales[o, g] * (codes[o, i] - zeros[o, g]) with g = group_of[i]."""

    codes: np.ndarray  # [out, in] int64
    scales: torch.Tensor  # [out, groups]
    zeros: np.ndarray  # [out, groups] int64
    group_of: np.ndarray  # [in] int64

    def dense(self) -> torch.Tensor:
        scales = self.scales.double().numpy()[:, self.group_of]
        differences = (self.codes - self.zeros[:, self.group_of]).astype(np.float64)
        return torch.from_numpy(scales * differences).float()


def round_to_codes(
    weight: torch.Tensor,
    bits: int,
    group_size: int,
    *,
    symmetric: bool,
    seed: int = 0,
    act_order: bool = False,
    scale_dtype: torch.dtype = torch.float16,
) -> Rounded:
    """act_order: groups are of features drawn at random."""
    out_features, in_features = weight.shape
    size = in_features if group_size == -1 else group_size
    group_of = np.arange(in_features) // size
    if act_order:
        np.random.default_rng(seed).shuffle(group_of)
    most = 2**bits - 1
    num_groups = -(-in_features // size)
    values = weight.double().numpy()
    codes = np.zeros((out_features, in_features), dtype=np.int64)
    zeros = np.zeros((out_features, num_groups), dtype=np.int64)
    scales = torch.zeros((out_features, num_groups), dtype=scale_dtype)
    for group in range(num_groups):
        columns = group_of == group
        part = values[:, columns]
        if symmetric:
            wide = np.abs(part).max(1) * 2 / most
            zero = np.full(out_features, 2 ** (bits - 1))
        else:
            low, high = np.minimum(part.min(1), 0), np.maximum(part.max(1), 0)
            wide = (high - low) / most
            zero = np.clip(np.round(-low / wide), 0, most).astype(np.int64)
        scale = torch.from_numpy(wide).to(scale_dtype)
        wide = scale.double().numpy()
        rounded = np.round(part / wide[:, None]) + zero[:, None]
        codes[:, columns] = np.clip(rounded, 0, most).astype(np.int64)
        scales[:, group], zeros[:, group] = scale, zero
    return Rounded(codes, scales, zeros, group_of)


def pack_columns(values: np.ndarray, bits: int) -> torch.Tensor:
    """[r, n] -> [r, ceil(n bits / 32)] int32, the first in the least significant bits."""
    per_word = 32 // bits
    rows, columns = values.shape
    words = np.zeros((rows, -(-columns // per_word)), dtype=np.uint32)
    for column in range(columns):
        shift = np.uint32(bits * (column % per_word))
        words[:, column // per_word] |= values[:, column].astype(np.uint32) << shift
    return torch.from_numpy(words.view(np.int32))


def awq_tensors(module: str, rounded: Rounded) -> dict[str, torch.Tensor]:
    """AutoAWQ's gemm layout."""

    def words(values: np.ndarray) -> torch.Tensor:
        out_features = values.shape[0]
        order = np.array([8 * (i // 8) + AWQ_ORDER[i % 8] for i in range(out_features)])
        return pack_columns(values.T[:, order], 4)

    return {
        f"{module}.qweight": words(rounded.codes),
        f"{module}.qzeros": words(rounded.zeros),
        f"{module}.scales": rounded.scales.T.contiguous(),
    }


def gptq_tensors(
    module: str, rounded: Rounded, bits: int, *, less_one: bool
) -> dict[str, torch.Tensor]:
    """AutoGPTQ's layout; less_one is checkpoint_format gptq, else gptq_v2."""
    zeros = (rounded.zeros - 1) % 2**bits if less_one else rounded.zeros
    return {
        f"{module}.qweight": pack_columns(rounded.codes, bits).T.contiguous(),
        f"{module}.qzeros": pack_columns(zeros.T, bits),
        f"{module}.scales": rounded.scales.T.contiguous(),
        f"{module}.g_idx": torch.from_numpy(rounded.group_of.astype(np.int32)),
    }


Encode = "Callable[[str, torch.Tensor], tuple[dict[str, torch.Tensor], torch.Tensor]]"
"""Of a module and its weight: what is stored, and what that means."""


def write_quantized(
    directory: Path,
    spec: TinySpec,
    config: dict[str, Any],
    encode: Callable[[str, torch.Tensor], tuple[dict[str, torch.Tensor], torch.Tensor]],
    *,
    floats: tuple[str, ...] = (),
) -> tuple[Path, Path]:
    """Two directories: of codes, with config as its quantization_config, and of the float32
    weights that they mean. Modules of layers whose name has one of floats stay floats."""
    coded = write_hf(directory / "coded", spec)
    dense = write_hf(directory / "dense", spec)
    stored: dict[str, torch.Tensor] = {}
    meant: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(coded / "model.safetensors").items():
        module = name.removesuffix(".weight")
        is_linear = name.endswith("_proj.weight") and not any(part in name for part in floats)
        if is_linear:
            tensors, weight = encode(module, tensor)
            stored |= tensors
            meant[name] = weight
        else:
            stored[name], meant[name] = tensor, tensor
    save_file(stored, coded / "model.safetensors", metadata={"format": "pt"})
    save_file(meant, dense / "model.safetensors", metadata={"format": "pt"})
    path = coded / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": config}))
    return coded, dense
