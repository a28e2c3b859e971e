"""Which scheme a config.json asks for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine_core.model.quantized.awq import Awq
from engine_core.model.quantized.compressed_tensors import CompressedTensors
from engine_core.model.quantized.fp8 import Fp8
from engine_core.model.quantized.gptq import Gptq
from engine_core.model.quantized.scheme import Options

if TYPE_CHECKING:
    from collections.abc import Callable

    from engine_core.model.fields import Fields
    from engine_core.model.quantized.scheme import Scheme

_SCHEMES: dict[str, Callable[[Options], Scheme]] = {
    "awq": Awq.from_options,
    "gptq": Gptq.from_options,
    "compressed-tensors": CompressedTensors.from_options,
    "fp8": Fp8.from_options,
}
_KEYS = ("quantization_config", "compression_config")
"""The latter is llm-compressor's first name for it."""


def read_scheme(fields: Fields) -> Scheme | None:
    """None for a checkpoint of floats. Raises ModelLoadError naming the file and the key of a
    method or an option that is not supported."""
    for key in _KEYS:
        table = fields.table(key)
        if table is not None:
            options = Options(table, fields.path, key)
            method = options.one_of("quant_method", tuple(_SCHEMES))
            return _SCHEMES[str(method)](options)
    return None
