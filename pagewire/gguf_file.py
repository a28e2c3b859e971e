"""A GGUF file: its metadata, and where its tensors lie.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3,
little-endian. The gguf package's own reader makes numpy objects of each of the
tokenizer's hundred thousand strings, which takes seconds; here long arrays are
stepped over, and read in one pass when they are asked for.
"""

from __future__ import annotations

import mmap
import struct
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pagewire.errors import ModelLoadError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

GGUF_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32
_MAX_DIMS = 4
_KEPT_ARRAY_LENGTH = 1024
_STRING, _ARRAY = 8, 9
_LENGTH = struct.Struct("<Q")
_SCALARS = {
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

Scalar = int | float | bool | str
Value = Scalar | list[Scalar] | None


@dataclass(frozen=True, slots=True)
class GgufTensor:
    name: str
    shape: tuple[int, ...]
    """Outermost first, as in torch (the file has it the other way round)."""
    type_id: int
    """A gguf.GGMLQuantizationType."""
    offset: int
    """From the file's beginning, in bytes."""


class GgufFile:
    """A memory-mapped GGUF file.

    metadata holds scalars, strings and arrays of up to 1024 elements; a longer
    array is None until read_array() is asked for it. Arrays of arrays are refused,
    as llama.cpp refuses them. Raises ModelLoadError naming the file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            # A private mapping: torch warns of memory that it may not write, though nobody does.
            with path.open("rb") as file:
                self.bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except (OSError, ValueError) as error:
            raise ModelLoadError(f"{path}: cannot be mapped: {error}") from error
        self.metadata: dict[str, Value] = {}
        self._value_starts: dict[str, int] = {}
        self._at = 0
        with self._reading():
            self._read_header()

    def read_array(self, key: str) -> list[Scalar]:
        """A metadata array of any length. Raises ModelLoadError if there is none."""
        if key not in self._value_starts:
            raise ModelLoadError(f"{self.path}: {key} is missing")
        self._at = self._value_starts[key]
        with self._reading():
            if self._scalar("I") != _ARRAY:
                raise ModelLoadError(f"{self.path}: {key} is not an array")
            return self._elements(*self._array_header())

    def read_metadata(self, prefix: str) -> dict[str, Value]:
        """The metadata whose keys start with `prefix`, arrays whole. Raises ModelLoadError."""
        return {
            key: self.read_array(key) if value is None else value
            for key, value in self.metadata.items()
            if key.startswith(prefix)
        }

    @contextmanager
    def _reading(self) -> Iterator[None]:
        try:
            yield
        except struct.error as error:
            raise self._cut_off() from error
        except UnicodeDecodeError as error:
            raise ModelLoadError(
                f"{self.path}: header text is not UTF-8 near byte {self._at}"
            ) from error

    def _cut_off(self, detail: str = "") -> ModelLoadError:
        return ModelLoadError(
            f"{self.path}: header is cut off at byte {self._at} of {len(self.bytes)}{detail}"
        )

    def _read_header(self) -> None:
        if self.bytes[:4] != GGUF_MAGIC:
            raise ModelLoadError(
                f"{self.path}: not a GGUF file (it begins with {self.bytes[:4]!r})"
            )
        self._at = 4
        version = self._scalar("I")
        if version not in _VERSIONS:
            raise ModelLoadError(
                f"{self.path}: GGUF version {version} is unknown; known: 2, 3 (little-endian)"
            )
        num_tensors, num_pairs = self._scalar("Q"), self._scalar("Q")
        for _ in range(num_pairs):
            key = self._string()
            self._value_starts[key] = self._at
            self.metadata[key] = self._value()
        infos = [self._tensor_info() for _ in range(num_tensors)]
        alignment = self.metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise ModelLoadError(
                f"{self.path}: general.alignment {alignment!r} is not a power of two"
            )
        start = (self._at + alignment - 1) // alignment * alignment
        self.tensors = {
            name: GgufTensor(name, shape, type_id, start + offset)
            for name, shape, type_id, offset in infos
        }

    def _value(self) -> Value:
        kind = self._scalar("I")
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            return self._scalar(self._code(kind))
        kind, length = self._array_header()
        if length <= _KEPT_ARRAY_LENGTH:
            return self._elements(kind, length)
        if kind == _STRING:
            self._skip_strings(length)
        else:
            self._advance(length * struct.calcsize("<" + self._code(kind)))
        return None

    def _array_header(self) -> tuple[int, int]:
        kind, length = self._scalar("I"), self._scalar("Q")
        size = _LENGTH.size if kind == _STRING else struct.calcsize("<" + self._code(kind))
        # Before anything is made of a length that lies.
        if length * size > len(self.bytes) - self._at:
            raise self._cut_off(f": an array of {length} elements follows")
        return kind, length

    def _elements(self, kind: int, length: int) -> list[Scalar]:
        if kind == _STRING:
            return self._strings(length)
        layout = f"<{length}{self._code(kind)}"
        values = struct.unpack_from(layout, self.bytes, self._at)
        self._at += struct.calcsize(layout)
        return list(values)

    def _strings(self, length: int) -> list[Scalar]:
        """A hot loop: a vocabulary and its merges are 10^5 strings."""
        data, end = self.bytes, self._at
        strings: list[Scalar] = []
        for _ in range(length):
            (size,) = _LENGTH.unpack_from(data, end)
            start = end + _LENGTH.size
            end = start + size
            if end > len(data):
                raise self._cut_off()
            strings.append(data[start:end].decode())
        self._at = end
        return strings

    def _skip_strings(self, length: int) -> None:
        data, end = self.bytes, self._at
        for _ in range(length):
            (size,) = _LENGTH.unpack_from(data, end)
            end += _LENGTH.size + size
            if end > len(data):
                raise self._cut_off()
        self._at = end

    def _string(self) -> str:
        size = self._scalar("Q")
        start = self._at
        self._advance(size)
        return self.bytes[start : self._at].decode()

    def _scalar(self, code: str) -> int:
        (value,) = struct.unpack_from("<" + code, self.bytes, self._at)
        self._at += struct.calcsize("<" + code)
        return value  # type: ignore[no-any-return]  # struct has no static types

    def _code(self, kind: int) -> str:
        """struct's letter for a type."""
        code = _SCALARS.get(kind)
        if code is None:
            name = "array of arrays" if kind == _ARRAY else f"value type {kind}"
            raise ModelLoadError(f"{self.path}: {name} near byte {self._at} is unknown")
        return code

    def _advance(self, size: int) -> None:
        if size > len(self.bytes) - self._at:
            raise self._cut_off()
        self._at += size

    def _tensor_info(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string()
        num_dims = self._scalar("I")
        if num_dims > _MAX_DIMS:
            raise ModelLoadError(f"{self.path}: tensor {name} has {num_dims} dimensions")
        shape = tuple(self._scalar("Q") for _ in range(num_dims))[::-1]
        return name, shape, self._scalar("I"), self._scalar("Q")
