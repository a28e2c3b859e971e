"""Products with quantized weights, and experts, interpreted on the CPU.

As test_triton_parity.py, this needs a process of its own.
"""

from __future__ import annotations

import dataclasses
import os

import pytest
import torch

from kernels import fp8
from kernels.fp8 import Fp8Tensor, quantize_fp8
from kernels.int4 import Int4Tensor, quantize_int4
from kernels.reference.ops import ReferenceOps
from kernels.shapes import ShapeError
from kernels.tolerances import assert_within_budget

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1; run by test_triton_runs.py", allow_module_level=True)

from kernels.cuda.batch_invariant import BatchInvariantCudaOps
from kernels.cuda.fp8_linear import quantize_activations
from kernels.cuda.ops import CudaOps

pytestmark = pytest.mark.interpreter

DTYPES = [torch.float32, torch.float16]
ONE, MANY = 1, 64
"""Multiprocessors: with many, K is split."""


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_product(
    actual: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    label: str,
) -> None:
    """actual [T, out] against x weight^T + bias, where x and weight are the float64 that the
    codes stand for; what a float32 product of them is off by gives the budget."""
    exact = x.double() @ weight.double().T
    reference = x.float() @ weight.float().T
    if bias is not None:
        exact, reference = exact + bias.double(), reference + bias.float()
    assert_within_budget(actual, exact, reference.to(actual.dtype), label)


@pytest.mark.parametrize("num_sms", [ONE, MANY])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("tokens", "in_features", "out_features", "group", "symmetric"),
    [
        (1, 32, 1, 32, False),
        (3, 192, 65, 96, False),
        (17, 256, 70, 128, True),
        (2, 1024, 33, 1024, False),
    ],
)
def test_int4_linear(
    tokens: int,
    in_features: int,
    out_features: int,
    group: int,
    symmetric: bool,
    dtype: torch.dtype,
    num_sms: int,
) -> None:
    weight = quantize_int4(normal(out_features, in_features), group, symmetric=symmetric)
    x = normal(tokens, in_features, seed=1, dtype=dtype)
    bias = normal(out_features, seed=2, dtype=dtype) if tokens > 1 else None
    ops = CudaOps(num_sms=num_sms)
    # Rows of a wider tensor, whose other columns are NaN.
    wide = torch.full((tokens, in_features + 8), float("nan"), dtype=dtype)
    wide[:, :in_features] = x
    prepared = ops.prepare_int4_linear([weight], bias, dtype)
    actual = ops.linear(wide[:, :in_features], prepared)
    assert_product(actual, x, weight.dequantize(torch.float64), bias, "int4")


def test_int4_parts_of_several_layouts() -> None:
    """Act-order, other groups and no zeros, side by side; and rows for no tokens."""
    permuted = dataclasses.replace(
        quantize_int4(normal(20, 64), 32),
        perm=torch.randperm(64, generator=torch.Generator().manual_seed(3)),
    )
    parts: list[Int4Tensor] = [
        quantize_int4(normal(5, 64, seed=1), 32),
        quantize_int4(normal(6, 64, seed=2), 32, symmetric=True),
        quantize_int4(normal(7, 64, seed=3), 64, scale_dtype=torch.bfloat16),
        permuted,
    ]
    x, bias = normal(4, 64, seed=4), normal(38, seed=5)
    ops = CudaOps(num_sms=ONE)
    weight = ops.prepare_int4_linear(parts, bias, torch.float32)
    assert (weight.out_features, weight.in_features, len(weight.parts)) == (38, 64, 3)
    exact = torch.cat([part.dequantize(torch.float64) for part in parts])
    assert_product(ops.linear(x, weight), x, exact, bias, "int4 parts")
    assert ops.linear(x[:0], weight).shape == (0, 38)
    with pytest.raises(ShapeError, match="64 input features"):
        ops.linear(normal(2, 32), weight)
    with pytest.raises(ShapeError, match=r"want torch.float32 \[38\]"):
        ops.prepare_int4_linear(parts, bias[:5], torch.float32)


BLOCKS = [(0, 0), (1, 0), (32, 64)]


@pytest.mark.parametrize("group", [160, 64])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_activations_get_the_reference_codes(dtype: torch.dtype, group: int) -> None:
    x = normal(6, 160, dtype=dtype)
    x[1] = 0
    x[2] *= 100
    x[3, :100] *= 1e-3
    for scale in [None, torch.tensor(0.01)] if group == 160 else [None]:
        expected = fp8.quantize_activations(x, group, scale)
        actual = quantize_activations(x, group, scale, by_instruction=False)
        assert torch.equal(actual.scales, expected.scales)
        assert torch.equal(actual.codes.view(torch.uint8), expected.codes.view(torch.uint8))


@pytest.mark.parametrize("num_sms", [ONE, MANY])
@pytest.mark.parametrize("multiplies_fp8", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_fp8_linear(
    block: tuple[int, int], dtype: torch.dtype, multiplies_fp8: bool, num_sms: int
) -> None:
    weight = quantize_fp8(normal(70, 600), block)
    x = normal(3, 600, seed=1, dtype=dtype)
    bias = normal(70, seed=2, dtype=dtype)
    ops = CudaOps(num_sms=num_sms, multiplies_fp8=multiplies_fp8)
    actual = ops.linear(x, ops.prepare_fp8_linear([weight], bias, dtype))
    left = x.double()
    if multiplies_fp8:
        columns = weight.block[1]
        left = fp8.quantize_activations(x, columns).dequantize(columns, torch.float64)
    assert_product(actual, left, weight.dequantize(torch.float64), bias, "fp8")


def test_fp8_parts_and_a_static_scale() -> None:
    parts = [
        dataclasses.replace(quantize_fp8(normal(rows, 64, seed=rows), (0, 0)), input_scale=scale)
        for rows, scale in ((20, torch.tensor(0.004)), (3, torch.tensor(0.002)))
    ]
    x = normal(17, 64, seed=4)
    ops = CudaOps(num_sms=ONE, multiplies_fp8=True)
    weight = ops.prepare_fp8_linear(parts, None, torch.float32)
    exact = torch.cat([part.dequantize(torch.float64) for part in parts])
    left = fp8.quantize_activations(x, 64, torch.tensor(0.004)).dequantize(64, torch.float64)
    assert (left.abs().max(), x.abs().max() > 1.8) == (torch.tensor(0.004).double() * 448, True)
    assert_product(ops.linear(x, weight), left, exact, None, "fp8 static")
    assert ops.linear(x[:0], weight).shape == (0, 23)


def test_fp8_weights_that_cannot_be_computed_are_refused() -> None:
    ops = CudaOps(num_sms=ONE)
    with pytest.raises(ValueError, match="a scale for each 48 features"):
        ops.prepare_fp8_linear([quantize_fp8(normal(4, 96), (1, 48))], None, torch.float32)
    weight = quantize_fp8(normal(4, 96), (1, 0))
    weight.data.view(torch.uint8)[2, 3] = 0xFF
    with pytest.raises(ValueError, match="NaN among the codes"):
        ops.prepare_fp8_linear([weight], None, torch.float32)


def _rows(ops: CudaOps, kind: str, x: torch.Tensor) -> torch.Tensor:
    if kind == "int4":
        weight = ops.prepare_int4_linear([quantize_int4(normal(33, 512), 64)], None, x.dtype)
        return ops.linear(x, weight)
    if kind == "fp8":
        quantized: Fp8Tensor = quantize_fp8(normal(33, 512), (1, 0))
        return ops.linear(x, ops.prepare_fp8_linear([quantized], None, x.dtype))
    gate_up, down = normal(2, 32, 512) / 512**0.5, normal(2, 512, 16) / 4
    prepared = ops.prepare_experts(gate_up.to(x.dtype), down.to(x.dtype))
    ids = torch.tensor([[0, 1]]).expand(x.shape[0], 2)
    scales = torch.tensor([[0.25, 0.75]]).expand(x.shape[0], 2)
    return ops.experts(x, prepared, ids, scales, "silu")


@pytest.mark.parametrize("kind", ["int4", "fp8", "experts"])
def test_batch_invariant_products_do_not_depend_on_the_batch(kind: str) -> None:
    ops = BatchInvariantCudaOps(num_sms=MANY, multiplies_fp8=True)
    x = normal(18, 512, dtype=torch.float16)
    together = _rows(ops, kind, x)
    for row in (0, 17):
        assert torch.equal(_rows(ops, kind, x[row : row + 1])[0], together[row])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("tokens", "hidden", "intermediate", "num_experts", "top_k", "activation"),
    [
        (1, 64, 16, 4, 2, "silu"),
        (7, 70, 40, 5, 3, "gelu_tanh"),
        (40, 33, 65, 3, 1, "silu"),  # experts with several tiles
        (2, 16, 16, 1, 1, "silu"),
    ],
)
def test_experts(
    tokens: int,
    hidden: int,
    intermediate: int,
    num_experts: int,
    top_k: int,
    activation: str,
    dtype: torch.dtype,
) -> None:
    x = normal(tokens, hidden, dtype=dtype)
    gate_up = (normal(num_experts, 2 * intermediate, hidden, seed=1) / hidden**0.5).to(dtype)
    down = (normal(num_experts, hidden, intermediate, seed=2) / intermediate**0.5).to(dtype)
    # Low experts are likelier, so that some have many tokens and some none.
    order = torch.rand(tokens, num_experts, generator=torch.Generator().manual_seed(3))
    ids = (order + torch.arange(num_experts) / 2).argsort(dim=1)[:, :top_k]
    scales = torch.rand(tokens, top_k, generator=torch.Generator().manual_seed(4))

    def run(ops: object, widen: bool = False) -> torch.Tensor:
        arguments = [t.double() if widen else t for t in (x, gate_up, down)]
        prepared = ops.prepare_experts(*arguments[1:])  # type: ignore[attr-defined]
        return ops.experts(arguments[0], prepared, ids, scales, activation)  # type: ignore[attr-defined, no-any-return]

    exact = run(ReferenceOps(torch.float64), widen=True)
    assert_within_budget(run(CudaOps(num_sms=ONE)), exact, run(ReferenceOps()), "experts")


def test_experts_without_tokens() -> None:
    ops = CudaOps(num_sms=ONE)
    prepared = ops.prepare_experts(normal(2, 8, 16), normal(2, 16, 4))
    none = torch.zeros(0, 2, dtype=torch.int64)
    assert ops.experts(normal(0, 16), prepared, none, torch.zeros(0, 2), "silu").shape == (0, 16)
