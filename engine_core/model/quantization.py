"""Which form a model's matrices are computed in."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pagewire.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Collection

    from engine_core.model.loader import OpenedModel
    from kernels.ops import Ops
    from pagewire.config import EngineConfig

Quantization = Literal["none", "packed", "int8"]
"""none: floats of the compute dtype. packed: a GGUF's own codes. int8: bytes with a
scale for every 32, made at load from whatever is stored."""


def resolve_quantization(config: EngineConfig, opened: OpenedModel, ops: Ops) -> Quantization:
    """What --quantization means here. Raises ConfigError naming the flag.

    auto keeps packed what is stored packed, where that is faster and no dtype was asked for.
    """
    is_stored_quantized = opened.config.dtype == "quantized"
    if config.quantization == "auto":
        is_faster = is_stored_quantized and ops.computes_quantized
        return "packed" if is_faster and config.dtype == "auto" else "none"
    if config.quantization == "packed" and not is_stored_quantized:
        raise ConfigError(
            f"--quantization packed: {opened.source.path} holds {opened.config.dtype} weights, "
            "not quantized ones; int8 quantizes any"
        )
    return config.quantization


def describe_computation(dtype: str, quantization: Quantization, formats: Collection[str]) -> str:
    """For people: bfloat16, or bfloat16 with Q4_1+Q8_0 weights. formats are those of the
    matrices that are kept quantized."""
    if not formats:
        return dtype
    names = ["int8"] if quantization == "int8" else sorted(formats)
    return f"{dtype} with {'+'.join(names)} weights"
