"""Windows, soft caps, head norms, GeGLU and 8-bit caches in Triton, interpreted on the CPU.

Run by tests/kernels/test_triton_runs.py, in a process of their own.
"""

from __future__ import annotations

import os
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import pytest
import torch

from kernels.feature_inputs import (
    FEATURE_CASES,
    FP8,
    FP8_ATTENTION_CASES,
    FP8_ROPE_CASES,
    INT8_ATTENTION_CASES,
    INT8_ROPE_CASES,
    assert_nearest_codes,
    assert_nearest_int8,
    exact_kv,
    featured_attention_args,
    featured_rope_args,
)
from kernels.inputs import NAN, Args, Case, Maker
from kernels.reference.ops import ReferenceOps
from kernels.shapes import ShapeError
from kernels.tolerances import assert_within_budget
from tests.support.invariance import Attended, assert_attention_is_invariant

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1; run by test_triton_runs.py", allow_module_level=True)

import triton
import triton.language as tl

from kernels.cuda.batch_invariant import BatchInvariantCudaOps
from kernels.cuda.float8 import decode_e4m3, encode_e4m3
from kernels.cuda.ops import CudaOps
from kernels.cuda.tiles import soft_capped

if TYPE_CHECKING:
    from kernels.ops import Ops

pytestmark = pytest.mark.interpreter

DTYPES = [torch.float32, torch.float16]  # the interpreter keeps bfloat16 as integers
ATTENTION_CASES = [case for case in FEATURE_CASES if case.op == "attention"]


def assert_parity(case: Case, ops: Ops, dtype: torch.dtype) -> None:
    actual = case.run(ops, dtype)
    reference = case.run(ReferenceOps(), dtype)
    exact = case.run(ReferenceOps(torch.float64), dtype, widen=True)
    assert actual.keys() == reference.keys()
    for name, value in actual.items():
        assert_within_budget(value, exact[name], reference[name], f"{case} {name}")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", FEATURE_CASES, ids=str)
def test_matches_the_reference(case: Case, dtype: torch.dtype) -> None:
    assert_parity(case, CudaOps(num_sms=1), dtype)


@pytest.mark.parametrize(
    "case",
    [*ATTENTION_CASES[::2], FP8_ATTENTION_CASES[2], *INT8_ATTENTION_CASES[1:]],
    ids=str,
)
def test_batch_invariant_attention_matches_the_reference(case: Case) -> None:
    assert_parity(case, BatchInvariantCudaOps(num_sms=1), torch.float16)


def windowed_case(seq_lens: list[int], window: int, soft_cap: float | None) -> Case:
    make = partial(
        featured_attention_args,
        query_lens=[1] * len(seq_lens),
        seq_lens=seq_lens,
        heads=4,
        kv_heads=2,
        head_dim=32,
        window=window,
        soft_cap=soft_cap,
    )
    return Case("attention", f"w{window}", make)


@pytest.mark.parametrize(
    "case",
    [
        windowed_case([700, 1, 290, 512], 300, None),  # several splits of the window
        windowed_case([900, 400], 129, 5.0),  # a window that ends inside a tile
        windowed_case([600], 10_000, None),  # one that never binds
    ],
    ids=str,
)
def test_a_window_is_split(case: Case) -> None:
    assert_parity(case, CudaOps(num_sms=64), torch.float16)


@pytest.mark.parametrize("case", [*FP8_ATTENTION_CASES, *INT8_ATTENTION_CASES], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_attention_over_8_bit_caches(case: Case, dtype: torch.dtype) -> None:
    assert_parity(case, CudaOps(num_sms=1), dtype)


def test_small_and_uneven_scales_are_no_trouble_for_float16() -> None:
    """Weights times such scales would be below what it holds; splits are merged."""

    def make(maker: Maker) -> Args:
        args = featured_attention_args(maker, [1, 1], [700, 90], 4, 2, 32, int8=True)
        args["v_scale"] *= 1e-5
        args["v_scale"][3:9] *= 30
        return args

    case = Case("attention", "small-scales", make)
    for num_sms in (1, 64):
        assert_parity(case, CudaOps(num_sms=num_sms), torch.float16)


@pytest.mark.parametrize(
    ("ops", "dtype"),
    [(CudaOps(num_sms=1), dtype) for dtype in DTYPES]
    + [(ReferenceOps(), dtype) for dtype in (*DTYPES, torch.bfloat16)],
    ids=lambda value: getattr(value, "name", str(value)),
)
@pytest.mark.parametrize("case", FP8_ROPE_CASES, ids=str)
def test_writes_the_nearest_8_bit_floats(case: Case, dtype: torch.dtype, ops: Ops) -> None:
    actual = case.run(ops, dtype)
    reference = case.run(ReferenceOps(), dtype)
    exact = case.run(ReferenceOps(torch.float64), dtype, widen=True)
    for name in ("k_cache", "v_cache"):
        assert actual[name].dtype == FP8
        assert_nearest_codes(actual[name], exact[name], dtype, f"{case} {name}")
        ours, theirs = (of[name].view(torch.uint8) for of in (actual, reference))
        assert int((ours != theirs).sum()) <= ours.numel() // 100
    for name in ("q", "k", "v"):
        assert_within_budget(actual[name], exact[name], reference[name], f"{case} {name}")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", INT8_ROPE_CASES, ids=str)
def test_writes_the_nearest_integers(case: Case, dtype: torch.dtype) -> None:
    actual, reference = case.run(CudaOps(num_sms=1), dtype), case.run(ReferenceOps(), dtype)
    exact = exact_kv(case, dtype)
    assert_nearest_int8(actual, exact, dtype, str(case))
    assert_nearest_int8(reference, exact, dtype, str(case))
    for name in ("k_cache", "v_cache"):
        differ = actual[name].int() - reference[name].int()
        assert int((differ != 0).sum()) <= differ.numel() // 100 and int(differ.abs().max()) <= 1


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # of the interpreter's numpy
def test_heads_that_are_not_finite_become_nan() -> None:
    args = featured_rope_args(Maker(torch.float32), 4, 2, 2, 16, rotary_dim=None, int8=True)
    args["k"][0, 0, 3], args["k"][3, 1, 0], args["v"][0, 1, 5] = NAN, float("inf"), -float("inf")
    CudaOps(num_sms=1).rope_and_cache(**args)
    slots = args["slot_mapping"]
    for name, dead in (("k", [(0, 0), (3, 1)]), ("v", [(0, 1)])):
        scale = args[f"{name}_scale"].transpose(1, 2).flatten(0, 1)[slots]
        values = args[f"{name}_cache"].flatten(0, 1)[slots].float() * scale.unsqueeze(-1)
        for token in (0, 2, 3):
            for head in range(2):
                assert bool(values[token, head].isnan().all()) == ((token, head) in dead)


def test_keys_before_every_window_are_not_read() -> None:
    """Their blocks may be somebody else's by then."""
    args = featured_attention_args(
        Maker(torch.float16), [1, 1, 30], [300, 30, 190], 2, 1, 16, window=20
    )
    batch = args["batch"]
    outs = [CudaOps(num_sms=n).attention(**args) for n in (1, 64)]
    invariant = BatchInvariantCudaOps(num_sms=1).attention(**args)
    lens = batch.query_start_loc_host.diff()
    for row, (seq_len, query_len) in enumerate(
        zip(batch.seq_lens_host.tolist(), lens.tolist(), strict=True)
    ):
        unseen = max(seq_len - query_len + 1 - 20, 0)
        blocks = batch.block_table[row].long()
        for cache in (args["k_cache"], args["v_cache"]):
            at = torch.arange(unseen)
            cache[blocks[at // 16], at % 16] = NAN
        batch.block_table[row, : unseen // 16] = 0
    assert args["k_cache"].isnan().any()
    for out, num_sms in zip(outs, (1, 64), strict=True):
        assert out.isfinite().all()
        assert torch.equal(CudaOps(num_sms=num_sms).attention(**args), out)
    assert torch.equal(BatchInvariantCudaOps(num_sms=1).attention(**args), invariant)


class Featured(Attended):
    """Sequences under a window and a soft cap."""

    limits = (13, 3.0)

    def run(self, ops: Ops, parts: list[tuple[bool, int, int]]) -> list[torch.Tensor]:
        class Limited:
            @staticmethod
            def attention(*args: object) -> torch.Tensor:
                return ops.attention(*args, *self.limits)

        return super().run(Limited, parts)


def test_windowed_attention_does_not_depend_on_the_batch() -> None:
    """Keys are in tiles of 64: windows start in the first and in the second."""
    attended = Featured.make(torch.float16, 70, 2, 1, 16)
    assert_attention_is_invariant(BatchInvariantCudaOps(num_sms=1), attended, [69])


@triton.jit
def _encode(x_ptr, codes_ptr, N: tl.constexpr):
    offs = tl.arange(0, N)
    tl.store(codes_ptr + offs, encode_e4m3(tl.load(x_ptr + offs), False))


@triton.jit
def _decode(codes_ptr, out_ptr, N: tl.constexpr):
    offs = tl.arange(0, N)
    codes = tl.load(codes_ptr + offs)
    tl.store(out_ptr + offs, decode_e4m3(codes, out_ptr.dtype.element_ty, False))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_code_is_decoded(dtype: torch.dtype) -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    out = torch.empty(256, dtype=dtype)
    _decode[(1,)](codes, out, 256)
    torch.testing.assert_close(out.float(), codes.view(FP8).float(), rtol=0, atol=0, equal_nan=True)


def test_codes_are_those_of_torch() -> None:
    """Every code, what is half way between two, its neighbours, and what is out of range."""
    values = torch.arange(256, dtype=torch.uint8).view(FP8).float()
    finite = values[~values.isnan()].sort().values
    half_way = (finite[1:] + finite[:-1]) / 2
    infinity = torch.full_like(half_way, float("inf"))
    x = torch.cat([
        finite,
        half_way,
        torch.nextafter(half_way, infinity),
        torch.nextafter(half_way, -infinity),
        torch.tensor([448.1, 464.0, 1e30, -1e30, float("inf"), -float("inf"), NAN, 1e-40]),
    ])  # fmt: skip
    x = torch.nn.functional.pad(x, (0, 1024 - len(x)))
    codes = torch.empty(len(x), dtype=torch.uint8)
    _encode[(1,)](x, codes, len(x))
    expected = x.clamp(-448, 448).to(FP8)
    torch.testing.assert_close(
        codes.view(FP8).float(), expected.float(), rtol=0, atol=0, equal_nan=True
    )


@triton.jit
def _cap(x_ptr, out_ptr, scale, N: tl.constexpr):
    offs = tl.arange(0, N)
    x = tl.load(x_ptr + offs)
    tl.store(out_ptr + offs, soft_capped(x, scale, 1.0, out_ptr.dtype.element_ty))


def test_soft_caps_are_exact_for_small_scores_too() -> None:
    x = torch.cat([torch.linspace(-40, 40, 2047), torch.tensor([1e-6])])
    out = torch.empty_like(x)
    _cap[(1,)](x, out, 0.1, 2048)
    exact = (x.double() * 0.1).tanh()
    assert float(((out - exact) / exact.abs().clamp(min=1e-30))[x != 0].abs().max()) < 1e-6


def test_copies_8_bit_blocks() -> None:
    cache = torch.arange(60, dtype=torch.uint8).view(5, 2, 2, 3).view(FP8)
    caches = cache.clone(), cache.clone()
    src, dst = torch.tensor([1, 3, 1]), torch.tensor([3, 1, 4])
    CudaOps(num_sms=1).copy_blocks(*caches, src, dst)
    for copied in caches:
        assert torch.equal(copied.view(torch.uint8)[[3, 1, 4]], cache.view(torch.uint8)[[1, 3, 1]])


def test_copies_scales_of_slots() -> None:
    cache = torch.arange(60).to(torch.int8).view(5, 2, 2, 3)
    scale = torch.rand(5, 2, 2, generator=torch.Generator().manual_seed(1))
    k_scale, v_scale = scale.clone(), scale.clone()
    src, dst = torch.tensor([1, 3, 1]), torch.tensor([3, 1, 4])
    CudaOps(num_sms=1).copy_blocks(cache, cache.clone(), src, dst, k_scale, v_scale)
    for copied in (k_scale, v_scale):
        assert torch.equal(copied[[3, 1, 4]], scale[[1, 3, 1]])
    with pytest.raises(ShapeError, match="copy_blocks: k_scale is missing"):
        CudaOps(num_sms=1).copy_blocks(cache, cache, src, dst)


def test_scales_and_caches_must_fit() -> None:
    ops = CudaOps(num_sms=1)
    args = featured_attention_args(Maker(torch.float32), [1], [4], 2, 2, 16, fp8=True)
    with pytest.raises(ShapeError, match=r"attention: k_scale .* want float32 \[Hk\]"):
        ops.attention(**args | {"k_scale": args["k_scale"][:1]})
    with pytest.raises(ShapeError, match="attention: v_scale is missing"):
        ops.attention(**args | {"v_scale": None})
    with pytest.raises(ShapeError, match="attention: k_scale is missing"):
        ops.attention(**args | {"k_scale": None, "v_scale": None})
    rope = featured_rope_args(Maker(torch.float32), 2, 2, 2, 16, rotary_dim=16, norm=True)
    with pytest.raises(ShapeError, match=r"rope_and_cache: q_norm .* want F \[D\]"):
        ops.rope_and_cache(**rope | {"q_norm": rope["q_norm"][:8]})


def test_no_window_is_narrower_than_one_token() -> None:
    args = featured_attention_args(Maker(torch.float32), [1], [4], 2, 2, 16)
    with pytest.raises(AssertionError, match="0"):
        CudaOps(num_sms=1).attention(**args | {"window": 0})


def test_padding_under_a_window_becomes_zero() -> None:
    """A decode row without a sequence, as in a captured graph."""
    args = featured_attention_args(Maker(torch.float32), [1, 1], [300, 5], 4, 2, 32, window=64)
    lens = torch.tensor([300, 0], dtype=torch.int32)
    args["batch"] = replace(args["batch"], seq_lens=lens, seq_lens_host=lens)
    for num_sms in (1, 64):
        out = CudaOps(num_sms=num_sms).attention(**args)
        assert out[1].eq(0).all()
        torch.testing.assert_close(out, ReferenceOps().attention(**args), rtol=1e-5, atol=1e-5)
