"""The weights of a model by their Hugging Face names, whatever file holds them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from pagewire.errors import ModelLoadError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    import torch

    from engine_core.model.part import Part
    from engine_core.model.quantized.codes import IntegerCodes
    from kernels.fp8 import Fp8Tensor
    from kernels.quantized import QuantizedTensor


class Checkpoint(Protocol):
    """Opened and checked against its own header, no weights read yet."""

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Every tensor in it, by Hugging Face name."""
        ...

    def file_of(self, name: str) -> Path:
        """The file that holds a tensor, or should."""
        ...

    def num_bytes(self, name: str) -> int:
        """The tensor's size in the file."""
        ...

    def read_into(self, name: str, out: torch.Tensor, part: Part | None = None) -> None:
        """Converts the tensor, or a part of it, into out, contiguous, of its shape, any float
        type, any device."""
        ...

    def quantized_format(self, name: str) -> str:
        """The name of the type that the tensor is stored in, as its file format calls it."""
        ...

    def read_quantized(
        self, name: str, device: torch.device
    ) -> QuantizedTensor | IntegerCodes | Fp8Tensor:
        """The tensor's own codes, where it has any (a GGUF's are those whose format is one of
        kernels.quantized.FORMATS); may be the file's memory, which nobody writes."""
        ...


def check_shapes(checkpoint: Checkpoint, expected: Mapping[str, tuple[int, ...]]) -> None:
    """Raises ModelLoadError naming the file and the first tensor that is missing or misshapen."""
    found = checkpoint.shapes()
    for name, shape in expected.items():
        if name not in found:
            raise ModelLoadError(f"{checkpoint.file_of(name)}: tensor {name} is missing")
        if found[name] != shape:
            raise ModelLoadError(
                f"{checkpoint.file_of(name)}: tensor {name} has shape {list(found[name])}, "
                f"expected {list(shape)}"
            )
