"""What --kv-cache-dtype means for a model, and the scales that its checkpoint has for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from pagewire.errors import ConfigError, ModelLoadError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from engine_core.model.checkpoint import Checkpoint
    from engine_core.model.config import ModelConfig
    from kernels.ops import Ops

FP8, INT8 = torch.float8_e4m3fn, torch.int8
KV_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "fp8": FP8,
    "fp8_e4m3": FP8,
    "int8": INT8,
}
"""What EngineConfig.kv_cache_dtype names, but for auto."""
_STORED = {
    "k": ("k_scale", "k_proj.k_scale", "k_proj.output_scale", "kv_scale"),
    "v": ("v_scale", "v_proj.v_scale", "v_proj.output_scale", "kv_scale"),
}
"""Below a layer's self_attn, as compressed-tensors and fp8 checkpoints call them."""

LayerScales = tuple[torch.Tensor, torch.Tensor]
"""Of keys and of values, [Hk] float32 each."""


def resolve_kv_cache_dtype(
    requested: str, dtype: torch.dtype, ops: Ops, *, rounds_activations: bool = False
) -> torch.dtype:
    """requested as EngineConfig.kv_cache_dtype has it, dtype what is computed in.
    rounds_activations: whether products take them in 8 bits, so that float32 in the cache would
    cost twice the bytes and gain nothing. Raises ConfigError."""
    has_halves = dtype == torch.float32 and ops.has_narrow_kv_caches
    if requested == "auto":
        return torch.bfloat16 if rounds_activations and has_halves else dtype
    kv_dtype = KV_DTYPES[requested]
    is_half = has_halves and kv_dtype in (torch.bfloat16, torch.float16)
    if kv_dtype != dtype and not is_half and kv_dtype not in ops.kv_cache_dtypes:
        name = str(dtype).removeprefix("torch.")
        raise ConfigError(
            f"--kv-cache-dtype {requested}: the {ops.name} kernels have no such cache beside {name}"
        )
    return kv_dtype


def describe_kv_cache(computation: str, dtype: torch.dtype, kv_dtype: torch.dtype) -> str:
    """For people: computation, and what the KV cache holds where that is not dtype."""
    name = "fp8" if kv_dtype == FP8 else str(kv_dtype).removeprefix("torch.")
    return computation if kv_dtype == dtype else f"{computation}, {name} KV cache"


def kv_scale_names(shapes: Mapping[str, tuple[int, ...]], num_layers: int) -> set[str]:
    """The tensors of a checkpoint that are scales of fp8 keys and values."""
    parts = {part for names in _STORED.values() for part in names}
    candidates = {f"model.layers.{i}.self_attn.{part}" for i in range(num_layers) for part in parts}
    return candidates & shapes.keys()


def read_kv_scales(
    checkpoint: Checkpoint, config: ModelConfig, heads_here: Sequence[int]
) -> Sequence[LayerScales] | None:
    """Those of all layers and some of the KV heads, on the host, or None where the checkpoint
    has none. One scale is that of all heads. Raises ModelLoadError naming the file and the
    tensor."""
    shapes = checkpoint.shapes()
    if not kv_scale_names(shapes, config.num_layers):
        return None
    heads = config.num_kv_heads

    def read(index: int, kind: str) -> torch.Tensor:
        names = [f"model.layers.{index}.self_attn.{part}" for part in _STORED[kind]]
        name = next((name for name in names if name in shapes), None)
        if name is None:
            raise ModelLoadError(
                f"{checkpoint.file_of(names[0])}: tensor {names[0]} is missing, but other scales "
                "of the KV cache are there"
            )
        scale = torch.empty(shapes[name], dtype=torch.float32)
        if scale.numel() not in (1, heads):
            raise ModelLoadError(
                f"{checkpoint.file_of(name)}: tensor {name} has shape {list(scale.shape)}, "
                f"expected one scale, or one for each of {heads} KV heads"
            )
        checkpoint.read_into(name, scale)
        if not bool((scale.isfinite() & (scale > 0)).all()):
            raise ModelLoadError(
                f"{checkpoint.file_of(name)}: tensor {name} has a scale that is not a finite "
                "number above 0"
            )
        return scale.flatten().expand(heads)[list(heads_here)]

    return [(read(index, "k"), read(index, "v")) for index in range(config.num_layers)]
