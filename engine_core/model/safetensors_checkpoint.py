"""model.safetensors, whole or sharded with an index, as a Checkpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from engine_core.model.hf_config import read_json
from pagewire.errors import ModelLoadError

if TYPE_CHECKING:
    from pathlib import Path

    import torch

    from engine_core.model.part import Part
    from kernels.quantized import QuantizedTensor

_WHOLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_FLOAT_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
_CODE_BYTES = {"I64": 8, "I32": 4, "I8": 1, "U8": 1, "F8_E4M3": 1}


class SafetensorsCheckpoint:
    """Memory-mapped. Raises ModelLoadError naming the file, and the tensor where it is one.

    prefix is taken off the names that begin with it. has_codes allows tensors that are not
    weights by themselves.
    """

    def __init__(self, directory: Path, prefix: str = "", *, has_codes: bool = False) -> None:
        self._prefix = prefix
        self._item_bytes = _FLOAT_BYTES | (_CODE_BYTES if has_codes else {})
        self._stored: dict[str, str] = {}
        self._fallback = directory / _WHOLE
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._files: dict[str, Path] = {}
        self._num_bytes: dict[str, int] = {}
        self._dtypes: dict[str, str] = {}
        self._open: dict[Path, Any] = {}
        if self._fallback.is_file():
            self._add(self._fallback)
        elif (index := directory / _INDEX).is_file():
            self._fallback = index
            self._add_shards(index)
        else:
            raise ModelLoadError(
                f"{directory}: neither {_WHOLE} nor {_INDEX} in it; pickled weights (.bin, .pt) "
                "are not read"
            )

    def _add_shards(self, index: Path) -> None:
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ModelLoadError(f"{index}: weight_map is missing or empty")
        for shard in sorted({str(shard) for shard in weight_map.values()}):
            path = index.parent / shard
            if path.parent != index.parent or not path.is_file():
                raise ModelLoadError(f"{path}: no such file, but {index.name} names it")
            self._add(path)
        for name, shard in weight_map.items():
            path = index.parent / str(shard)
            if self._files.get(name.removeprefix(self._prefix)) != path:
                raise ModelLoadError(
                    f"{path}: tensor {name} is missing, but {index.name} has it here"
                )

    def _add(self, path: Path) -> None:
        try:
            file: Any = safe_open(path, framework="pt", device="cpu")
            names = list(file.keys())
        except (SafetensorError, OSError) as error:
            raise ModelLoadError(f"{path}: not a whole safetensors file: {error}") from error
        self._open[path] = file
        for stored in names:
            name = stored.removeprefix(self._prefix)
            self._stored[name] = stored
            part = file.get_slice(stored)
            dtype = part.get_dtype()
            if dtype not in self._item_bytes:
                known = ", ".join(self._item_bytes)
                raise ModelLoadError(f"{path}: tensor {name} has dtype {dtype}; known: {known}")
            if name in self._files:
                raise ModelLoadError(f"{path}: tensor {name} is in {self._files[name].name} too")
            shape = tuple(part.get_shape())
            size = self._item_bytes[dtype]
            for dim in shape:
                size *= dim
            self._shapes[name], self._files[name], self._num_bytes[name] = shape, path, size
            self._dtypes[name] = dtype

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return self._shapes

    def file_of(self, name: str) -> Path:
        return self._files.get(name, self._fallback)

    def num_bytes(self, name: str) -> int:
        return self._num_bytes[name]

    def read(self, name: str, device: torch.device) -> torch.Tensor:
        tensor: torch.Tensor = self._open[self._files[name]].get_tensor(self._stored[name])
        return tensor.to(device)

    def read_into(self, name: str, out: torch.Tensor, part: Part | None = None) -> None:
        if self._dtypes[name] not in _FLOAT_BYTES:
            raise ModelLoadError(
                f"{self.file_of(name)}: tensor {name} has dtype {self._dtypes[name]}, but no "
                "codes are expected there"
            )
        file = self._open[self._files[name]]
        if part is None:
            out.copy_(file.get_tensor(self._stored[name]))
            return
        stored, start = file.get_slice(self._stored[name]), 0
        for rows in part.rows:
            target = out[start : start + len(rows)]
            if part.columns is None:
                target.copy_(stored[rows.start : rows.stop])
            else:
                columns = slice(part.columns.start, part.columns.stop)
                target.copy_(stored[rows.start : rows.stop, columns])
            start += len(rows)

    def quantized_format(self, name: str) -> str:
        return self._dtypes[name]

    def read_quantized(self, name: str, device: torch.device) -> QuantizedTensor:
        raise ModelLoadError(f"{self.file_of(name)}: tensor {name} is not stored quantized")
