"""The symbolic shape check."""

from __future__ import annotations

import pytest
import torch

from kernels.shapes import ShapeError, Signature


def signature() -> Signature:
    return Signature("op", x="F: T 2*I", w="F: I", starts="int32: T+1", ids="int64: T")


def arguments(tokens: int = 3, size: int = 4) -> list[torch.Tensor]:
    return [
        torch.zeros(tokens, 2 * size),
        torch.zeros(size),
        torch.zeros(tokens + 1, dtype=torch.int32),
        torch.zeros(tokens, dtype=torch.int64),
    ]


def test_accepts_what_fits() -> None:
    check = signature().check
    for tokens, size in [(3, 4), (0, 4), (5, 1), (3, 4)]:
        check(*arguments(tokens, size))


@pytest.mark.parametrize(
    ("index", "wrong", "message"),
    [
        (0, torch.zeros(3, 7), r"op: x is torch.float32 \[3, 7\].*want F \[T, 2\*I\]"),
        (0, torch.zeros(3, 4, 2), "op: x is"),
        (1, torch.zeros(5), r"op: w is .*\[5\].*want F \[I\] with .*'I': 4"),
        (1, torch.zeros(4).half(), r"op: w is torch.float16.*where F is torch.float32"),
        (2, torch.zeros(3, dtype=torch.int32), r"op: starts is .*want int32 \[T\+1\]"),
        (2, torch.zeros(4, dtype=torch.int64), "op: starts is torch.int64"),
        (3, torch.zeros(4, dtype=torch.int64), "op: ids is"),
        (0, torch.zeros(8, 3).t(), "op: x is .*dense last dimension"),
        (3, torch.zeros(3, dtype=torch.int64, device="meta"), "op: ids is .* on meta"),
        (0, torch.zeros(3, 8, dtype=torch.float64), "op: x is torch.float64"),
    ],
)
def test_refuses_and_names_the_argument(index: int, wrong: torch.Tensor, message: str) -> None:
    check = signature().check
    check(*arguments())
    given = arguments()
    given[index] = wrong
    with pytest.raises(ShapeError, match=message):
        check(*given)
    # What was refused is not remembered as good.
    with pytest.raises(ShapeError):
        check(*given)


def test_malformed_signatures_are_refused() -> None:
    with pytest.raises(ValueError, match="malformed dimension 'T-1'"):
        Signature("op", x="F: T-1")
    with pytest.raises(ValueError, match="unknown dtype 'G'"):
        Signature("op", x="G: T")


def test_memory_of_seen_layouts_is_bounded() -> None:
    check = Signature("op", x="F: T")
    for size in range(5000):
        check.check(torch.empty(size))
    assert len(check._seen) <= 4096


def test_optional_arguments_may_be_none_or_left_out() -> None:
    signature = Signature("op", x="F: T D", table="float32?: M D", scale="float32?: D")
    x, table, scale = torch.zeros(2, 4), torch.zeros(5, 4), torch.zeros(4)
    signature.check(x, table, scale)
    signature.check(x, None, scale)
    signature.check(x, None)
    signature.check(x)
    with pytest.raises(ShapeError, match=r"op: scale is .*want float32 \[D\] with"):
        signature.check(x, None, scale[:3])
    with pytest.raises(ShapeError, match=r"op: x is missing; want F \[T, D\]"):
        signature.check(None, table)


def test_8_bit_floats_are_no_floats() -> None:
    codes = torch.zeros(2, 4, dtype=torch.float8_e4m3fn)
    Signature("op", codes="float8: T D").check(codes)
    with pytest.raises(ShapeError, match=r"op: x is torch\.float8_e4m3fn"):
        Signature("op", x="F: T D").check(codes)
