"""Quantized weights: what they mean, and the C++ products with their codes."""

from __future__ import annotations

import logging
from functools import cache
from typing import TYPE_CHECKING

import gguf
import numpy as np
import pytest
import torch

from kernels.cpu.ops import CpuLinear, CpuOps, TorchCpuOps
from kernels.cpu.quantized import ROW_GROUP, CpuQuantizedLinear
from kernels.quantized import FORMATS, QuantizedTensor, dequantize, quantize_q8_0
from kernels.reference.ops import ReferenceOps
from kernels.shapes import ShapeError
from tests.support.cpu_kernels import VARIANTS, cpu_ops, threads
from tests.support.emulated import emulated_avx_vnni
from tests.support.quantized_weights import exact_activations, half_floats_at, random_weight

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kernels.ops import Ops

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
DTYPES = (F32, BF16, F16)
# Rows that are no multiple of the group of 16, and all heights of the register tile.
SHAPES = ((16, 1, 1), (33, 3, 7), (131, 2, 37), (7, 5, 4))
"""Rows, blocks of 256 features or of the format, tokens."""


EMULATED = "avx_vnni_emulated"


@pytest.fixture(scope="module")
def emulated_ops(tmp_path_factory: pytest.TempPathFactory) -> CpuOps:
    if "avx2" not in VARIANTS:
        pytest.skip("avx_vnni is emulated by AVX2, which this CPU does not have")
    return emulated_avx_vnni(tmp_path_factory.mktemp("emulated"))


@pytest.fixture(params=[*VARIANTS, EMULATED])
def ops(request: pytest.FixtureRequest) -> Iterator[CpuOps]:
    """What this CPU runs, and avx_vnni by emulation: see tests/support/emulated.py."""
    if request.param == EMULATED:
        made = request.getfixturevalue("emulated_ops")
    else:
        made = cpu_ops(request.param)
    assert isinstance(made, CpuOps)
    with threads(2):
        yield made


def product(
    ops: Ops, weight: QuantizedTensor, x: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    return ops.linear(x, ops.prepare_quantized_linear([weight], bias, x.dtype))


@cache
def weight_of(name: str, rows: int, blocks: int) -> tuple[QuantizedTensor, torch.Tensor]:
    """And its meaning in float64."""
    weight = random_weight(name, rows, blocks)
    return weight, dequantize(weight).double()


# What the bytes mean


@pytest.mark.parametrize("name", FORMATS)
def test_dequantized_equals_ggufs(name: str) -> None:
    kind = gguf.GGMLQuantizationType[name]
    assert gguf.GGML_QUANT_SIZES[kind] == (FORMATS[name].block, FORMATS[name].block_bytes)
    weight = random_weight(name, 37, 3)
    theirs = gguf.quants.dequantize(weight.data.numpy(), kind)
    assert np.array_equal(dequantize(weight).numpy(), theirs)
    assert torch.equal(dequantize(weight, BF16), torch.from_numpy(theirs).bfloat16())


@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_what_gguf_quantizes_is_read_back(name: str) -> None:
    floats = torch.randn(20, 96, generator=torch.Generator().manual_seed(3)).numpy()
    kind = gguf.GGMLQuantizationType[name]
    raw = gguf.quants.quantize(floats, kind)
    ours = dequantize(QuantizedTensor(name, (20, 96), torch.from_numpy(raw)))
    assert np.array_equal(ours.numpy(), gguf.quants.dequantize(raw, kind))


def test_int8_is_nearest_and_no_worse_than_ggufs() -> None:
    floats = torch.randn(70, 160, generator=torch.Generator().manual_seed(4))
    floats[3, 32:64] = 0
    ours = quantize_q8_0(floats)
    error = (dequantize(ours) - floats).abs().view(70, 5, 32)
    steps = floats.abs().view(70, 5, 32).amax(dim=-1, keepdim=True) / 127
    # Half a step, and what the greatest code is off by its scale's rounding to 11 bits.
    assert bool((error <= steps * (0.5 + 127 * 2**-11)).all())
    raw = gguf.quants.quantize(floats.numpy(), gguf.GGMLQuantizationType.Q8_0)
    theirs = dequantize(QuantizedTensor("Q8_0", (70, 160), torch.from_numpy(raw)))
    assert float(error.square().mean()) <= float((theirs - floats).square().mean())
    assert torch.equal(dequantize(quantize_q8_0(floats.bfloat16()))[3, 32:64], torch.zeros(32))


def test_data_of_another_size_is_refused() -> None:
    with pytest.raises(ValueError, match=r"Q4_K weight of shape \[2, 32\]"):
        QuantizedTensor("Q4_K", (2, 32), torch.zeros(2, 18, dtype=torch.uint8))
    with pytest.raises(ValueError, match=r"of shape \[2, 18\]"):
        QuantizedTensor("Q4_0", (2, 64), torch.zeros(2, 18, dtype=torch.uint8))


# Products


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", FORMATS)
def test_product_is_exact_but_for_float32_sums(ops: CpuOps, name: str, dtype: torch.dtype) -> None:
    for rows, blocks, tokens in SHAPES:
        weight, meaning = weight_of(name, rows, blocks)
        x = exact_activations(tokens, weight.shape[1], dtype)
        bias = torch.randn(rows, generator=torch.Generator().manual_seed(2)).to(dtype)
        actual = product(ops, weight, x, bias)
        exact = x.double() @ meaning.T + bias.double()
        # A sum has as many terms as blocks, two where there is a min: each is off by some
        # roundings of its own size, bounded by codes of at most 255 and offsets within.
        scale = x.double().abs() @ (meaning.abs() + 1e-3).T
        allowed = 16 * (blocks * 8) ** 0.5 * torch.finfo(F32).eps * scale
        allowed += torch.finfo(dtype).eps * exact.abs() + torch.finfo(dtype).tiny
        assert actual.dtype == dtype
        excess = (actual.double() - exact).abs() - allowed
        assert float(excess.max()) <= 0, (rows, blocks, tokens, float(excess.max()))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", FORMATS)
def test_product_is_off_by_half_a_code_at_most(ops: CpuOps, name: str, dtype: torch.dtype) -> None:
    """What quantizing activations to 127 steps each way, for 32 at a time, may cost."""
    weight, meaning = weight_of(name, 45, 3)
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(9, weight.shape[1], generator=generator)
    x[:, 7] *= 60  # an outlier, as they are in real models
    x = x.to(dtype)
    exact = x.double() @ meaning.T
    steps = x.double().abs().view(9, -1, 32).amax(dim=-1) / 127
    allowed = 0.5001 * steps @ meaning.abs().view(45, -1, 32).sum(dim=-1).T
    error = (product(ops, weight, x).double() - exact).abs()
    assert bool((error <= allowed + torch.finfo(dtype).eps * exact.abs()).all())
    # And rarely by much: roundings are independent.
    spread = (steps.square() / 12) @ meaning.square().view(45, -1, 32).sum(dim=-1).T
    spread += (torch.finfo(dtype).eps * exact).square()
    assert float((error.square() / spread).mean()) < 1.5


@pytest.mark.parametrize("fill", [0, 255])
@pytest.mark.parametrize("name", FORMATS)
def test_greatest_codes_do_not_saturate(ops: CpuOps, name: str, fill: int) -> None:
    weight = random_weight(name, 16, 2)
    kind = FORMATS[name]
    blocks = weight.data.view(16, 2, kind.block_bytes)
    ends = half_floats_at(name)
    halves = [blocks[..., at : at + 2].clone() for at in ends]
    blocks.fill_(fill)
    for at, half in zip(ends, halves, strict=True):
        blocks[..., at : at + 2] = half
    x = torch.full((2, weight.shape[1]), 127.0)
    x[1] = -127
    exact = x.double() @ dequantize(weight).double().T
    actual = product(ops, weight, x).double()
    scale = x.double().abs() @ dequantize(weight).double().abs().T
    assert bool(((actual - exact).abs() <= 1e-5 * scale + 1e-5).all())


@pytest.mark.parametrize("name", FORMATS)
def test_rows_do_not_depend_on_the_batch_or_threads(ops: CpuOps, name: str) -> None:
    weight, _ = weight_of(name, 75, 2)
    x = torch.randn(53, weight.shape[1], generator=torch.Generator().manual_seed(6)).bfloat16()
    prepared = ops.prepare_quantized_linear([weight], None, BF16)
    together = ops.linear(x, prepared)
    for count in (1, 2, 3, 4, 5, 6, 8, 17, 49):
        assert torch.equal(ops.linear(x[:count], prepared), together[:count])
    assert torch.equal(ops.linear(x[29:30], prepared), together[29:30])
    torch.set_num_threads(1)
    assert torch.equal(ops.linear(x, prepared), together)


def test_strided_rows(ops: CpuOps) -> None:
    weight, _ = weight_of("Q4_1", 33, 3)
    wide = torch.randn(5, 300, generator=torch.Generator().manual_seed(7))
    assert torch.equal(
        product(ops, weight, wide[:, 100:196]), product(ops, weight, wide[:, 100:196].contiguous())
    )


def test_parts_of_several_formats(ops: CpuOps) -> None:
    names = ("Q4_K", "Q4_K", "Q6_K", "Q5_0", "Q8_0")
    rows = (32, 16, 48, 16, 9)
    parts = [
        random_weight(name, count, 512 // FORMATS[name].block, seed)
        for seed, (name, count) in enumerate(zip(names, rows, strict=True))
    ]
    bias = torch.randn(sum(rows), generator=torch.Generator().manual_seed(8))
    x = torch.randn(6, 512, generator=torch.Generator().manual_seed(9))
    fused = ops.prepare_quantized_linear(parts, bias, F32)
    assert isinstance(fused, CpuQuantizedLinear)
    assert len(fused.packed) == 4, "neighbours of one format are one part"
    alone = torch.cat([product(ops, part, x) for part in parts], dim=1) + bias
    assert torch.equal(ops.linear(x, fused), alone)


def test_parts_that_cannot_lie_together_are_floats_with_a_reason(
    ops: CpuOps, caplog: pytest.LogCaptureFixture
) -> None:
    parts = [random_weight("Q4_0", ROW_GROUP + 1, 2), random_weight("Q8_0", 20, 2)]
    with caplog.at_level(logging.WARNING):
        weight = ops.prepare_quantized_linear(parts, None, F32)
    assert isinstance(weight, CpuLinear)
    assert "Q4_0 and Q8_0 rows meet at row 17, no multiple of 16" in caplog.text
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(10))
    exact = x @ torch.cat([dequantize(part) for part in parts]).T
    assert torch.allclose(ops.linear(x, weight), exact, atol=1e-4)


def test_parts_of_different_width_are_refused(ops: CpuOps) -> None:
    with pytest.raises(ShapeError, match="parts of shapes"):
        ops.prepare_quantized_linear(
            [random_weight("Q4_0", 16, 2), random_weight("Q8_0", 16, 3)], None, F32
        )
    weight = ops.prepare_quantized_linear([random_weight("Q4_0", 16, 2)], None, F32)
    with pytest.raises(ShapeError, match="linear"):
        ops.linear(torch.zeros(1, 96), weight)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_spoils_its_own_row_only(ops: CpuOps, value: float) -> None:
    weight, _ = weight_of("Q4_0", 33, 3)
    x = torch.randn(4, 96, generator=torch.Generator().manual_seed(11))
    clean = product(ops, weight, x)
    x[2, 40] = value
    spoilt = product(ops, weight, x)
    assert bool(spoilt[2].isnan().all())
    kept = [0, 1, 3]
    assert torch.equal(spoilt[kept], clean[kept])


def test_zeros_and_tiny_activations(ops: CpuOps) -> None:
    weight, meaning = weight_of("Q4_1", 16, 1)
    x = torch.zeros(3, 32)
    x[1] = 1e-42  # below what a scale can be the inverse of
    x[2] = 2.0**-100
    actual = product(ops, weight, x)
    assert torch.equal(actual[:2], torch.zeros(2, 16))
    exact = x[2].double() @ meaning.T
    assert torch.allclose(actual[2].double(), exact, rtol=1e-5, atol=1e-36)


# The embedding


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", FORMATS)
def test_embedding_rows(ops: CpuOps, name: str, dtype: torch.dtype) -> None:
    weight, meaning = weight_of(name, 45, 2)
    table = ops.prepare_quantized_linear([weight], None, dtype)
    ids = torch.tensor([44, 0, 15, 16, 0, 31])
    rows = ops.packed_embedding(ids, table, dtype)
    # One rounding, or two where the product is rounded before the min is added.
    step = torch.finfo(F32).eps * meaning[ids].abs().max()
    allowed = (
        torch.finfo(dtype).eps * meaning[ids].abs() + step + torch.finfo(dtype).smallest_normal
    )
    assert rows.dtype == dtype
    assert bool(((rows.double() - meaning[ids]).abs() <= allowed).all())
    for stray in (-1, 45):
        with pytest.raises(IndexError, match=f"id {stray} of a table of 45"):
            ops.packed_embedding(torch.tensor([3, stray]), table, dtype)


# Backends that multiply floats


@pytest.mark.parametrize("make", [ReferenceOps, TorchCpuOps])
def test_backends_of_floats_dequantize_and_say_so_once(
    make: type[ReferenceOps], caplog: pytest.LogCaptureFixture
) -> None:
    ops = make()
    assert not ops.computes_quantized
    parts = [random_weight("Q4_0", 20, 2), random_weight("Q8_0", 7, 2)]
    bias = torch.randn(27, generator=torch.Generator().manual_seed(12))
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(13))
    with caplog.at_level(logging.WARNING):
        weight = ops.prepare_quantized_linear(parts, bias, F32)
        ops.prepare_quantized_linear(parts[:1], None, F32)
    (record,) = caplog.records
    assert record.getMessage() == (
        "these ops multiply floats: quantized weights (Q4_0, Q8_0) are dequantized to float32 "
        "and take 5.8 times their size"
    )
    floats = torch.cat([dequantize(part) for part in parts])
    assert torch.equal(ops.linear(x, weight), torch.nn.functional.linear(x, floats, bias))
    ids = torch.tensor([26, 3])
    assert torch.equal(ops.packed_embedding(ids, weight, BF16), floats[ids].bfloat16())


def test_only_libraries_with_byte_products_prefer_codes() -> None:
    preferences = {name: cpu_ops(name).computes_quantized for name in VARIANTS}
    assert preferences == {name: name != "portable" for name in VARIANTS}
