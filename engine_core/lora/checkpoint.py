"""An adapter's folder in PEFT's layout, checked against the model that it is to adapt."""

from __future__ import annotations

import math
import re
from hashlib import blake2b
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError
from safetensors.torch import load

from engine_core.lora.peft_config import read_peft_config
from kernels.lora import LoraPart
from pagewire.errors import ModelLoadError

if TYPE_CHECKING:
    from collections.abc import Container, Sequence
    from pathlib import Path

    from engine_core.model.lora import Product

_WEIGHTS = "adapter_model.safetensors"
_NAME = re.compile(
    r"base_model\.model\."
    # A model with images holds the decoder one deeper, in one of two orders.
    r"(?P<root>model|model\.language_model|language_model\.model)"
    r"\.(?P<rest>layers\.\d+\..+)\.lora_(?P<side>[AB])\.weight"
)
_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
DIGEST_BYTES = 32


class AdapterCheckpoint:
    """Read whole, and checked whole before anybody gets a matrix of it.

    Raises ModelLoadError naming the file, and the key or tensor that is wrong.
    """

    def __init__(self, directory: Path, products: Sequence[Product], max_rank: int) -> None:
        """products: those of the model that may have adapters."""
        if not directory.is_dir():
            raise ModelLoadError(f"{directory}: no such directory")
        self._config = read_peft_config(directory)
        self._path = directory / _WEIGHTS
        self._tensors: dict[str, torch.Tensor] = {}
        self._names: dict[tuple[str, str], str] = {}
        """(module, A or B) -> name in the file."""
        self.digest = b""
        """BLAKE2b (RFC 7693) of the two files."""
        self.rank = 0
        """The greatest of all matrices."""
        shapes = {
            module: (product.in_features, rows)
            for product in products
            for module, rows in zip(product.modules, product.rows, strict=True)
        }
        self._read_files()
        root = self._sort_tensors(shapes.keys())
        checked = set()
        for module, shape in shapes.items():
            if self._config.selects(module.replace("model", root, 1)):
                self._check(module, *shape, max_rank)
                checked.add(module)
        for (module, _), name in self._names.items():
            if module not in checked:
                raise self._wrong(name, f"is of a module that {self._config.path.name} leaves out")

    def _read_files(self) -> None:
        total = blake2b(digest_size=DIGEST_BYTES, person=b"pagewire adapter")
        for path in (self._config.path, self._path):
            try:
                data = path.read_bytes()
            except FileNotFoundError:
                raise ModelLoadError(
                    f"{path}: no such file; pickled adapters (.bin) are not read"
                ) from None
            except OSError as error:
                raise ModelLoadError(f"{path}: {error.strerror}") from error
            total.update(blake2b(data, digest_size=DIGEST_BYTES).digest())
        self.digest = total.digest()
        try:
            self._tensors = load(data)
        except SafetensorError as error:
            raise ModelLoadError(f"{self._path}: not a whole safetensors file: {error}") from error
        except KeyError as error:  # safetensors has types that torch has not, such as F4
            raise ModelLoadError(
                f"{self._path}: a tensor has dtype {error.args[0]}, expected floats"
            ) from error

    def _sort_tensors(self, known: Container[str]) -> str:
        """By module; returns what the names of this file have for `model`."""
        root = "model"
        for name in sorted(self._tensors):
            match = _NAME.fullmatch(name)
            module = "" if match is None else f"model.{match['rest']}"
            if match is None or module not in known:
                raise self._wrong(
                    name,
                    "is of no matrix that can be adapted here, which are those of attention and "
                    "of MLPs without experts",
                )
            root = match["root"]
            self._names[module, match["side"]] = name
        if not self._names:
            raise ModelLoadError(f"{self._path}: there is no tensor in it")
        return root

    def _check(self, module: str, in_features: int, rows: int, max_rank: int) -> None:
        rank = self._config.rank_of(module)
        if rank > max_rank:
            raise ModelLoadError(
                f"{self._config.path}: the rank of {module} is {rank}, above --max-lora-rank "
                f"{max_rank}"
            )
        if not math.isfinite(self._config.scale_of(module)):
            raise ModelLoadError(f"{self._config.path}: the scale of {module} is not finite")
        for side, expected in (("A", (rank, in_features)), ("B", (rows, rank))):
            name = self._names.get((module, side))
            if name is None:
                raise ModelLoadError(f"{self._path}: lora_{side} of {module} is missing")
            tensor = self._tensors[name]
            if tuple(tensor.shape) != expected:
                shape = list(tensor.shape)
                raise self._wrong(name, f"has shape {shape}, expected {list(expected)}")
            if tensor.dtype not in _FLOATS:
                raise self._wrong(name, f"has dtype {tensor.dtype}, expected floats")
            if not bool(tensor.isfinite().all()):
                raise self._wrong(name, "is not finite")
        self.rank = max(self.rank, rank)

    def _wrong(self, name: str, what: str) -> ModelLoadError:
        return ModelLoadError(f"{self._path}: tensor {name} {what}")

    def part(self, module: str, dtype: torch.dtype, device: torch.device) -> LoraPart | None:
        """None where the module has no adapter."""
        if (module, "A") not in self._names:
            return None
        scales = {"A": 1.0, "B": self._config.scale_of(module)}
        parts = {}
        for side, scale in scales.items():
            name = self._names[module, side]
            part = (self._tensors[name].float() * scale).to(dtype)
            if not bool(part.isfinite().all()):
                raise self._wrong(name, f"times its scale of {scale:g} is beyond {dtype}")
            parts[side] = part.to(device)
        return LoraPart(parts["A"], parts["B"])
