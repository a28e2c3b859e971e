"""config.json and generation_config.json of a Hugging Face directory.

Read as plain JSON: importing transformers for it would cost seconds. Absent
keys mean what the architecture's transformers config class defaults to.
"""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from engine_core.model.fields import Fields
from engine_core.model.model_fields import read_model_fields
from engine_core.model.quantized.detect import read_scheme
from engine_core.model.registry import find_architecture
from pagewire.errors import ModelLoadError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from engine_core.model.config import CheckpointDtype, ModelConfig

_SAMPLING_RANGES: dict[str, tuple[Callable[[float], bool], str]] = {
    "temperature": (lambda value: 0 <= value < math.inf, "a finite number of at least 0"),
    "top_p": (lambda value: 0 < value <= 1, "a number in (0, 1]"),
    "top_k": (lambda value: value.is_integer() and value >= -1, "an integer of at least -1"),
    "min_p": (lambda value: 0 <= value <= 1, "a number in [0, 1]"),
    "repetition_penalty": (lambda value: 0 < value < math.inf, "a finite number above 0"),
}
_SHARED = (
    *("bos_token_id", "eos_token_id", "tie_word_embeddings"),
    *("dtype", "torch_dtype", "quantization_config", "compression_config"),
)
_STORED_DTYPES = ("float32", "float16", "bfloat16")


def read_hf_config(directory: Path) -> ModelConfig:
    """Raises ModelLoadError naming the file and the key at fault."""
    path = directory / "config.json"
    raw = read_json(path)
    architecture = find_architecture(_architecture(raw, path), str(path))
    own = (
        raw
        if architecture.hf_text_key is None
        else _text_config(raw, architecture.hf_text_key, path)
    )
    fields = Fields({**architecture.hf_defaults, **own}, path)
    generation = _read_generation_config(directory)
    scheme = read_scheme(fields)
    config = read_model_fields(
        fields,
        architecture,
        eos_token_ids=_eos_token_ids(fields, generation),
        dtype=_stored_dtype(fields),
        default_sampling=_default_sampling(generation),
    )
    return replace(config, quantization=scheme)


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


def _architecture(raw: Mapping[str, Any], path: Path) -> str:
    named = raw.get("architectures")
    if not isinstance(named, list) or len(named) != 1 or not isinstance(named[0], str):
        raise ModelLoadError(f"{path}: architectures is {named!r}, expected a list of one name")
    return named[0]


def _text_config(raw: dict[str, Any], key: str, path: Path) -> dict[str, Any]:
    """The object under key, with what stands beside it and is of the whole checkpoint."""
    text = Fields(raw, path).table(key)
    if text is None:
        raise ModelLoadError(f"{path}: {key} is missing")
    return text | {name: raw[name] for name in _SHARED if raw.get(name) is not None}


def _read_generation_config(directory: Path) -> Fields:
    path = directory / "generation_config.json"
    return Fields(read_json(path) if path.is_file() else {}, path)


def _eos_token_ids(fields: Fields, generation: Fields) -> tuple[int, ...]:
    """generation_config.json's ids replace config.json's, as transformers' generate() has it."""
    source = generation if generation.raw.get("eos_token_id") is not None else fields
    value = source.raw.get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
        raise source.wrong("eos_token_id", "an integer or a list of integers")
    return tuple(dict.fromkeys(ids))


def _stored_dtype(fields: Fields) -> CheckpointDtype:
    name = fields.raw.get("dtype") or fields.raw.get("torch_dtype") or "float32"
    if name not in _STORED_DTYPES:
        raise ModelLoadError(
            f"{fields.path}: dtype {name!r} is unknown; known: {', '.join(_STORED_DTYPES)}"
        )
    return cast("CheckpointDtype", name)


def _default_sampling(generation: Fields) -> dict[str, float]:
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
