"""Triton kernels against the reference, interpreted on the CPU.

Triton reads TRITON_INTERPRET when it decorates a kernel, so these tests need a process
of their own: tests/kernels/test_triton_runs.py starts it.
"""

from __future__ import annotations

import os
from dataclasses import replace
from functools import partial

import pytest
import torch

from kernels.inputs import (
    CASES,
    NAN,
    Case,
    Maker,
    attention_args,
    norm_args,
)
from kernels.reference.ops import ReferenceOps
from kernels.shapes import ShapeError
from kernels.tolerances import assert_within_budget
from tests.support.invariance import (
    Attended,
    assert_attention_is_invariant,
    assert_linear_is_invariant,
)

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1; run by test_triton_runs.py", allow_module_level=True)

from kernels.cuda.batch_invariant import BatchInvariantCudaOps
from kernels.cuda.configs import AttentionConfig
from kernels.cuda.ops import CudaOps
from kernels.cuda.paged_decode import paged_decode
from kernels.cuda.paged_prefill import paged_prefill

pytestmark = pytest.mark.interpreter

DTYPES = [torch.float32, torch.float16]  # the interpreter keeps bfloat16 as integers
TRITON_OPS = {"rms_norm", "add_rms_norm", "silu_mul", "rope_and_cache", "attention"}


def attention_case(
    label: str,
    query_lens: list[int],
    seq_lens: list[int],
    heads: int,
    kv_heads: int,
    head_dim: int,
    block_size: int = 16,
) -> Case:
    make = partial(
        attention_args,
        query_lens=query_lens,
        seq_lens=seq_lens,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        block_size=block_size,
    )
    return Case("attention", label, make)


EDGE_CASES = [
    # More query heads per KV head than a tile has rows.
    attention_case("group-70", [1, 1, 3], [5, 40, 20], 70, 1, 32),
    attention_case("group-130-long", [1, 5], [9, 33], 130, 1, 16),
    attention_case("head-dim-256", [1, 9], [33, 20], 4, 2, 256),
    # Few rows per sequence: the short prefill config.
    attention_case("short-prefill", [2, 3, 10], [2, 67, 10], 6, 2, 64),
    # Chunks that end exactly on, one before and one after a tile of keys.
    attention_case("tile-edges", [64, 63, 65, 1], [64, 128, 129, 64], 1, 1, 16),
    attention_case("context-edges", [20, 20, 20], [84, 83, 85], 4, 1, 32),
    attention_case("block-128", [1, 1, 30], [127, 129, 130], 4, 2, 64, 128),
]


def test_a_misshapen_argument_is_named() -> None:
    ops = CudaOps(num_sms=1)
    x = torch.zeros(2, 64)
    with pytest.raises(ShapeError, match=r"rms_norm: weight .* want F \[H\]"):
        ops.rms_norm(x, torch.zeros(32), 1e-5)
    args = attention_args(Maker(torch.float32), [1, 2], [4, 2], 2, 1, 16)
    args["k_cache"], args["v_cache"] = args["k_cache"].half(), args["v_cache"].half()
    with pytest.raises(ShapeError, match="attention: k_cache"):
        ops.attention(**args)


def assert_parity(case: Case, ops: CudaOps, dtype: torch.dtype) -> None:
    actual = case.run(ops, dtype)
    reference = case.run(ReferenceOps(), dtype)
    exact = case.run(ReferenceOps(torch.float64), dtype, widen=True)
    assert actual.keys() == reference.keys()
    for name, value in actual.items():
        assert_within_budget(value, exact[name], reference[name], f"{case} {name}")


def _affordable() -> list[tuple[Case, torch.dtype]]:
    """The shared cases; the long ones only in float16, whose tiles are larger and so fewer.
    test_split_caches_match_the_reference has long contexts in float32."""
    ops = {*TRITON_OPS, "copy_blocks"}
    pairs = [(case, dtype) for case in CASES if case.op in ops for dtype in DTYPES]
    return [(case, dtype) for case, dtype in pairs if dtype != torch.float32 or not _long(case)]


def _long(case: Case) -> bool:
    return case.label.startswith(("decode-long", "chunk-9:3", "chunk-34:2"))


@pytest.mark.parametrize(("case", "dtype"), _affordable(), ids=str)
def test_matches_the_reference(case: Case, dtype: torch.dtype) -> None:
    # One multiprocessor is full at once: no sequence is split.
    assert_parity(case, CudaOps(num_sms=1), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", EDGE_CASES, ids=str)
def test_edges_match_the_reference(case: Case, dtype: torch.dtype) -> None:
    assert_parity(case, CudaOps(num_sms=1), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "case",
    [
        # The long sequence asks for splits; the short ones leave most of theirs empty.
        attention_case("lengths", [1, 1, 1, 1], [700, 1, 64, 65], 9, 3, 64),
        attention_case("one-long", [1], [1100], 8, 1, 128),
        attention_case("mixed", [1, 1, 20], [513, 15, 300], 5, 1, 80),
        attention_case("groups-over-a-tile", [1], [600], 70, 1, 16),
    ],
    ids=str,
)
def test_split_caches_match_the_reference(case: Case, dtype: torch.dtype) -> None:
    assert_parity(case, CudaOps(num_sms=64), dtype)


@pytest.mark.parametrize("splits_for", [1, 64], ids=["whole", "split"])
def test_padding_of_a_captured_graph_becomes_zero(splits_for: int) -> None:
    """A decode row without a sequence (length 0), and tokens after the last sequence."""
    args = attention_args(Maker(torch.float32), [1, 1, 1], [300, 5, 17], 4, 2, 64)
    batch = args["batch"]
    lens = torch.tensor([300, 0, 17], dtype=torch.int32)
    batch = replace(batch, seq_lens=lens, seq_lens_host=lens)
    q = torch.cat([args["q"], torch.full((2, 4, 64), NAN)])
    caches = args["k_cache"], args["v_cache"]
    out = CudaOps(num_sms=splits_for).attention(q, *caches, batch, args["scale"])
    expected = ReferenceOps().attention(q, *caches, batch, args["scale"])
    assert out[1].eq(0).all()
    assert out[3:].eq(0).all()
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)


def test_writes_only_its_own_rows() -> None:
    """Each attention kernel leaves the other's rows, and everything around them, alone."""
    args = attention_args(Maker(torch.float32), [1, 1, 5, 9], [20, 1, 40, 9], 6, 2, 32)
    common = args["q"], args["k_cache"], args["v_cache"], args["batch"], args["scale"]
    out = torch.full((16 + 4, 6, 32), NAN)
    paged_decode(*common, out[2:-2], num_sms=1)
    assert out[:2].isnan().all()
    assert out[2:4].isfinite().all()
    assert out[4:].isnan().all()
    out.fill_(NAN)
    paged_prefill(*common, out[2:-2])
    assert out[:4].isnan().all()
    assert out[4:-2].isfinite().all()
    assert out[-2:].isnan().all()


@pytest.mark.parametrize("block_m", [16, 64, 128])
@pytest.mark.parametrize("block_kv", [16, 128])
def test_tile_sizes_do_not_change_the_result(block_m: int, block_kv: int) -> None:
    args = attention_args(Maker(torch.float32), [1, 21, 40], [50, 21, 70], 9, 3, 32)
    common = args["q"], args["k_cache"], args["v_cache"], args["batch"], args["scale"]
    out = torch.full(args["q"].shape, NAN)
    config = AttentionConfig(block_m, block_kv, num_warps=4, num_stages=1)
    paged_decode(*common, out, num_sms=1, config=config)
    paged_prefill(*common, out, config=config)
    expected = ReferenceOps().attention(*common)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)


def test_strided_rows() -> None:
    """Norm and activation of a view into wider rows, as a fused product gives."""
    maker = Maker(torch.float32)
    wide = maker.normal(5, 200)
    weight = maker.normal(60)
    ops, reference = CudaOps(num_sms=1), ReferenceOps()
    x = wide[:, 10:70]
    torch.testing.assert_close(ops.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5))
    torch.testing.assert_close(ops.silu_mul(x), reference.silu_mul(x))


INVARIANT_OPS = {"linear", "attention"}


@pytest.mark.parametrize(
    "case", [case for case in CASES if case.op in INVARIANT_OPS and not _long(case)], ids=str
)
def test_batch_invariant_ops_match_the_reference(case: Case) -> None:
    assert_parity(case, BatchInvariantCudaOps(num_sms=1), torch.float16)


@pytest.mark.parametrize(
    ("dtype", "length", "heads"),
    [
        *((dtype, 70, (4, 2, 16)) for dtype in DTYPES),
        *((dtype, 67, (3, 1, 32)) for dtype in DTYPES),
        (torch.float16, 9, (33, 1, 16)),
    ],
    ids=str,
)
def test_attention_does_not_depend_on_the_batch(
    dtype: torch.dtype, length: int, heads: tuple[int, int, int]
) -> None:
    """The last has more heads than a tile has rows. Keys are in tiles of 32 or 64, by dtype, and
    its keys are within one of either."""
    attended = Attended.make(dtype, length, *heads)
    ops = BatchInvariantCudaOps(num_sms=1)
    assert_attention_is_invariant(ops, attended, [0, length - 5, length - 1])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_linear_does_not_depend_on_the_batch(dtype: torch.dtype) -> None:
    assert_linear_is_invariant(BatchInvariantCudaOps(num_sms=1), dtype, 70, 150, 80)


def test_no_tokens() -> None:
    ops = CudaOps(num_sms=1)
    args = norm_args(Maker(torch.float32), 1, 64)
    empty = args["x"][:0]
    assert ops.rms_norm(empty, args["weight"], 1e-5).shape == (0, 64)
    assert ops.add_rms_norm(empty, empty.clone(), args["weight"], 1e-5).shape == (0, 64)
    assert ops.silu_mul(empty).shape == (0, 32)


@pytest.mark.parametrize("head_dim", [257, 512])
def test_a_head_too_large_is_refused_by_number(head_dim: int) -> None:
    args = attention_args(Maker(torch.float32), [1, 2], [4, 2], 2, 1, head_dim)
    with pytest.raises(ValueError, match=f"head_dim {head_dim}"):
        CudaOps(num_sms=1).attention(**args)
