"""Decodes whose block tables begin alike: their common keys are read once, and every row is
what it is alone, bit for bit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from kernels.feature_inputs import featured_attention_args
from kernels.inputs import Maker, attention_batch
from kernels.reference.ops import ReferenceOps
from kernels.tolerances import assert_within_budget
from tests.support.cpu_kernels import best_cpu_ops, threads

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kernels.ops import Ops

SHARED = {
    # (first sequence, number of sequences, keys they share) of each group
    "one group": ([545, 576, 577, 640, 520], [(0, 5, 512)]),
    "a span and a half": ([800, 801, 900, 1100], [(0, 4, 768)]),
    "three spans": ([1600, 1537, 1700], [(0, 3, 1536)]),
    "no multiple of a step": ([300, 310, 320, 299], [(0, 4, 208)]),
    "groups and strangers": (
        [300, 40, 700, 300, 200, 700, 300, 700, 200, 650, 300, 200, 1],
        [(0, 1, 0), (2, 8, 176)],
    ),
    "many": ([200 + i for i in range(70)], [(0, 70, 192)]),
    "to the last key but one": ([193, 193, 193], [(0, 3, 192)]),
    "equal to the end": ([192, 192, 192], [(0, 3, 192)]),
}


@pytest.fixture
def ops() -> Iterator[Ops]:
    with threads(2):
        yield best_cpu_ops()


def shared_args(
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    groups: Sequence[tuple[int, int, int]],
    heads: tuple[int, int, int],
    dtype: torch.dtype = torch.bfloat16,
    **codes: bool,
) -> dict[str, Any]:
    maker = Maker(dtype)
    args: dict[str, Any] = featured_attention_args(maker, query_lens, seq_lens, *heads, **codes)
    table = args["batch"].block_table
    for first, count, keys in groups:
        blocks = keys // args["k_cache"].shape[1]
        table[first + 1 : first + count, :blocks] = table[first, :blocks]
    return args


def alone(args: dict[str, Any], row: int, token: int) -> dict[str, Any]:
    """The same call for the decode of one row."""
    batch = args["batch"]
    one = attention_batch(
        [1], [int(batch.seq_lens_host[row])], batch.block_table[row : row + 1], "cpu"
    )
    return {**args, "q": args["q"][token : token + 1], "batch": one}


def assert_exact_enough(args: dict[str, Any], out: torch.Tensor) -> None:
    wide = {name: args[name].double() for name in ("q", "k_cache", "v_cache")}
    exact = ReferenceOps(torch.float64).attention(**(args | wide))
    assert_within_budget(out, exact, ReferenceOps().attention(**args), "attention")


@pytest.mark.parametrize(
    ("heads", "dtype"),
    [
        ((9, 3, 64), torch.bfloat16),
        ((14, 2, 40), torch.bfloat16),
        ((14, 2, 40), torch.float32),
        ((4, 4, 18), torch.float16),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", SHARED)
def test_rows_are_what_they_are_alone(
    ops: Ops, name: str, heads: tuple[int, int, int], dtype: torch.dtype
) -> None:
    seq_lens, groups = SHARED[name]
    args = shared_args([1] * len(seq_lens), seq_lens, groups, heads, dtype)
    together = ops.attention(**args)
    for row in range(0, len(seq_lens), 1 + len(seq_lens) // 16):
        assert torch.equal(ops.attention(**alone(args, row, row))[0], together[row]), row
    torch.set_num_threads(1)
    assert torch.equal(ops.attention(**args), together)
    assert_exact_enough(args, together)


@pytest.mark.parametrize("options", [{"soft_cap": 20.0}, {"window": 100}], ids=str)
def test_with_chunks_beside_and_caps_and_windows(ops: Ops, options: dict[str, Any]) -> None:
    seq_lens = [545, 576, 577, 640, 544, 520]
    groups = [(0, 6, 512)]
    args = shared_args([1, 1, 1, 1, 32, 8], seq_lens, groups, (9, 3, 64)) | options
    together = ops.attention(**args)
    for row in range(4):
        assert torch.equal(ops.attention(**alone(args, row, row))[0], together[row]), row
    assert_exact_enough(args, together)


@pytest.mark.parametrize("codes", ["fp8", "int8"])
def test_with_caches_of_8_bits(ops: Ops, codes: str) -> None:
    seq_lens, groups = [545, 576, 577, 640, 300], [(0, 4, 512)]
    args = shared_args([1] * 5, seq_lens, groups, (9, 3, 64), **{codes: True})
    together = ops.attention(**args)
    for row in range(5):
        assert torch.equal(ops.attention(**alone(args, row, row))[0], together[row]), row
