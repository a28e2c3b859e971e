"""The key-value section of a GGUF file, read without touching its tensors.

The gguf package's GGUFReader builds a numpy view for each of the hundred thousand
strings of a vocabulary, which takes seconds; this reader decodes the wanted
arrays in one pass and steps over the others.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md (versions 2 and 3,
little-endian).
"""

from __future__ import annotations

import mmap
import struct
from typing import TYPE_CHECKING

from pagewire.errors import ModelLoadError

if TYPE_CHECKING:
    from collections.abc import Collection
    from pathlib import Path

Scalar = bool | int | float | str
Value = Scalar | list[Scalar] | list[str] | list[int] | list[float]

_STRING = 8
_ARRAY = 9
_FORMATS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
_VERSIONS = (2, 3)
_MAX_ELEMENTS = 1 << 26
"""More than any vocabulary; a larger count means the file is damaged."""


def read_gguf_metadata(path: Path, prefixes: Collection[str]) -> dict[str, Value]:
    """Reads the keys that start with one of `prefixes`; arrays become lists.

    Raises ModelLoadError if the file is cut short, damaged or of another version.
    """
    try:
        with (
            path.open("rb") as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data,
        ):
            return _Cursor(data).read_metadata(tuple(prefixes))
    except (struct.error, UnicodeDecodeError, ValueError) as error:
        raise ModelLoadError(f"{path}: damaged GGUF metadata ({error})") from error
    except OSError as error:
        raise ModelLoadError(f"{path}: cannot be read ({error.strerror})") from error


class _Cursor:
    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self._position = 0

    def read_metadata(self, prefixes: tuple[str, ...]) -> dict[str, Value]:
        if self._data[:4] != b"GGUF":
            raise ValueError(f"it begins with {self._data[:4]!r}")
        self._advance(4)
        version, _tensors, count = self._unpack("<IQQ")
        if version not in _VERSIONS:
            raise ValueError(f"version {version}; known: {_VERSIONS}")
        metadata: dict[str, Value] = {}
        for _ in range(count):
            key = self._string()
            (kind,) = self._unpack("<I")
            if key.startswith(prefixes):
                metadata[key] = self._value(kind)
            else:
                self._skip(kind)
        return metadata

    def _value(self, kind: int) -> Value:
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            value: Scalar = self._unpack("<" + _format(kind))[0]
            return value
        element, count = self._array_header()
        if element == _STRING:
            return self._strings(count)
        return list(self._unpack(f"<{count}{_format(element)}"))

    def _skip(self, kind: int) -> None:
        if kind == _STRING:
            self._advance(self._unpack("<Q")[0])
        elif kind == _ARRAY:
            element, count = self._array_header()
            if element == _STRING:
                for _ in range(count):
                    self._advance(self._unpack("<Q")[0])
            else:
                self._advance(struct.calcsize("<" + _format(element)) * count)
        else:
            self._advance(struct.calcsize("<" + _format(kind)))

    def _array_header(self) -> tuple[int, int]:
        element, count = self._unpack("<IQ")
        if element == _ARRAY:
            raise ValueError("nested arrays")
        if count > _MAX_ELEMENTS:
            raise ValueError(f"an array of {count} elements")
        return element, count

    def _strings(self, count: int) -> list[str]:
        """The hot loop: a vocabulary and its merges are 10^5 strings."""
        data, position, end = self._data, self._position, len(self._data)
        read_length = struct.Struct("<Q").unpack_from
        strings: list[str] = []
        append = strings.append
        for _ in range(count):
            (length,) = read_length(data, position)
            start = position + 8
            position = start + length
            if position > end:
                raise ValueError("it ends inside a string")
            append(data[start:position].decode("utf-8"))
        self._position = position
        return strings

    def _string(self) -> str:
        (length,) = self._unpack("<Q")
        start = self._position
        self._advance(length)
        return self._data[start : self._position].decode("utf-8")

    def _advance(self, size: int) -> None:
        if self._position + size > len(self._data):
            raise ValueError("it ends inside a value")
        self._position += size

    def _unpack(self, layout: str) -> tuple[int, ...]:
        values = struct.unpack_from(layout, self._data, self._position)
        self._position += struct.calcsize(layout)
        return values


def _format(kind: int) -> str:
    try:
        return _FORMATS[kind]
    except KeyError:
        raise ValueError(f"value type {kind}") from None
