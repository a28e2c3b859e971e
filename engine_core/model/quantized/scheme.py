"""What the readers of quantized checkpoints have in common."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

import torch

from engine_core.model.fields import Fields
from engine_core.model.quantized.codes import IntegerCodes
from kernels.fp8 import Fp8Tensor
from pagewire.errors import ModelLoadError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping
    from pathlib import Path

    from engine_core.model.part import Part

Codes = IntegerCodes | Fp8Tensor
Kind = Literal["int4", "int8", "fp8"]


class TensorFile(Protocol):
    """Tensors as they are stored, by name."""

    def shapes(self) -> Mapping[str, tuple[int, ...]]: ...
    def file_of(self, name: str) -> Path: ...
    def num_bytes(self, name: str) -> int: ...
    def quantized_format(self, name: str) -> str:
        """Its dtype, as safetensors calls it."""
        ...

    def read(self, name: str, device: torch.device) -> torch.Tensor: ...
    def read_into(self, name: str, out: torch.Tensor, part: Part | None = None) -> None: ...


@dataclass(frozen=True, slots=True)
class StoredMatrix:
    """A matrix of several tensors, checked by their headers."""

    shape: tuple[int, int]
    parts: tuple[str, ...]
    """The tensors."""
    kind: Kind
    read: Callable[[torch.device], Codes]
    """Raises ModelLoadError naming the tensor whose values are not possible."""


class Scheme(Protocol):
    """One quantization_config, checked."""

    @property
    def method(self) -> str:
        """quant_method"""
        ...

    @property
    def kinds(self) -> frozenset[Kind]:
        """That it speaks of."""
        ...

    def matrices(self, file: TensorFile) -> dict[str, StoredMatrix]:
        """By the name of the weight that they stand for. Raises ModelLoadError naming the
        file and the tensor that is missing, misshapen or not to be there."""
        ...


class Options(Fields):
    """quantization_config, or an object in it, whose complaints have the whole path."""

    def __init__(self, raw: Mapping[str, object], path: Path, prefix: str) -> None:
        super().__init__(raw, path, {key: f"{prefix}.{key}" for key in raw})
        self.prefix = prefix

    def name(self, key: str) -> str:
        return f"{self.prefix}.{key}"

    def below(self, key: str) -> Options | None:
        """The object under key."""
        table = self.table(key)
        return None if table is None else Options(table, self.path, self.name(key))

    def one_of(self, key: str, known: Collection[object], default: object = None) -> object:
        """Raises ModelLoadError for a value that is not known."""
        value = self.raw.get(key)
        if value is None:
            value = default
        # True is no 1.
        if not any(type(item) is type(value) and item == value for item in known):
            texts = ", ".join(repr(item) for item in known)
            raise ModelLoadError(
                f"{self.path}: {self.name(key)} {value!r} is not supported; known: {texts}"
            )
        return value

    def names(self, key: str) -> tuple[str, ...]:
        """A list of names of modules; absent is none."""
        value = self.raw.get(key)
        if value is None:
            return ()
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self.wrong(key, "a list of names")
        for item in value:
            if item.startswith("re:"):
                try:
                    re.compile(item[3:])
                except re.error as error:
                    raise self.wrong(key, f"regular expressions ({error})") from error
        return tuple(value)

    def group_size(self, key: str) -> int:
        """Of how many features; -1 is all. Raises ModelLoadError for what is neither."""
        size = self.integer(key)
        if size != -1 and size < 1:
            raise self.wrong(key, "-1 or above 0")
        return size

    def exceptions(self, key: str) -> Exceptions:
        """The modules that a list under key names; absent is none."""
        return Exceptions(self.names(key), f"{self.path}: {self.name(key)}")

    def refuse_others(self, known: Collection[str]) -> None:
        """Raises ModelLoadError for an option that is set and not known."""
        for key, value in self.raw.items():
            if key not in known and value not in (None, False, "", [], {}):
                raise ModelLoadError(
                    f"{self.path}: {self.name(key)} is {value!r}, which is not supported"
                )


@dataclass(frozen=True, slots=True)
class Exceptions:
    """The modules that a checkpoint says are not quantized."""

    names: tuple[str, ...]
    origin: str
    """The file and the key."""

    def check(self, module: str, file: Path) -> None:
        """Raises ModelLoadError for a module that is quantized all the same."""
        for name in self.names:
            if is_named(module, name):
                raise ModelLoadError(
                    f"{file}: {module} is quantized, but {self.origin} has {name!r}"
                )


def is_named(module: str, name: str) -> bool:
    """Whether name is of the module, or of one that it is in, wherever that is; re: begins a
    regular expression, which matches from the module's beginning."""
    if name.startswith("re:"):
        return re.match(name[3:], module) is not None
    return f".{name}." in f".{module}."


_QWEIGHT = ".qweight"


def matrices_by_qweight(
    file: TensorFile, exceptions: Exceptions, matrix: Callable[[TensorFile, str], StoredMatrix]
) -> dict[str, StoredMatrix]:
    """Of every module that has a qweight, by the name of its weight; matrix: of a module.
    Raises ModelLoadError for one that is among the exceptions."""
    found = {}
    for name in file.shapes():
        if name.endswith(_QWEIGHT):
            module = name.removesuffix(_QWEIGHT)
            exceptions.check(module, file.file_of(name))
            found[f"{module}.weight"] = matrix(file, module)
    return found


def want_tensor(
    file: TensorFile, name: str, shapes: Collection[tuple[int, ...]], dtypes: Collection[str]
) -> None:
    """Raises ModelLoadError naming the tensor that is missing or of another shape or dtype."""
    found = file.shapes().get(name)
    if found is None:
        raise ModelLoadError(f"{file.file_of(name)}: tensor {name} is missing")
    if found not in shapes:
        texts = " or ".join(str(list(shape)) for shape in shapes)
        raise ModelLoadError(
            f"{file.file_of(name)}: tensor {name} has shape {list(found)}, expected {texts}"
        )
    if file.quantized_format(name) not in dtypes:
        raise ModelLoadError(
            f"{file.file_of(name)}: tensor {name} has dtype {file.quantized_format(name)}, "
            f"expected {' or '.join(dtypes)}"
        )


def want_matrix(file: TensorFile, name: str) -> tuple[int, int]:
    shape = file.shapes()[name]
    if len(shape) != 2 or 0 in shape:
        raise ModelLoadError(
            f"{file.file_of(name)}: tensor {name} has shape {list(shape)}, expected a matrix"
        )
    return shape[0], shape[1]


def read_scales(file: TensorFile, name: str, device: torch.device) -> torch.Tensor:
    """Raises ModelLoadError where one is not finite."""
    scales = file.read(name, device)
    if not bool(torch.isfinite(scales).all()):
        raise ModelLoadError(
            f"{file.file_of(name)}: tensor {name} has a scale that is not a finite number"
        )
    return scales


FLOAT_DTYPES = ("F16", "BF16", "F32")
