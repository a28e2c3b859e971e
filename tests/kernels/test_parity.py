"""Every op of every CPU backend against the exact result, over all cases and dtypes."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from kernels.inputs import CASES, Case
from kernels.reference.ops import ReferenceOps
from kernels.tolerances import assert_within_budget
from tests.support.cpu_kernels import BACKENDS, cpu_ops, threads

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@cache
def yardsticks(
    case: Case, dtype: torch.dtype
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The exact results, and those of the reference in the case's dtype."""
    exact = case.run(ReferenceOps(torch.float64), dtype, widen=True)
    return exact, case.run(ReferenceOps(), dtype)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.parametrize("case", CASES, ids=str)
def test_matches_exact_result(case: Case, dtype: torch.dtype, backend: str) -> None:
    exact, reference = yardsticks(case, dtype)
    with threads(1 if backend == "torch" else 2):
        actual = case.run(cpu_ops(backend), dtype)
    assert actual.keys() == exact.keys()
    for name, value in actual.items():
        assert_within_budget(value, exact[name], reference[name], f"{case} {name}")


def test_cases_cover_every_op_and_edge() -> None:
    """The list itself: a case that goes missing would go unnoticed."""
    labels = {op: [c.label for c in CASES if c.op == op] for op in {c.op for c in CASES}}
    assert set(labels) == {
        *("rms_norm", "add_rms_norm", "silu_mul", "linear", "embedding"),
        *("rope_and_cache", "attention", "copy_blocks"),
    }
    attention = " ".join(labels["attention"])
    for wanted in ("9:3", "8:2", "4:4", "5:1", "d32", "d64", "d80", "d96", "d128", "b1", "b8"):
        assert wanted in attention
    assert len({str(case) for case in CASES}) == len(CASES)


class TestBudget:
    """The judge must be able to say no."""

    exact = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)

    def test_accepts_rounding(self) -> None:
        rounded = self.exact.bfloat16()
        assert_within_budget(rounded, self.exact, rounded, "x")

    def test_refuses_an_error_of_six_percent(self) -> None:
        reference = self.exact.float()
        with pytest.raises(AssertionError, match=r"1 of 3 elements over budget.*got 1\.0625"):
            assert_within_budget(torch.tensor([1.0625, -2.0, 0.5]), self.exact, reference, "x")

    def test_refuses_nan_that_should_not_be_there_and_its_absence(self) -> None:
        reference = self.exact.float()
        leaked = torch.tensor([1.0, float("nan"), 0.5])
        with pytest.raises(AssertionError, match="1 of 3 elements are wrongly"):
            assert_within_budget(leaked, self.exact, reference, "x")
        with pytest.raises(AssertionError, match="1 of 3 elements are wrongly"):
            assert_within_budget(reference, leaked.double(), leaked, "x")

    def test_refuses_another_shape_or_dtype(self) -> None:
        reference = self.exact.float()
        with pytest.raises(AssertionError, match="want"):
            assert_within_budget(reference[:2], self.exact, reference, "x")
        with pytest.raises(AssertionError, match="want"):
            assert_within_budget(reference.half(), self.exact, reference, "x")
