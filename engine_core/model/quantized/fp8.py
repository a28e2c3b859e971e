"""Checkpoints of quant_method fp8: 8-bit floats with a scale for each block, or for all.

In blocks (DeepSeek-V3, arXiv:2412.19437) the scales are called weight_scale_inv, but
multiply as all do. With activation_scheme static, input_scale is of what is multiplied.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine_core.model.quantized.scheme import (
    FLOAT_DTYPES,
    Exceptions,
    Kind,
    Options,
    StoredMatrix,
    TensorFile,
    read_scales,
    want_matrix,
    want_tensor,
)
from kernels.fp8 import Fp8Tensor
from pagewire.errors import ModelLoadError

E4M3 = "F8_E4M3"
_SUFFIX = ".weight"
_SCALES = ("weight_scale_inv", "weight_scale")
_INPUT_SCALES = ("input_scale", "activation_scale")
_EXCEPTIONS = ("modules_to_not_convert", "ignored_layers")
_KNOWN = (
    *("quant_method", "activation_scheme", "weight_block_size", "fmt", "scale_fmt"),
    *_EXCEPTIONS,
)
_WITHOUT_EFFECT = ("dequantize", "is_checkpoint_fp8_serialized", "kv_cache_scheme")


@dataclass(frozen=True, slots=True)
class Fp8:
    block: tuple[int, int] | None
    """None: a scale for all of a matrix, or for each of its rows."""
    is_static: bool
    exceptions: tuple[Exceptions, ...]
    method: str = "fp8"
    kinds: frozenset[Kind] = frozenset({"fp8"})

    @classmethod
    def from_options(cls, options: Options) -> Fp8:
        """Raises ModelLoadError naming the file and the key."""
        if options.raw.get("expert_dtype") == "fp8":
            options.raw = {k: v for k, v in options.raw.items() if k != "expert_dtype"}
        options.refuse_others((*_KNOWN, *_WITHOUT_EFFECT))
        options.one_of("fmt", ("e4m3", "float8_e4m3fn"), default="e4m3")
        options.one_of("scale_fmt", ("float",), default="float")
        scheme = options.one_of("activation_scheme", ("dynamic", "static"), default="dynamic")
        block = None
        if options.raw.get("weight_block_size") is not None:
            sizes = options.integers("weight_block_size")
            if len(sizes) != 2 or min(sizes) < 1:
                raise options.wrong("weight_block_size", "two integers above 0")
            block = (sizes[0], sizes[1])
            if scheme == "static":
                raise options.wrong("activation_scheme", "dynamic, as the weights have blocks")
        return cls(
            block,
            scheme == "static",
            tuple(options.exceptions(key) for key in _EXCEPTIONS),
        )

    def matrices(self, file: TensorFile) -> dict[str, StoredMatrix]:
        found = {}
        for name in file.shapes():
            if name.endswith(_SUFFIX) and file.quantized_format(name) == E4M3:
                module = name.removesuffix(_SUFFIX)
                for exceptions in self.exceptions:
                    exceptions.check(module, file.file_of(name))
                scale = _present(file, module, _SCALES)
                static = _present(file, module, _INPUT_SCALES) if self.is_static else None
                found[name] = fp8_matrix(file, name, scale, self.block, static)
        return found


def _present(file: TensorFile, module: str, parts: tuple[str, ...]) -> str:
    names = [f"{module}.{part}" for part in parts]
    return next((name for name in names if name in file.shapes()), names[-1])


def fp8_matrix(
    file: TensorFile,
    weight: str,
    scale: str,
    block: tuple[int, int] | None,
    input_scale: str | None,
) -> StoredMatrix:
    """Of the tensors of these names; block as Fp8 has it. Raises ModelLoadError naming the
    tensor that is missing or misshapen."""
    shape = want_matrix(file, weight)
    rows, columns = shape
    want_tensor(file, weight, [shape], (E4M3,))
    one: tuple[tuple[int, ...], ...] = ((), (1,), (1, 1))
    if block is None:
        wanted = [*one, (rows, 1), (rows,)]
    else:
        wanted = [(-(-rows // block[0]), -(-columns // block[1]))]
    want_tensor(file, scale, wanted, FLOAT_DTYPES)
    parts: tuple[str, ...] = (weight, scale)
    if input_scale is not None:
        want_tensor(file, input_scale, one, FLOAT_DTYPES)
        parts = (*parts, input_scale)

    def read(device: torch.device) -> Fp8Tensor:
        data = file.read(weight, device)
        if bool((data.view(torch.uint8) & 0x7F == 0x7F).any()):
            raise ModelLoadError(f"{file.file_of(weight)}: tensor {weight} has a NaN")
        scales = read_scales(file, scale, device).float()
        size = block
        if size is None:
            size = (rows if scales.numel() == 1 else 1, columns)
            scales = scales.view(-1, 1)
        static = None
        if input_scale is not None:
            static = read_scales(file, input_scale, device).float().view(())
            if float(static) <= 0:
                raise ModelLoadError(
                    f"{file.file_of(input_scale)}: tensor {input_scale} is {float(static)}, "
                    "expected above 0"
                )
        return Fp8Tensor(shape, data, scales.contiguous(), size, static)

    return StoredMatrix(shape, parts, "fp8", read)
