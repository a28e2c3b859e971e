"""The fp8 layout, and backends that make floats of it."""

from __future__ import annotations

import dataclasses
import logging

import pytest
import torch

from kernels.fp8 import E4M3, Fp8Tensor, merge_rows, quantize_activations, quantize_fp8
from kernels.reference.ops import ReferenceOps

EXAMPLES = [(0, 0), (1, 0), (16, 32), (48, 64)]


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("block", EXAMPLES, ids=str)
def test_dequantize_is_the_formula(block: tuple[int, int]) -> None:
    weight = quantize_fp8(normal(40, 80), block)
    expected = torch.empty(40, 80, dtype=torch.float64)
    for row in range(40):
        for column in range(80):
            scale = weight.scales[row // weight.block[0], column // weight.block[1]]
            expected[row, column] = float(weight.data[row, column]) * float(scale)
    assert torch.equal(weight.dequantize(torch.float64), expected)
    torch.testing.assert_close(weight.dequantize().double(), expected, rtol=2**-23, atol=0)


@pytest.mark.parametrize("block", EXAMPLES, ids=str)
def test_quantizing_takes_the_nearest_code(block: tuple[int, int]) -> None:
    original = normal(40, 80, seed=1)
    weight = quantize_fp8(original, block)
    wide = weight.scales.repeat_interleave(weight.block[0], 0)[:40]
    wide = wide.repeat_interleave(weight.block[1], 1)[:, :80]
    error = (weight.dequantize() - original).abs()
    # Three mantissa bits: half of 1/8; subnormals have steps of 2^-9.
    assert (error <= torch.maximum(original.abs() / 16, wide * 2**-10) * 1.00001).all()
    assert weight.data.float().abs().max() == 448


@pytest.mark.parametrize("group", [80, 32])
def test_each_group_of_a_token_has_a_scale(group: int) -> None:
    x = normal(5, 80, seed=2)
    x[1] = 0
    x[2] *= 1e4
    quantized = quantize_activations(x, group)
    assert quantized.scales.shape == (5, -(-80 // group))
    greatest = x[2, :group].abs().max()
    torch.testing.assert_close(quantized.scales[2, 0], greatest / 448)
    assert quantized.scales[1].eq(1).all()
    restored = quantized.dequantize(group)
    wide = quantized.scales.repeat_interleave(group, 1)[:, :80]
    allowed = torch.maximum(x.abs() / 16, wide * 2**-10) * 1.00001
    assert ((restored - x).abs() <= allowed).all()
    assert quantize_activations(x[:0], group).codes.shape == (0, 80)


def test_a_static_scale_clips() -> None:
    x = torch.tensor([[1.0, -1000.0, 3.0, 1000.0]])
    quantized = quantize_activations(x, 4, torch.tensor(0.5))
    assert quantized.dequantize(4).tolist() == [[1.0, -224.0, 3.0, 224.0]]


def test_merged_rows_mean_the_same() -> None:
    for block in EXAMPLES:
        parts = [quantize_fp8(normal(rows, 80, seed=rows) * rows, block) for rows in (32, 17, 5)]
        merged = merge_rows(parts)
        expected = torch.cat([part.dequantize() for part in parts])
        assert torch.equal(merged.dequantize(), expected), block
    static = [
        dataclasses.replace(part, input_scale=torch.tensor(scale))
        for part, scale in zip(
            [quantize_fp8(normal(3, 80), (0, 0)), quantize_fp8(normal(4, 80), (0, 0))],
            [0.5, 0.75],
            strict=True,
        )
    ]
    scale = merge_rows(static).input_scale
    assert scale is not None
    assert float(scale) == 0.75


def test_what_does_not_fit_is_refused() -> None:
    weight = quantize_fp8(normal(40, 80), (16, 32))
    with pytest.raises(ValueError, match=r"scales is .*want torch.float32 \[5, 3\]"):
        dataclasses.replace(weight, block=(8, 32))
    with pytest.raises(ValueError, match=r"data is torch\.uint8"):
        dataclasses.replace(weight, data=weight.data.view(torch.uint8))
    with pytest.raises(ValueError, match="one input_scale for all features"):
        dataclasses.replace(weight, input_scale=torch.tensor(1.0))
    with pytest.raises(ValueError, match="has scales for"):
        Fp8Tensor((0, 80), weight.data[:0], weight.scales[:0], (1, 80))
    with pytest.raises(ValueError, match="fp8 linear: parts of shapes"):
        merge_rows([weight, quantize_fp8(normal(40, 64), (16, 32))])
    with pytest.raises(ValueError, match="fp8 linear: parts of blocks"):
        merge_rows([weight, quantize_fp8(normal(40, 80), (16, 16))])


def test_a_backend_of_floats_says_that_it_makes_floats(caplog: pytest.LogCaptureFixture) -> None:
    ops = ReferenceOps(torch.float64)
    parts = [quantize_fp8(normal(3, 64), (0, 0)), quantize_fp8(normal(2, 64), (0, 0))]
    x = normal(4, 64, seed=3).double()
    with caplog.at_level(logging.WARNING):
        weight = ops.prepare_fp8_linear(parts, None, torch.float64)
        ops.prepare_fp8_linear(parts, None, torch.float64)
    assert len(caplog.records) == 1
    assert "fp8 weights are dequantized to float64" in caplog.text
    expected = x @ torch.cat([part.dequantize(torch.float64) for part in parts]).T
    torch.testing.assert_close(ops.linear(x, weight), expected)
    assert parts[0].data.dtype == E4M3
