"""The int4 layout, and backends that make floats of it."""

from __future__ import annotations

import dataclasses
import logging

import pytest
import torch

from kernels.int4 import Int4Tensor, merge_rows, pack_codes, quantize_int4, unpack_codes
from kernels.reference.ops import ReferenceOps


def draw(out_features: int, in_features: int, group: int, *, perm: bool = False) -> Int4Tensor:
    generator = torch.Generator().manual_seed(out_features + in_features)
    groups = (out_features, in_features // group)
    return Int4Tensor(
        (out_features, in_features),
        torch.randint(256, (out_features, in_features // 2), generator=generator).byte(),
        torch.rand(groups, generator=generator).half() + 0.01,
        torch.randint(17, groups, generator=generator).byte(),
        group,
        torch.randperm(in_features, generator=generator) if perm else None,
    )


def test_packing_is_what_it_says() -> None:
    codes = torch.randint(16, (3, 96), generator=torch.Generator().manual_seed(0))
    packed = pack_codes(codes)
    assert torch.equal(unpack_codes(packed).long(), codes)
    for column in (0, 15, 16, 31, 32, 47, 48, 95):
        byte = int(packed[1, column // 32 * 16 + column % 16])
        assert (byte >> 4 if column % 32 >= 16 else byte & 15) == int(codes[1, column])


@pytest.mark.parametrize("perm", [False, True])
@pytest.mark.parametrize("with_zeros", [False, True])
def test_dequantize_is_the_formula(with_zeros: bool, perm: bool) -> None:
    weight = draw(5, 192, 64, perm=perm)
    if not with_zeros:
        weight = dataclasses.replace(weight, zeros=None)
    codes = unpack_codes(weight.codes)
    expected = torch.empty(5, 192, dtype=torch.float64)
    for row in range(5):
        for column in range(192):
            zero = 8 if weight.zeros is None else int(weight.zeros[row, column // 64])
            feature = column if weight.perm is None else int(weight.perm[column])
            scale = float(weight.scales[row, column // 64])
            expected[row, feature] = scale * (int(codes[row, column]) - zero)
    # A half float times a small integer needs 16 bits: float32 holds it.
    assert torch.equal(weight.dequantize(torch.float64), expected)
    assert torch.equal(weight.dequantize(), expected.float())
    assert torch.equal(weight.dequantize(torch.bfloat16), expected.bfloat16())


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("group", [32, 128])
def test_quantizing_takes_the_nearest_code(group: int, symmetric: bool) -> None:
    weight = torch.randn(7, 256, generator=torch.Generator().manual_seed(1))
    weight[0] = 0
    weight[1] = weight[1].abs()
    quantized = quantize_int4(weight, group, symmetric=symmetric, scale_dtype=torch.float32)
    error = (quantized.dequantize() - weight).abs()
    # Half a step, and half of one more at the ends where zero is rounded to a code.
    allowed = quantized.scales * (0.5001 if symmetric else 1.0001)
    assert (error <= allowed.repeat_interleave(group, 1)).all()
    assert error[0].eq(0).all()


def test_rows_are_merged_where_they_can_be() -> None:
    first, second = draw(3, 128, 32), dataclasses.replace(draw(4, 128, 32), zeros=None)
    odd = draw(2, 128, 64)
    permuted = draw(5, 128, 32, perm=True)
    parts = [first, second, odd, permuted, permuted]
    merged = merge_rows(parts)
    assert [part.shape[0] for part in merged] == [7, 2, 10]
    actual = torch.cat([part.dequantize() for part in merged])
    assert torch.equal(actual, torch.cat([part.dequantize() for part in parts]))
    with pytest.raises(ValueError, match="int4 linear: parts of shapes"):
        merge_rows([first, draw(3, 64, 32)])


def test_what_does_not_fit_is_refused() -> None:
    weight = draw(3, 128, 32)
    with pytest.raises(ValueError, match="groups of 48"):
        dataclasses.replace(weight, group_size=48)
    with pytest.raises(ValueError, match="groups of 96"):
        dataclasses.replace(weight, group_size=96)
    with pytest.raises(ValueError, match=r"codes is .*\[3, 63\]; want torch.uint8 \[3, 64\]"):
        dataclasses.replace(weight, codes=weight.codes[:, :63])
    with pytest.raises(ValueError, match=r"zeros is torch\.int64"):
        dataclasses.replace(weight, zeros=torch.zeros(3, 4, dtype=torch.int64))
    with pytest.raises(ValueError, match="perm is"):
        dataclasses.replace(weight, perm=torch.arange(64))


def test_a_backend_of_floats_says_that_it_makes_floats(caplog: pytest.LogCaptureFixture) -> None:
    ops = ReferenceOps(torch.float64)
    parts = [draw(3, 64, 32), draw(2, 64, 64, perm=True)]
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    bias = torch.arange(5.0).double()
    with caplog.at_level(logging.WARNING):
        weight = ops.prepare_int4_linear(parts, bias, torch.float64)
        ops.prepare_int4_linear(parts, None, torch.float64)
    assert len(caplog.records) == 1
    assert "int4 weights are dequantized to float64" in caplog.text
    expected = x @ torch.cat([part.dequantize(torch.float64) for part in parts]).T + bias
    torch.testing.assert_close(ops.linear(x, weight), expected)
