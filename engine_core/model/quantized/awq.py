"""AWQ (Lin et al., 2023, arXiv:2306.00978) in AutoAWQ's gemm layout.

qweight [in, out / 8], qzeros [groups, out / 8] int32 and scales [groups, out]; the eight
codes of a word are of eight neighbouring rows of the weight, in the order of _ROWS.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine_core.model.quantized.codes import IntegerCodes
from engine_core.model.quantized.scheme import (
    FLOAT_DTYPES,
    Exceptions,
    Kind,
    Options,
    StoredMatrix,
    TensorFile,
    matrices_by_qweight,
    read_scales,
    want_matrix,
    want_tensor,
)
from pagewire.errors import ModelLoadError

_BITS = 4
_ROWS = (0, 2, 4, 6, 1, 3, 5, 7)
"""Of each eight, by place in the word."""
_KNOWN = (
    *("quant_method", "bits", "w_bit", "group_size", "q_group_size", "zero_point", "version"),
    *("format", "checkpoint_format", "modules_to_not_convert"),
)
_WITHOUT_EFFECT = (
    *("backend", "do_fuse", "exllama_config", "fuse_max_seq_len", "modules_to_fuse"),
    *("sym", "lm_head", "meta", "damp_percent"),
)
"""Of how it was made, or of how another program is to compute it."""


@dataclass(frozen=True, slots=True)
class Awq:
    group_size: int
    """-1: all features."""
    exceptions: Exceptions
    method: str = "awq"
    kinds: frozenset[Kind] = frozenset({"int4"})

    @classmethod
    def from_options(cls, options: Options) -> Awq:
        """Raises ModelLoadError naming the file and the key."""
        options.refuse_others((*_KNOWN, *_WITHOUT_EFFECT))
        options.one_of("w_bit" if "w_bit" in options.raw else "bits", (_BITS,))
        options.one_of("zero_point", (True,), default=True)
        for key in ("version", "format", "checkpoint_format"):
            options.one_of(key, ("gemm", "GEMM"), default="gemm")
        key = "q_group_size" if "q_group_size" in options.raw else "group_size"
        size = options.group_size(key)
        names = options.exceptions("modules_to_not_convert")
        return cls(size, names)

    def matrices(self, file: TensorFile) -> dict[str, StoredMatrix]:
        return matrices_by_qweight(file, self.exceptions, self._matrix)

    def _matrix(self, file: TensorFile, module: str) -> StoredMatrix:
        parts = tuple(f"{module}.{part}" for part in ("qweight", "qzeros", "scales"))
        in_features, words = want_matrix(file, parts[0])
        want_tensor(file, parts[0], [(in_features, words)], ("I32",))
        size = in_features if self.group_size == -1 else self.group_size
        if in_features % size:
            raise ModelLoadError(
                f"{file.file_of(parts[0])}: {module} has {in_features} input features, no "
                f"multiple of the group size {size}"
            )
        groups, out_features = in_features // size, words * 8
        want_tensor(file, parts[1], [(groups, words)], ("I32",))
        want_tensor(file, parts[2], [(groups, out_features)], FLOAT_DTYPES)

        def read(device: torch.device) -> IntegerCodes:
            weight, zeros = (_rows(file.read(part, device)) for part in parts[:2])
            scales = read_scales(file, parts[2], device).T.contiguous()
            return IntegerCodes(weight, scales, zeros.to(torch.int16), size)

        return StoredMatrix((out_features, in_features), parts, "int4", read)


def _rows(words: torch.Tensor) -> torch.Tensor:
    """[n, out / 8] -> [out, n] uint8."""
    columns = words.T.contiguous()
    shape = (columns.shape[0], len(_ROWS), columns.shape[1])
    rows = torch.empty(shape, dtype=torch.uint8, device=words.device)
    for place, row in enumerate(_ROWS):
        rows[:, row] = (columns >> (_BITS * place)) & 15
    return rows.flatten(0, 1)
