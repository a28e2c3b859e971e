"""The header of a GGUF file and the bytes of its tensors.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3,
little-endian. The gguf package's own reader makes numpy objects of each of the
tokenizer's hundred thousand strings, which takes seconds; the engine needs none
of them, so long arrays are stepped over here.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pagewire.errors import ModelLoadError

if TYPE_CHECKING:
    from pathlib import Path

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32
_MAX_DIMS = 4
_KEPT_ARRAY_LENGTH = 1024
_STRING, _ARRAY = 8, 9
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

Value = int | float | bool | str | list["Value"] | None


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
    array is None. Raises ModelLoadError naming the file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            # A private mapping: torch warns of memory that it may not write, though nobody does.
            with path.open("rb") as file:
                self.bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except (OSError, ValueError) as error:
            raise ModelLoadError(f"{path}: cannot be mapped: {error}") from error
        self._at = 0
        try:
            self._read_header()
        except (struct.error, IndexError) as error:
            raise ModelLoadError(
                f"{path}: header is cut off at byte {self._at} of {len(self.bytes)}"
            ) from error
        except UnicodeDecodeError as error:
            raise ModelLoadError(
                f"{path}: header text is not UTF-8 near byte {self._at}"
            ) from error

    def read_array(self, key: str) -> list[Value]:
        """A metadata array of any length. Raises ModelLoadError if there is none."""
        if key not in self._value_starts:
            raise ModelLoadError(f"{self.path}: {key} is missing")
        self._at = self._value_starts[key]
        if self._scalar("I") != _ARRAY:
            raise ModelLoadError(f"{self.path}: {key} is not an array")
        kind, length = self._scalar("I"), self._scalar("Q")
        return [self._value(kind) for _ in range(length)]

    def _read_header(self) -> None:
        if self.bytes[:4] != _MAGIC:
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
        self.metadata: dict[str, Value] = {}
        self._value_starts: dict[str, int] = {}
        for _ in range(num_pairs):
            key = self._string()
            self._value_starts[key] = self._at
            self.metadata[key] = self._value(self._scalar("I"))
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

    def _scalar(self, code: str) -> int:
        (value,) = struct.unpack_from("<" + code, self.bytes, self._at)
        self._at += struct.calcsize("<" + code)
        return value  # type: ignore[no-any-return]  # struct has no static types

    def _string(self) -> str:
        start = self._skip_string()
        return self.bytes[start : self._at].decode()

    def _skip_string(self) -> int:
        length = self._scalar("Q")
        start = self._at
        if length > len(self.bytes) - start:
            raise IndexError
        self._at += length
        return start

    def _value(self, kind: int) -> Value:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            return self._array()
        if kind not in _SCALARS:
            raise ModelLoadError(f"{self.path}: value type {kind} near byte {self._at} is unknown")
        return self._scalar(_SCALARS[kind])

    def _array(self) -> Value:
        kind, length = self._scalar("I"), self._scalar("Q")
        if length <= _KEPT_ARRAY_LENGTH:
            return [self._value(kind) for _ in range(length)]
        if kind == _STRING:
            for _ in range(length):
                self._skip_string()
            return None
        if kind not in _SCALARS:
            raise ModelLoadError(f"{self.path}: array of type {kind} near byte {self._at}")
        size = length * struct.calcsize("<" + _SCALARS[kind])
        if size > len(self.bytes) - self._at:
            raise IndexError
        self._at += size
        return None

    def _tensor_info(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string()
        num_dims = self._scalar("I")
        if num_dims > _MAX_DIMS:
            raise ModelLoadError(f"{self.path}: tensor {name} has {num_dims} dimensions")
        shape = tuple(self._scalar("Q") for _ in range(num_dims))[::-1]
        return name, shape, self._scalar("I"), self._scalar("Q")
