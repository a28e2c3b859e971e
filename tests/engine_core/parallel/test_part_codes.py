"""Cut codes are the same numbers as the cut of the floats, or an error."""

from __future__ import annotations

import pytest
import torch

from engine_core.model.part import Part
from engine_core.model.part_codes import Codes, take_part
from engine_core.model.quantized.codes import IntegerCodes
from kernels.fp8 import Fp8Tensor, quantize_fp8
from kernels.int4 import Int4Tensor, quantize_int4
from kernels.quantized import FORMATS, QuantizedTensor, dequantize
from pagewire.errors import ConfigError

ROWS, COLUMNS = 12, 768
PARTS = {
    "rows": Part((range(3, 7),)),
    "rows of a fused matrix": Part((range(2), range(4, 6), range(10, 12))),
    "columns": Part((range(ROWS),), range(256, 512)),
    "both": Part((range(1, 2), range(8, 12)), range(512, 768)),
}


def drawn(generator: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=generator)


def blocks(name: str) -> QuantizedTensor:
    generator = torch.Generator().manual_seed(3)
    kind = FORMATS[name]
    size = (ROWS, COLUMNS // kind.block, kind.block_bytes)
    data = torch.randint(0, 256, size, generator=generator, dtype=torch.uint8)
    # Any bits are codes, but not all are a finite half float.
    data[..., 1] &= 0x3F
    data[..., 3] &= 0x3F
    data[..., -1] &= 0x3F
    return QuantizedTensor(name, (ROWS, COLUMNS), data.flatten(1))


def integers(group_size: int, *, in_order: bool = True) -> IntegerCodes:
    generator = torch.Generator().manual_seed(4)
    groups = -(-COLUMNS // group_size)
    codes = torch.randint(0, 16, (ROWS, COLUMNS), generator=generator, dtype=torch.uint8)
    zeros = torch.randint(0, 16, (ROWS, groups), generator=generator, dtype=torch.int16)
    order = None
    if not in_order:
        order = (torch.arange(COLUMNS) // group_size)[torch.randperm(COLUMNS, generator=generator)]
    return IntegerCodes(codes, drawn(generator, ROWS, groups), zeros, group_size, order)


def fp8(block: tuple[int, int]) -> Fp8Tensor:
    return quantize_fp8(drawn(torch.Generator().manual_seed(5), ROWS, COLUMNS), block)


def floats(codes: Codes) -> torch.Tensor:
    if isinstance(codes, QuantizedTensor):
        return dequantize(codes)
    if isinstance(codes, IntegerCodes):
        out = torch.empty(codes.shape)
        codes.dequantize_into(out)
        return out
    return codes.dequantize()


def int4() -> Int4Tensor:
    return quantize_int4(drawn(torch.Generator().manual_seed(6), ROWS, COLUMNS), 128)


CODES: dict[str, Codes] = {
    **{name: blocks(name) for name in FORMATS},
    "groups of 128": integers(128),
    "groups that do not line up": integers(96),
    "one group a row": integers(COLUMNS),
    "act-order": integers(128, in_order=False),
    "int4": int4(),
    "fp8, one scale": fp8((0, 0)),
    "fp8, one a row": fp8((1, 0)),
    "fp8, tiles": fp8((2, 128)),
    "fp8, tiles that rows cut": fp8((8, 128)),
}


@pytest.mark.parametrize("part", PARTS.values(), ids=PARTS)
@pytest.mark.parametrize("codes", CODES.values(), ids=CODES)
def test_same_numbers(codes: Codes, part: Part) -> None:
    whole = floats(codes)
    assert bool(whole.isfinite().all())
    expected = torch.cat([whole[rows.start : rows.stop] for rows in part.rows])
    if part.columns is not None:
        expected = expected[:, part.columns.start : part.columns.stop]
    taken = take_part(codes, part, "w")
    assert taken.shape == expected.shape == part.shape(whole.shape)
    assert torch.equal(floats(taken), expected)


@pytest.mark.parametrize(
    ("name", "columns", "unit"),
    [
        ("Q4_K", range(128, 768), 256),
        ("Q8_0", range(16), 32),
        ("int4", range(64), 128),
        ("fp8, tiles", range(64, 768), 128),
    ],
)
def test_no_block_is_cut(name: str, columns: range, unit: int) -> None:
    part = Part((range(ROWS),), columns)
    with pytest.raises(ConfigError) as refused:
        take_part(CODES[name], part, "model.layers.0.self_attn.o_proj.weight")
    message = str(refused.value)
    assert message.startswith("--tensor-parallel-size: model.layers.0.self_attn.o_proj.weight has")
    assert f"a scale for each {unit} features" in message
    assert f"{columns.start} to {columns.stop} of 768" in message
