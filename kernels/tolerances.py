"""How far a backend may be from the exact result: derived, never tuned by hand.

The exact result is the reference in float64 on the same inputs. The reference
in the case's own dtype (float32 inside) is a fair implementation, so its error
is the yardstick: a backend may be FACTOR times as far off, plus one rounding of
the result to the dtype.

    allowed = FACTOR * max(max|reference - exact|, eps32 * max|exact|) + eps * |exact|

The second term of the maximum keeps the yardstick from being zero where a tiny
case happens to come out exact.
"""

from __future__ import annotations

import torch

FACTOR = 4.0
"""Room for another order of summation, and for weights rounded before a product."""


def error_budget(exact: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """exact float64, reference in the case's dtype, same shape -> allowed error, float64."""
    exact = exact.double()
    if exact.numel() == 0:
        return torch.zeros_like(exact)
    yardstick = (reference.double() - exact).abs().max()
    floor = torch.finfo(torch.float32).eps * exact.abs().max()
    rounding = torch.finfo(reference.dtype).eps * exact.abs()
    return FACTOR * torch.maximum(yardstick, floor) + rounding


def assert_within_budget(
    actual: torch.Tensor, exact: torch.Tensor, reference: torch.Tensor, label: str
) -> None:
    """Raises AssertionError with the worst element. NaN anywhere in actual fails, unless the
    exact result has NaN in the same place (memory that an op must leave alone)."""
    if actual.shape != exact.shape or actual.dtype != reference.dtype:
        raise AssertionError(
            f"{label}: got {tuple(actual.shape)} {actual.dtype}, "
            f"want {tuple(exact.shape)} {reference.dtype}"
        )
    untouched = exact.isnan()
    if not torch.equal(actual.isnan(), untouched):
        stray = int((actual.isnan() != untouched).sum())
        raise AssertionError(f"{label}: {stray} of {actual.numel()} elements are wrongly (not) NaN")
    actual, exact, reference = actual[~untouched], exact[~untouched], reference[~untouched]
    excess = (actual.double() - exact.double()).abs() - error_budget(exact, reference)
    if excess.numel() and float(excess.max()) > 0:
        worst = int(excess.argmax())
        raise AssertionError(
            f"{label}: {int((excess > 0).sum())} of {excess.numel()} elements over budget; worst "
            f"got {float(actual[worst])!r}, exact {float(exact[worst])!r}, "
            f"reference {float(reference[worst])!r}, over by {float(excess[worst]):.3e}"
        )
