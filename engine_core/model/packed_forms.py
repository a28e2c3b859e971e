"""The forms in which backends multiply codes, and what has to be floats instead."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine_core.model.quantized.codes import IntegerCodes, NoPackedForm
from kernels.fp8 import Fp8Tensor
from kernels.int4 import BLOCK, Int4Tensor
from kernels.quantized import QuantizedTensor

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from kernels.ops import LinearWeight, Ops

PackedTensor = QuantizedTensor | Int4Tensor | Fp8Tensor


def pack(codes: QuantizedTensor | IntegerCodes | Fp8Tensor, ops: Ops) -> PackedTensor:
    """The same weights as these ops multiply them. Raises NoPackedForm."""
    if isinstance(codes, QuantizedTensor):
        return codes
    if isinstance(codes, Fp8Tensor):
        if not ops.computes_fp8:
            raise NoPackedForm(f"the {ops.name} kernels have no products with fp8 codes")
        columns = codes.block[1]
        if columns < codes.shape[1] and columns % BLOCK:
            raise NoPackedForm(f"a scale for each {columns} features; want a multiple of {BLOCK}")
        return codes
    if ops.computes_int4:
        return codes.to_int4()
    if ops.computes_quantized:
        return codes.to_blocks()
    raise NoPackedForm(f"the {ops.name} kernels have no products with integer codes")


def check_one_product(parts: Sequence[PackedTensor]) -> None:
    """Raises NoPackedForm for parts that are not of one product."""
    first = parts[0]
    if any(type(part) is not type(first) for part in parts):
        raise NoPackedForm("side by side with other forms")
    if isinstance(first, Fp8Tensor):
        layouts = {(p.block[1], p.input_scale is None) for p in parts if isinstance(p, Fp8Tensor)}
        if len(layouts) > 1:
            raise NoPackedForm("side by side with other scales")


def prepare_packed_linear(
    ops: Ops, parts: Sequence[PackedTensor], bias: torch.Tensor | None, dtype: torch.dtype
) -> LinearWeight:
    """One product over the rows of all parts, which check_one_product has passed."""
    int4 = [part for part in parts if isinstance(part, Int4Tensor)]
    if int4:
        return ops.prepare_int4_linear(int4, bias, dtype)
    fp8 = [part for part in parts if isinstance(part, Fp8Tensor)]
    if fp8:
        return ops.prepare_fp8_linear(fp8, bias, dtype)
    quantized = [part for part in parts if isinstance(part, QuantizedTensor)]
    return ops.prepare_quantized_linear(quantized, bias, dtype)
