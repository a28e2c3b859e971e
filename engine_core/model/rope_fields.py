"""RoPE as configurations spell it: rope_scaling, or rope_parameters since transformers 5."""

from __future__ import annotations

import math
import sys
from typing import TYPE_CHECKING, Any

from engine_core.model.config import RopeConfig
from pagewire.errors import ModelLoadError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from engine_core.model.fields import Fields

LAYER_TYPES = ("full_attention", "sliding_attention")
_EXTENDED = ("llama3", "yarn", "longrope")


def read_rope(
    fields: Fields, head_dim: int, aliases: Mapping[str, str] | None = None
) -> RopeConfig:
    """The RoPE that all layers have. aliases: rope types under another name."""
    key = "rope_scaling" if fields.raw.get("rope_scaling") else "rope_parameters"
    by_type = [name for name in LAYER_TYPES if name in (fields.table(key) or {})]
    if by_type:
        raise ModelLoadError(
            f"{fields.path}: {fields.name(key)} is by layer type ({by_type[0]}), which this "
            "architecture does not have"
        )
    return _read(fields, key, _theta(fields, "rope_theta"), head_dim, aliases or {})


def read_ropes_by_layer_type(fields: Fields, head_dim: int) -> dict[str, RopeConfig]:
    """A RoPE for each of LAYER_TYPES: rope_parameters by layer type, or, as Gemma 3 had it
    first, rope_theta and rope_scaling of full attention and rope_local_base_freq of sliding."""
    scaling = fields.table("rope_scaling")
    by_type = fields.inner("rope_parameters", {})
    ropes = {}
    for layer_type, theta_key in zip(
        LAYER_TYPES, ("rope_theta", "rope_local_base_freq"), strict=True
    ):
        given = dict(by_type.table(layer_type) or {})
        if scaling is not None and layer_type == "full_attention":
            given |= scaling
        names = {
            f"{layer_type}.{key}": fields.name(f"rope_scaling.{key}") for key in (scaling or {})
        }
        holder = type(fields)({**fields.raw, layer_type: given}, fields.path, names)
        ropes[layer_type] = _read(holder, layer_type, _theta(fields, theta_key), head_dim, {})
    return ropes


def extended_context(ropes: list[RopeConfig], max_positions: int) -> int:
    """The context length with what yarn adds to it; the other types' is written with it."""
    yarn = [
        int(min(rope.factor * rope.original_max_positions, sys.maxsize))
        for rope in ropes
        if rope.rope_type == "yarn"
    ]
    return max([max_positions, *yarn])


def _theta(fields: Fields, key: str) -> float:
    return 10_000.0 if fields.raw.get(key) is None else fields.number(key)


def _read(
    fields: Fields, key: str, theta: float, head_dim: int, aliases: Mapping[str, str]
) -> RopeConfig:
    max_positions = fields.integer("max_position_embeddings")
    factor = fields.optional_number("partial_rotary_factor")
    given = fields.inner(
        key,
        {
            "rope_theta": theta,
            "partial_rotary_factor": 1.0 if factor is None else factor,
            "original_max_position_embeddings": max_positions,
        },
    )
    spelled = given.raw.get("rope_type", given.raw.get("type", "default"))
    rope_type = aliases.get(str(spelled), str(spelled))
    original = fields.optional_integer("original_max_position_embeddings")
    if original is None:
        original = given.integer("original_max_position_embeddings")
    values: dict[str, Any] = {
        "theta": given.number("rope_theta"),
        "rope_type": rope_type,
        "rotary_dim": _rotary_dim(fields, given, rope_type, head_dim),
    }
    if fields.raw.get("rope_freqs") is not None:
        values["freq_divisors"] = fields.numbers("rope_freqs")
    if rope_type in _EXTENDED:
        values["original_max_positions"] = original
    if rope_type in ("linear", "dynamic", "llama3"):
        values["factor"] = given.number("factor")
    elif rope_type == "proportional":
        values["factor"] = 1.0 if given.raw.get("factor") is None else given.number("factor")
    if rope_type == "llama3":
        for name in ("low_freq_factor", "high_freq_factor"):
            values[name] = given.number(name)
    if rope_type in ("yarn", "longrope"):
        if original < 1:
            raise given.wrong("original_max_position_embeddings", "at least 1")
        # Phi says it as a ratio of two lengths.
        can_be_ratio = rope_type == "longrope" or max_positions > original
        is_ratio = given.raw.get("factor") is None and can_be_ratio
        stretch = max_positions / original if is_ratio else given.number("factor")
        attention_factor = given.optional_number("attention_factor")
        if rope_type == "yarn":
            values |= _yarn(given)
            default = _yarn_attention_factor(given, stretch)
        else:
            values["short_factors"] = given.numbers("short_factor")
            values["long_factors"] = given.numbers("long_factor")
            default = _longrope_attention_factor(stretch, original)
        values["factor"] = stretch
        values["attention_factor"] = default if attention_factor is None else attention_factor
    return RopeConfig(**values)


def _rotary_dim(fields: Fields, given: Fields, rope_type: str, head_dim: int) -> int | None:
    """None where all of a head is rotated. A GGUF says rotary_dim itself."""
    rotary_dim = fields.optional_integer("rotary_dim")
    if rotary_dim is None:
        factor = given.number("partial_rotary_factor")
        if not 0 < factor <= 1:
            raise given.wrong("partial_rotary_factor", "a number in (0, 1]")
        rotary_dim = int(head_dim * factor)
        if rope_type == "proportional":
            rotary_dim = 2 * int(factor * head_dim // 2)
    return None if rotary_dim == head_dim else rotary_dim


def _yarn(given: Fields) -> dict[str, Any]:
    return {
        "beta_fast": given.optional_number("beta_fast") or 32.0,
        "beta_slow": given.optional_number("beta_slow") or 1.0,
        "truncate": given.flag("truncate", default=True),
    }


def _yarn_attention_factor(given: Fields, factor: float) -> float:
    """0.1 ln(factor) + 1 (arXiv:2309.00071, section 3.4), or DeepSeek's ratio of two such."""

    def magnitude(mscale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0

    mscale, all_dim = given.optional_number("mscale"), given.optional_number("mscale_all_dim")
    return magnitude(mscale) / magnitude(all_dim) if mscale and all_dim else magnitude(1.0)


def _longrope_attention_factor(factor: float, original: int) -> float:
    """sqrt(1 + ln(factor) / ln(original context)) (arXiv:2402.13753)."""
    if factor <= 1 or original < 2:
        return 1.0
    return math.sqrt(1 + math.log(factor) / math.log(original))
