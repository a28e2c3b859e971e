"""The avx512_bf16 library where no CPU runs it, so that its sources are not changed blindly.

Each AVX-512 instruction is emulated (tests/support/emulated_avx512.h): vectors of 16, panels,
dot products of bfloat16 and of bytes, attention's tiles and codes are those of the real one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from kernels.feature_inputs import FP8_ATTENTION_CASES, INT8_ATTENTION_CASES
from kernels.inputs import CASES, Case
from kernels.quantized import FORMATS
from kernels.tolerances import assert_within_budget
from tests.kernels.test_parity import yardsticks
from tests.kernels.test_quantized import product, weight_of
from tests.support.cpu_kernels import VARIANTS, threads
from tests.support.emulated import emulated_avx512_bf16
from tests.support.quantized_weights import exact_activations

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kernels.cpu.ops import CpuOps

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
# The build, on a machine that does much else.
pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def ops(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CpuOps]:
    if "avx512_bf16" in VARIANTS:
        pytest.skip("this CPU runs the real avx512_bf16")
    if "avx2" not in VARIANTS:
        pytest.skip("AVX-512 is emulated by AVX2, which this CPU does not have")
    with threads(2):
        yield emulated_avx512_bf16(tmp_path_factory.mktemp("emulated"))


def assert_parity(ops: CpuOps, case: Case, dtype: torch.dtype) -> None:
    exact, reference = yardsticks(case, dtype)
    actual = case.run(ops, dtype)
    assert actual.keys() == exact.keys()
    for name, value in actual.items():
        assert_within_budget(value, exact[name], reference[name], f"{case} {name}")


@pytest.mark.parametrize(
    "case", [*CASES, *FP8_ATTENTION_CASES, *INT8_ATTENTION_CASES], ids=lambda case: str(case)
)
def test_matches_exact_result_in_bfloat16(ops: CpuOps, case: Case) -> None:
    assert_parity(ops, case, BF16)


@pytest.mark.parametrize("dtype", [F32, F16], ids=str)
@pytest.mark.parametrize("case", [case for case in CASES if case.op != "attention"], ids=str)
def test_matches_exact_result_in_other_dtypes(ops: CpuOps, case: Case, dtype: torch.dtype) -> None:
    assert_parity(ops, case, dtype)


@pytest.mark.parametrize("name", FORMATS)
def test_quantized_product_is_exact_but_for_float32_sums(ops: CpuOps, name: str) -> None:
    weight, meaning = weight_of(name, 131, 2)
    x = exact_activations(37, weight.shape[1], F32)
    actual, exact = product(ops, weight, x).double(), x.double() @ meaning.T
    terms = x.double().abs() @ (meaning.abs() + 1e-3).T
    allowed = 64 * torch.finfo(F32).eps * terms
    assert float(((actual - exact).abs() - allowed).max()) <= 0
