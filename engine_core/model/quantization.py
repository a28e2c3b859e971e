"""Which form a model's matrices are computed in."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pagewire.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Collection

    from engine_core.model.loader import OpenedModel
    from engine_core.model.quantized.scheme import Scheme
    from kernels.ops import Ops
    from pagewire.config import EngineConfig

_NO_KERNEL = "the {} kernels have no such product; int8 works on every CPU"

Quantization = Literal["none", "packed", "int8", "int4", "fp8"]
"""none: floats of the compute dtype. packed: the checkpoint's own codes. The others are made
at load from whatever is stored: int8 is bytes with a scale for every 32, int4 has a scale
and a zero for 128 features (32 where 128 do not divide), fp8 a scale for each row."""


def resolve_quantization(config: EngineConfig, opened: OpenedModel, ops: Ops) -> Quantization:
    """What --quantization means here. Raises ConfigError naming the flag.

    auto keeps packed what is stored packed, where that is faster and no dtype was asked for;
    kernels that multiply what is stored as it is need only that it is not float32.
    """
    scheme = opened.config.quantization
    is_stored_quantized = opened.config.dtype == "quantized" or scheme is not None
    if config.quantization == "auto":
        if scheme is not None and _multiplies_codes(scheme, ops):
            return "none" if config.dtype == "float32" else "packed"
        has_blocks = opened.config.dtype == "quantized" or (
            scheme is not None and scheme.kinds != {"fp8"}
        )
        is_faster = has_blocks and ops.computes_quantized
        return "packed" if is_faster and config.dtype == "auto" else "none"
    if config.quantization == "int4" and not ops.computes_int4:
        raise ConfigError(f"--quantization int4: {_NO_KERNEL.format(ops.name)}")
    if config.quantization == "fp8" and not ops.computes_fp8:
        raise ConfigError(f"--quantization fp8: {_NO_KERNEL.format(ops.name)}")
    if config.quantization == "packed" and not is_stored_quantized:
        raise ConfigError(
            f"--quantization packed: {opened.source.path} holds {opened.config.dtype} weights, "
            "not quantized ones; int8 quantizes any"
        )
    return config.quantization


def _multiplies_codes(scheme: Scheme, ops: Ops) -> bool:
    computes = {"int4": ops.computes_int4, "int8": False, "fp8": ops.computes_fp8}
    return any(computes[kind] for kind in scheme.kinds)


def describe_computation(dtype: str, quantization: Quantization, formats: Collection[str]) -> str:
    """For people: bfloat16, or bfloat16 with Q4_1+Q8_0 weights. formats are those of the
    matrices that are kept quantized."""
    if not formats:
        return dtype
    names = sorted(formats) if quantization == "packed" else [quantization]
    return f"{dtype} with {'+'.join(names)} weights"
