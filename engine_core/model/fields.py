"""Typed access to the keys of a configuration, whatever file format holds them."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from pagewire.errors import ModelLoadError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


class Fields:
    """A JSON-like object by Hugging Face keys; every complaint names the file and the key.

    names: what the file itself calls a key, where it has another word for it (GGUF).
    """

    def __init__(
        self, raw: Mapping[str, Any], path: Path, names: Mapping[str, str] | None = None
    ) -> None:
        self.raw = raw
        self.path = path
        self._names = names or {}

    def integer(self, key: str) -> int:
        value = self.optional_integer(key)
        if value is None:
            raise ModelLoadError(f"{self.path}: {self.name(key)} is missing")
        return value

    def optional_integer(self, key: str) -> int | None:
        value = self.raw.get(key)
        if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
            raise self.wrong(key, "an integer")
        return value

    def number(self, key: str) -> float:
        value = self.optional_number(key)
        if value is None:
            raise self.wrong(key, "a number")
        return value

    def optional_number(self, key: str) -> float | None:
        value = self.raw.get(key)
        if value is None:
            return None
        if not is_finite(value):
            raise self.wrong(key, "a number")
        return float(value)

    def numbers(self, key: str) -> tuple[float, ...]:
        value = self.raw.get(key)
        if not isinstance(value, list) or not all(map(is_finite, value)):
            raise self.wrong(key, "a list of numbers")
        return tuple(map(float, value))

    def integers(self, key: str) -> list[int]:
        value = self.raw.get(key)
        if not isinstance(value, list) or not all(isinstance(item, int) for item in value):
            raise self.wrong(key, "a list of integers")
        return value

    def flag(self, key: str, default: bool = False) -> bool:
        value = self.raw.get(key)
        if value is not None and not isinstance(value, bool):
            raise self.wrong(key, "true or false")
        return default if value is None else value

    def table(self, key: str) -> dict[str, Any] | None:
        value = self.raw.get(key)
        if value is not None and not isinstance(value, dict):
            raise self.wrong(key, "an object")
        return value

    def inner(self, key: str, defaults: Mapping[str, Any]) -> Fields:
        """The object under key, by itself, over what its own absent or null keys mean."""
        given = {k: v for k, v in (self.table(key) or {}).items() if v is not None}
        prefix = f"{key}."
        names = {k.removeprefix(prefix): v for k, v in self._names.items() if k.startswith(prefix)}
        return Fields({**defaults, **given}, self.path, names)

    def name(self, key: str) -> str:
        return self._names.get(key, key)

    def wrong(self, key: str, expected: str) -> ModelLoadError:
        value = self.raw.get(key)
        text = repr(value) if len(repr(value)) <= 100 else f"{repr(value)[:100]}..."
        return ModelLoadError(f"{self.path}: {self.name(key)} is {text}, expected {expected}")

    def unknown(self, key: str, known: str) -> ModelLoadError:
        return ModelLoadError(
            f"{self.path}: {self.name(key)} {self.raw.get(key)!r} is unknown; known: {known}"
        )

    def unsupported(self, key: str, known: str) -> ModelLoadError:
        return ModelLoadError(
            f"{self.path}: {self.name(key)} {self.raw.get(key)!r} is not supported; known: {known}"
        )


def is_finite(value: object) -> bool:
    """A number that a float can hold: Python's JSON also has NaN, infinities and any integer."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    return -sys.float_info.max <= value <= sys.float_info.max
