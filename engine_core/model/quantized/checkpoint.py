"""A checkpoint of codes as a Checkpoint of matrices."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine_core.model.part_codes import take_part
from engine_core.model.quantized.codes import IntegerCodes
from pagewire.errors import ModelLoadError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    import torch

    from engine_core.model.part import Part
    from engine_core.model.quantized.scheme import Codes, Scheme, TensorFile


class QuantizedCheckpoint:
    """What stands for a matrix in the file appears as that matrix, the rest as it is.

    Raises ModelLoadError naming the file and the tensor.
    """

    def __init__(self, file: TensorFile, scheme: Scheme) -> None:
        self._file = file
        self.scheme = scheme
        self._matrices = scheme.matrices(file)
        hidden = {part for matrix in self._matrices.values() for part in matrix.parts}
        for name in self._matrices:
            if name in file.shapes() and name not in hidden:
                raise ModelLoadError(f"{file.file_of(name)}: tensor {name} is there as floats too")
        self._shapes = {k: shape for k, shape in file.shapes().items() if k not in hidden}
        self._shapes |= {name: matrix.shape for name, matrix in self._matrices.items()}

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self._shapes

    def file_of(self, name: str) -> Path:
        matrix = self._matrices.get(name)
        return self._file.file_of(matrix.parts[0] if matrix else name)

    def num_bytes(self, name: str) -> int:
        matrix = self._matrices.get(name)
        return sum(map(self._file.num_bytes, matrix.parts if matrix else (name,)))

    def read_into(self, name: str, out: torch.Tensor, part: Part | None = None) -> None:
        matrix = self._matrices.get(name)
        if matrix is None:
            self._file.read_into(name, out, part)
            return
        codes = matrix.read(out.device)
        if part is not None:
            codes = take_part(codes, part, name)
        if isinstance(codes, IntegerCodes):
            codes.dequantize_into(out)
        else:
            out.copy_(codes.dequantize(out.dtype))

    def quantized_format(self, name: str) -> str:
        matrix = self._matrices.get(name)
        if matrix is None:
            return self._file.quantized_format(name)
        return f"{self.scheme.method} {matrix.kind}"

    def has_codes(self, name: str) -> bool:
        return name in self._matrices

    def read_quantized(self, name: str, device: torch.device) -> Codes:
        return self._matrices[name].read(device)

    def sizes(self, item_bytes: int) -> tuple[int, int]:
        """Bytes of all matrices with codes: as they are stored, and as floats of item_bytes."""
        stored = sum(self.num_bytes(name) for name in self._matrices)
        elements = sum(matrix.shape[0] * matrix.shape[1] for matrix in self._matrices.values())
        return stored, elements * item_bytes
