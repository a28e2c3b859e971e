"""Checkpoints of llm-compressor: quant_method compressed-tensors.

config_groups say which modules are quantized how. pack-quantized holds 32-bit words of
codes, weight_packed [out, in * bits / 32], and zeros packed along the rows; int-quantized,
float-quantized and naive-quantized hold a byte for each weight. Integers are signed: their
codes are 2 ** (bits - 1) more.
https://github.com/vllm-project/compressed-tensors
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch

from engine_core.model.quantized.codes import IntegerCodes
from engine_core.model.quantized.fp8 import E4M3, fp8_matrix
from engine_core.model.quantized.gptq import read_groups
from engine_core.model.quantized.scheme import (
    FLOAT_DTYPES,
    Kind,
    Options,
    StoredMatrix,
    TensorFile,
    is_named,
    read_scales,
    want_matrix,
    want_tensor,
)
from engine_core.model.quantized.words import unpack_columns
from pagewire.errors import ModelLoadError

if TYPE_CHECKING:
    from pathlib import Path

_PACKED, _PLAIN = ".weight_packed", ".weight"
_BYTE_FORMATS = ("int-quantized", "float-quantized", "naive-quantized")
_FORMATS = ("pack-quantized", *_BYTE_FORMATS)
_KNOWN = (
    *("quant_method", "format", "config_groups", "ignore", "sparsity_config", "transform_config"),
    *("kv_cache_scheme", "quantization_status"),
)
_WITHOUT_EFFECT = ("global_compression_ratio", "version")
_WEIGHTS = (
    *("num_bits", "type", "symmetric", "strategy", "group_size", "block_structure", "dynamic"),
    *("actorder",),
)
_OBSERVED = ("observer", "observer_kwargs", "scale_dtype", "zp_dtype")
"""Of how it was made."""
_BYTES = 8
_ONE: tuple[tuple[int, ...], ...] = ((), (1,), (1, 1))

Form = Literal["words", "bytes", "floats"]


@dataclass(frozen=True, slots=True)
class Group:
    """How the modules of one of config_groups are stored."""

    targets: tuple[str, ...]
    """Names of modules, re: and a regular expression, or Linear for all."""
    form: Form
    bits: int
    is_symmetric: bool
    group_size: int | None
    """None: a scale for each row, or for all."""
    block: tuple[int, int] | None
    has_static_input: bool

    @property
    def kind(self) -> Kind:
        return "fp8" if self.form == "floats" else "int4" if self.bits == 4 else "int8"

    def matches(self, module: str) -> bool:
        return any(target != "Linear" and is_named(module, target) for target in self.targets)


@dataclass(frozen=True, slots=True)
class CompressedTensors:
    groups: tuple[Group, ...]
    ignored: tuple[str, ...]
    path: Path
    method: str = "compressed-tensors"

    @property
    def kinds(self) -> frozenset[Kind]:
        return frozenset(group.kind for group in self.groups)

    @classmethod
    def from_options(cls, options: Options) -> CompressedTensors:
        """Raises ModelLoadError naming the file and the key."""
        options.refuse_others((*_KNOWN, *_WITHOUT_EFFECT))
        # Early files say frozen of the same tensors.
        options.one_of("quantization_status", ("compressed", "frozen"), default="compressed")
        sparsity = options.below("sparsity_config")
        if sparsity is not None:
            sparsity.one_of("format", ("dense",), default="dense")
        transforms = options.below("transform_config")
        if transforms is not None:
            transforms.refuse_others(())
        groups = options.below("config_groups")
        if not groups or not groups.raw:
            raise options.wrong("config_groups", "an object of groups")
        each = [groups.below(key) for key in groups.raw]
        return cls(
            tuple(_read_group(options, group) for group in each if group is not None),
            options.names("ignore"),
            options.path,
        )

    def matrices(self, file: TensorFile) -> dict[str, StoredMatrix]:
        found = {}
        shapes = file.shapes()
        for name in shapes:
            module = name.removesuffix(_PACKED)
            is_packed = module != name
            if not is_packed:
                module = name.removesuffix(_PLAIN)
                if module == name or file.quantized_format(name) not in ("I8", E4M3):
                    continue
            group = self._group_of(module, file.file_of(name))
            if is_packed != (group.form == "words"):
                raise ModelLoadError(
                    f"{file.file_of(name)}: tensor {name} is not of the format that {self.path} "
                    f"gives {module}"
                )
            read = _fp8 if group.form == "floats" else _packed if is_packed else _int8
            found[f"{module}{_PLAIN}"] = read(file, module, group)
        return found

    def _group_of(self, module: str, file: Path) -> Group:
        """Names go before Linear."""
        for name in self.ignored:
            if name == module or (name.startswith("re:") and is_named(module, name)):
                raise ModelLoadError(
                    f"{file}: {module} is quantized, but {self.path}: quantization_config.ignore "
                    f"has {name!r}"
                )
        for group in self.groups:
            if group.matches(module):
                return group
        for group in self.groups:
            if "Linear" in group.targets:
                return group
        raise ModelLoadError(
            f"{file}: {module} is quantized, but no target of {self.path}: "
            "quantization_config.config_groups names it"
        )


def _read_group(options: Options, group: Options) -> Group:
    group.refuse_others(("targets", "weights", "input_activations", "format"))
    stored = group if group.raw.get("format") else options
    name = stored.one_of("format", _FORMATS)
    weights = group.below("weights")
    if weights is None:
        raise group.wrong("weights", "an object")
    weights.refuse_others((*_WEIGHTS, *_OBSERVED))
    kind = weights.one_of("type", ("int", "float"), default="int")
    is_float = kind == "float"
    if is_float and name == "pack-quantized":
        raise stored.wrong("format", f"one of {', '.join(_BYTE_FORMATS)} for floats")
    bits = weights.one_of("num_bits", (8,) if is_float else (4, 8), default=8)
    assert isinstance(bits, int)
    weights.one_of("dynamic", (False,), default=False)
    # The others say how the weights were found; group has a tensor weight_g_idx.
    weights.one_of("actorder", ("weight", "static", "group", "dynamic", True, False), default=False)
    is_symmetric = weights.flag("symmetric", default=True)
    if is_float and not is_symmetric:
        raise weights.wrong("symmetric", "true for floats")
    group_size = weights.optional_integer("group_size")
    guess = "group" if group_size is not None and group_size > 0 else "channel"
    known = ("tensor", "channel", "block") if is_float else ("tensor", "channel", "group")
    strategy = weights.one_of("strategy", known, default=guess)
    block = None
    if strategy == "block":
        sizes = weights.integers("block_structure")
        if len(sizes) != 2 or min(sizes) < 1:
            raise weights.wrong("block_structure", "two integers above 0")
        block = (sizes[0], sizes[1])
    if strategy == "group" and (group_size is None or group_size < 1):
        raise weights.wrong("group_size", "an integer above 0")
    return Group(
        targets=group.names("targets"),
        form="floats" if is_float else "words" if name == "pack-quantized" else "bytes",
        bits=bits,
        is_symmetric=is_symmetric,
        group_size=group_size if strategy == "group" else None,
        block=block,
        has_static_input=is_float and _has_static_input(group, block),
    )


def _has_static_input(group: Options, block: tuple[int, int] | None) -> bool:
    """Of floats; what multiplies integers is quantized finer here, or not at all."""
    inputs = group.below("input_activations")
    if inputs is None:
        return False
    inputs.refuse_others((*_WEIGHTS, *_OBSERVED))
    inputs.one_of("num_bits", (8,), default=8)
    is_dynamic = inputs.flag("dynamic")
    if not is_dynamic and block is not None:
        raise inputs.wrong("dynamic", "true, as the weights have blocks")
    return not is_dynamic


def _fp8(file: TensorFile, module: str, group: Group) -> StoredMatrix:
    static = f"{module}.input_scale" if group.has_static_input else None
    return fp8_matrix(file, f"{module}.weight", f"{module}.weight_scale", group.block, static)


def _int8(file: TensorFile, module: str, group: Group) -> StoredMatrix:
    weight, zeros = f"{module}.weight", f"{module}.weight_zero_point"
    shape = want_matrix(file, weight)
    want_tensor(file, weight, [shape], ("I8",))
    scale, scale_shapes, size = _want_scales(file, module, group, shape)
    parts: tuple[str, ...] = (weight, scale)
    if not group.is_symmetric:
        want_tensor(file, zeros, scale_shapes, ("I8",))
        parts = (*parts, zeros)

    def read(device: torch.device) -> IntegerCodes:
        codes = file.read(weight, device).view(torch.uint8) ^ 0x80
        scales = _per_row(read_scales(file, scale, device), shape[0])
        stored = torch.zeros_like(scales, dtype=torch.int16)
        if not group.is_symmetric:
            stored = _per_row(file.read(zeros, device), shape[0]).to(torch.int16)
        return IntegerCodes(codes, scales, stored + 128, size)

    return StoredMatrix(shape, parts, group.kind, read)


def _packed(file: TensorFile, module: str, group: Group) -> StoredMatrix:
    packed, zeros, g_idx, stated = (
        f"{module}.weight_{part}" for part in ("packed", "zero_point", "g_idx", "shape")
    )
    rows, words = want_matrix(file, packed)
    per_word = 32 // group.bits
    want_tensor(file, stated, [(2,)], ("I64", "I32"))
    known = file.read(stated, torch.device("cpu")).tolist()
    if known[0] != rows or -(-known[1] // per_word) != words:
        raise ModelLoadError(
            f"{file.file_of(packed)}: tensor {packed} has shape {[rows, words]}, but {stated} "
            f"is {known}"
        )
    shape = (rows, known[1])
    want_tensor(file, packed, [(rows, words)], ("I32",))
    scale, _, size = _want_scales(file, module, group, shape)
    groups = -(-shape[1] // size)
    parts: tuple[str, ...] = (packed, stated, scale)
    if not group.is_symmetric:
        want_tensor(file, zeros, [(-(-rows // per_word), groups)], ("I32",))
        parts = (*parts, zeros)
    has_groups = g_idx in file.shapes()
    if has_groups:
        want_tensor(file, g_idx, [(shape[1],)], ("I32", "I64"))
        parts = (*parts, g_idx)

    def read(device: torch.device) -> IntegerCodes:
        codes = unpack_columns(file.read(packed, device), group.bits)[:, : shape[1]]
        scales = _per_row(read_scales(file, scale, device), rows)
        stored = torch.full_like(scales, 1 << (group.bits - 1), dtype=torch.int16)
        if not group.is_symmetric:
            columns = unpack_columns(file.read(zeros, device).T, group.bits)
            stored = columns[:, :rows].T.to(torch.int16).contiguous()
        group_of = read_groups(file, g_idx, size, groups, device) if has_groups else None
        return IntegerCodes(codes.contiguous(), scales, stored, size, group_of)

    return StoredMatrix(shape, parts, group.kind, read)


def _want_scales(
    file: TensorFile, module: str, group: Group, shape: tuple[int, int]
) -> tuple[str, list[tuple[int, ...]], int]:
    """The tensor, the shapes that it may have, and the features of a group."""
    rows, columns = shape
    size = columns if group.group_size is None else group.group_size
    name = f"{module}.weight_scale"
    shapes: list[tuple[int, ...]] = [(rows, -(-columns // size))]
    if group.group_size is None:
        shapes += [(rows,), *_ONE]
    want_tensor(file, name, shapes, FLOAT_DTYPES)
    return name, shapes, size


def _per_row(stored: torch.Tensor, rows: int) -> torch.Tensor:
    """[rows, groups], whatever a single scale or one a row is stored as."""
    if stored.ndim == 2 and stored.shape[0] == rows:
        return stored
    return stored.reshape(-1, 1).expand(rows, 1).contiguous()
