"""config.json and generation_config.json of a Hugging Face directory.

Read as plain JSON: importing transformers for it would cost seconds. Absent
keys mean what the architecture's transformers config class defaults to.
"""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any, cast

from engine_core.model.config import CheckpointDtype, ModelConfig, RopeConfig, check_config
from engine_core.model.registry import find_architecture
from pagewire.errors import ModelLoadError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

_SAMPLING_RANGES: dict[str, tuple[Callable[[float], bool], str]] = {
    "temperature": (lambda value: 0 <= value < math.inf, "a finite number of at least 0"),
    "top_p": (lambda value: 0 < value <= 1, "a number in (0, 1]"),
    "top_k": (lambda value: value.is_integer() and value >= -1, "an integer of at least -1"),
    "min_p": (lambda value: 0 <= value <= 1, "a number in [0, 1]"),
    "repetition_penalty": (lambda value: 0 < value < math.inf, "a finite number above 0"),
}
_STORED_DTYPES = ("float32", "float16", "bfloat16")


def read_hf_config(directory: Path) -> ModelConfig:
    """Raises ModelLoadError naming the file and the key at fault."""
    path = directory / "config.json"
    raw = read_json(path)
    architecture = _architecture(raw, path)
    defaults = find_architecture(architecture, str(path)).hf_defaults
    fields = _Fields({**defaults, **raw}, path)
    _refuse_variants(fields)
    num_heads = fields.integer("num_attention_heads")
    hidden_size = fields.integer("hidden_size")
    max_positions = fields.integer("max_position_embeddings")
    num_kv_heads = fields.optional_integer("num_key_value_heads")
    head_dim = fields.optional_integer("head_dim")
    generation = _read_generation_config(directory)
    return check_config(
        ModelConfig(
            architecture=architecture,
            hidden_size=hidden_size,
            intermediate_size=fields.integer("intermediate_size"),
            num_layers=fields.integer("num_hidden_layers"),
            num_heads=num_heads,
            num_kv_heads=num_heads if num_kv_heads is None else num_kv_heads,
            head_dim=hidden_size // max(num_heads, 1) if head_dim is None else head_dim,
            vocab_size=fields.integer("vocab_size"),
            rms_norm_eps=fields.number("rms_norm_eps"),
            max_positions=max_positions,
            rope=_rope(fields, max_positions),
            tie_embeddings=fields.flag("tie_word_embeddings"),
            attention_bias=fields.flag("attention_bias"),
            mlp_bias=fields.flag("mlp_bias"),
            sliding_window=fields.optional_integer("sliding_window"),
            bos_token_id=fields.optional_integer("bos_token_id"),
            eos_token_ids=_eos_token_ids(fields, generation),
            dtype=_stored_dtype(fields),
            default_sampling=_default_sampling(generation),
        ),
        str(path),
    )


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file; raises ModelLoadError naming the file."""
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise ModelLoadError(f"{path}: no such file") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ModelLoadError(f"{path}: not readable as JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelLoadError(f"{path}: expected a JSON object, found {type(value).__name__}")
    return value


class _Fields:
    """Typed access to a JSON object; every complaint names the file and the key."""

    def __init__(self, raw: Mapping[str, Any], path: Path) -> None:
        self.raw = raw
        self.path = path

    def integer(self, key: str) -> int:
        value = self.optional_integer(key)
        if value is None:
            raise ModelLoadError(f"{self.path}: {key} is missing")
        return value

    def optional_integer(self, key: str) -> int | None:
        value = self.raw.get(key)
        if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
            raise self.wrong(key, "an integer")
        return value

    def number(self, key: str) -> float:
        value = self.raw.get(key)
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise self.wrong(key, "a number")
        return float(value)

    def flag(self, key: str) -> bool:
        value = self.raw.get(key)
        if value is not None and not isinstance(value, bool):
            raise self.wrong(key, "true or false")
        return bool(value)

    def table(self, key: str) -> dict[str, Any] | None:
        value = self.raw.get(key)
        if value is not None and not isinstance(value, dict):
            raise self.wrong(key, "an object")
        return value

    def wrong(self, key: str, expected: str) -> ModelLoadError:
        return ModelLoadError(f"{self.path}: {key} is {self.raw.get(key)!r}, expected {expected}")


def _architecture(raw: Mapping[str, Any], path: Path) -> str:
    named = raw.get("architectures")
    if not isinstance(named, list) or len(named) != 1 or not isinstance(named[0], str):
        raise ModelLoadError(f"{path}: architectures is {named!r}, expected a list of one name")
    return named[0]


def _refuse_variants(fields: _Fields) -> None:
    """Refuses what would load but compute something else than the checkpoint means."""
    quantization = fields.table("quantization_config")
    if quantization is not None:
        raise ModelLoadError(
            f"{fields.path}: quantization_config with quant_method "
            f"{quantization.get('quant_method')!r} is not supported; known: none (unquantized)"
        )
    act = fields.raw.get("hidden_act", "silu")
    if act != "silu":
        raise ModelLoadError(f"{fields.path}: hidden_act {act!r} is unknown; known: silu")


def _rope(fields: _Fields, max_positions: int) -> RopeConfig:
    """transformers 5 writes rope_parameters, older versions rope_theta and rope_scaling."""
    key = "rope_scaling" if fields.raw.get("rope_scaling") else "rope_parameters"
    scaling = fields.table(key) or {}
    inner = _Fields(
        {
            "rope_theta": fields.raw.get("rope_theta") or 10_000.0,
            "partial_rotary_factor": fields.raw.get("partial_rotary_factor") or 1.0,
            "original_max_position_embeddings": max_positions,
            **scaling,
        },
        fields.path,
    )
    if inner.number("partial_rotary_factor") != 1:
        raise ModelLoadError(
            f"{fields.path}: partial_rotary_factor {inner.raw['partial_rotary_factor']} is not "
            "supported; known: 1"
        )
    rope_type = str(scaling.get("rope_type", scaling.get("type", "default")))
    theta = inner.number("rope_theta")
    if rope_type == "linear":
        return RopeConfig(theta, rope_type, inner.number("factor"))
    if rope_type == "llama3":
        return RopeConfig(
            theta,
            rope_type,
            factor=inner.number("factor"),
            low_freq_factor=inner.number("low_freq_factor"),
            high_freq_factor=inner.number("high_freq_factor"),
            original_max_positions=inner.integer("original_max_position_embeddings"),
        )
    return RopeConfig(theta, rope_type)


def _read_generation_config(directory: Path) -> _Fields:
    path = directory / "generation_config.json"
    return _Fields(read_json(path) if path.is_file() else {}, path)


def _eos_token_ids(fields: _Fields, generation: _Fields) -> tuple[int, ...]:
    """generation_config.json's ids replace config.json's, as transformers' generate() has it."""
    source = generation if generation.raw.get("eos_token_id") is not None else fields
    value = source.raw.get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
        raise source.wrong("eos_token_id", "an integer or a list of integers")
    return tuple(dict.fromkeys(ids))


def _stored_dtype(fields: _Fields) -> CheckpointDtype:
    name = fields.raw.get("dtype") or fields.raw.get("torch_dtype") or "float32"
    if name not in _STORED_DTYPES:
        raise ModelLoadError(
            f"{fields.path}: dtype {name!r} is unknown; known: {', '.join(_STORED_DTYPES)}"
        )
    return cast("CheckpointDtype", name)


def _default_sampling(generation: _Fields) -> dict[str, float]:
    """Empty where the author asks for greedy decoding (do_sample false)."""
    if generation.raw.get("do_sample") is False:
        return {}
    values = {}
    for key, (is_legal, expected) in _SAMPLING_RANGES.items():
        if generation.raw.get(key) is None:
            continue
        values[key] = generation.number(key)
        # Else each request that leaves it out would be told that it is wrong.
        if not is_legal(values[key]):
            raise generation.wrong(key, expected)
    return values
