"""KV caches of 8 bits on the CPU: fp8 with scales of heads, int8 with scales of slots."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from kernels.blocks import run_blocks
from kernels.cpu.batch_invariant import one_token_sequences
from kernels.feature_inputs import (
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
from kernels.inputs import NAN, Case, Maker, attention_args
from kernels.ops import KVCache
from kernels.reference.ops import ReferenceOps
from kernels.shapes import ShapeError
from kernels.tolerances import assert_within_budget
from tests.kernels.test_blocks import SHAPES, make_blocks, make_step
from tests.support.cpu_kernels import (
    BACKENDS,
    VARIANTS,
    batch_invariant_cpu_ops,
    best_cpu_ops,
    cpu_ops,
)

F32 = torch.float32
DTYPES = (F32, torch.bfloat16, torch.float16)
FORMATS = ("fp8", "int8")

by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda it: str(it).removeprefix("torch."))
by_backend = pytest.mark.parametrize("backend", BACKENDS)
by_format = pytest.mark.parametrize("codes", FORMATS)


@cache
def by_the_book(case: Case, dtype: torch.dtype) -> tuple[dict[str, Any], dict[str, Any]]:
    """The exact results, and the reference's in dtype."""
    return case.run(ReferenceOps(torch.float64), dtype, widen=True), case.run(ReferenceOps(), dtype)


def assert_parity(case: Case, dtype: torch.dtype, backend: str) -> None:
    exact, fair = by_the_book(case, dtype)
    assert_within_budget(
        case.run(cpu_ops(backend), dtype)["out"], exact["out"], fair["out"], str(case)
    )


@pytest.mark.parametrize("backend", VARIANTS)
@by_dtype
@pytest.mark.parametrize("case", [*FP8_ATTENTION_CASES, *INT8_ATTENTION_CASES], ids=str)
def test_attention(case: Case, dtype: torch.dtype, backend: str) -> None:
    assert_parity(case, dtype, backend)


@cache
def drawn_case(seed: int, codes: str) -> Case:
    """Odd sizes of heads and blocks, spans that are merged, tiles, windows and caps."""
    generator = torch.Generator().manual_seed(seed)

    def one_of(options: list[Any]) -> Any:
        return options[int(torch.randint(len(options), (), generator=generator))]

    heads, kv_heads = one_of([(4, 4), (6, 2), (5, 1), (8, 1)])
    query_lens = one_of([[1] * 9, [1, 1, 3], [40], [1, 70, 2]])
    lens = [length + one_of([0, 5, 63, 600]) for length in query_lens]
    shape = (heads, kv_heads, one_of([2, 10, 64, 80, 128]))
    limits = {"window": one_of([None, 1, 30]), "soft_cap": one_of([None, 5.0])}
    kind = {"block_size": one_of([1, 7, 16]), codes: True}

    def make(maker: Maker) -> dict[str, Any]:
        return featured_attention_args(maker, query_lens, lens, *shape, **limits, **kind)

    return Case("attention", f"{codes} {shape} {lens} {limits} {kind}", make)


@pytest.mark.parametrize("backend", VARIANTS)
@by_format
@pytest.mark.parametrize("seed", range(6))
def test_drawn_attention(seed: int, codes: str, backend: str) -> None:
    assert_parity(drawn_case(seed, codes), DTYPES[seed % 3], backend)


@by_backend
@by_dtype
@pytest.mark.parametrize("case", FP8_ROPE_CASES, ids=str)
def test_writes_the_nearest_8_bit_floats(case: Case, dtype: torch.dtype, backend: str) -> None:
    actual, (exact, reference) = case.run(cpu_ops(backend), dtype), by_the_book(case, dtype)
    for name in ("k_cache", "v_cache"):
        assert_nearest_codes(actual[name], exact[name], dtype, f"{case} {name}")
        ours, theirs = (of[name].view(torch.uint8) for of in (actual, reference))
        assert int((ours != theirs).sum()) <= ours.numel() // 100
    for name in ("q", "k", "v"):
        assert_within_budget(actual[name], exact[name], reference[name], f"{case} {name}")


@by_backend
@by_dtype
@pytest.mark.parametrize("case", INT8_ROPE_CASES, ids=str)
def test_writes_the_nearest_integers(case: Case, dtype: torch.dtype, backend: str) -> None:
    actual, reference = case.run(cpu_ops(backend), dtype), case.run(ReferenceOps(), dtype)
    assert_nearest_int8(actual, exact_kv(case, dtype), dtype, str(case))
    for name in ("k_cache", "v_cache"):
        differ = actual[name].int() - reference[name].int()
        assert int((differ != 0).sum()) <= differ.numel() // 100 and int(differ.abs().max()) <= 1


def cached(values: torch.Tensor, codes: str, backend: str) -> torch.Tensor:
    """values [Hk, D] float32 as a cache with scales of 1 (fp8) gives them back."""
    heads, dim = values.shape
    dtype = FP8 if codes == "fp8" else torch.int8
    caches = [torch.zeros(1, 1, heads, dim, dtype=dtype) for _ in range(2)]
    scales = [torch.ones(heads) if codes == "fp8" else torch.ones(1, heads, 1) for _ in range(2)]
    kv, at = values.unsqueeze(0), torch.zeros(1, dtype=torch.int64)
    cpu_ops(backend).rope_and_cache(
        kv.clone(), kv, kv, at, None, *caches, at, k_scale=scales[0], v_scale=scales[1]
    )
    assert torch.equal(caches[0].view(torch.uint8), caches[1].view(torch.uint8))
    return caches[0][0, 0].float() * scales[0].view(-1, 1)


@by_backend
def test_8_bit_floats_are_those_of_torch(backend: str) -> None:
    """Every code, what is half way between two, its neighbours, and what is out of range."""
    finite = torch.arange(256, dtype=torch.uint8).view(FP8).float()
    finite = finite[~finite.isnan()].sort().values
    half_way = (finite[1:] + finite[:-1]) / 2
    infinity = torch.full_like(half_way, float("inf"))
    beyond = [448.1, 464.0, 1e30, -1e30, float("inf"), -float("inf"), NAN, 1e-40]
    near = (torch.nextafter(half_way, infinity), torch.nextafter(half_way, -infinity))
    x = torch.cat([finite, half_way, *near, torch.tensor(beyond)])
    expected = x.clamp(-448, 448).to(FP8).float()
    actual = cached(x.unsqueeze(0), "fp8", backend)[0]
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)


@by_backend
def test_heads_that_are_not_finite_become_nan_and_zeros_stay(backend: str) -> None:
    values = torch.linspace(-3, 3, 20).expand(5, 20).contiguous()
    values[1, 7], values[2, 19], values[3, 0] = NAN, float("inf"), -float("inf")
    values[4] = 0
    back = cached(values, "int8", backend)
    assert back[1:4].isnan().all()
    assert (back[4] == 0).all()
    torch.testing.assert_close(back[0], values[0], rtol=0, atol=3 / 127 / 2 + 1e-6)


@by_backend
@by_format
def test_codes_that_are_nan_are_read_as_such(codes: str, backend: str) -> None:
    args = featured_attention_args(Maker(F32), [1, 3], [40, 60], 4, 2, 32, **{codes: True})
    blocks = args["batch"].block_table[1].long()
    if codes == "fp8":
        args["k_cache"][blocks[1], 3, 1, 5] = NAN
    else:
        args["k_scale"][blocks[1], 1, 3] = NAN
    out = cpu_ops(backend).attention(**args)
    assert out[0].isfinite().all()
    assert out[1:, :2].isfinite().all() and out[1:, 2:].isnan().all()


@pytest.mark.parametrize("backend", VARIANTS)
@by_format
@by_dtype
def test_a_row_does_not_depend_on_the_batch(dtype: torch.dtype, codes: str, backend: str) -> None:
    """A chunk over the end of a span, beside decodes, and each of its tokens alone."""
    args = featured_attention_args(
        Maker(dtype), [1, 1, 30], [700, 9, 530], 6, 2, 64, **{codes: True}
    )
    together = batch_invariant_cpu_ops(backend).attention(**args)
    batch = one_token_sequences(args["batch"])
    for row in range(32):
        lens = batch.seq_lens[row : row + 1]
        starts = torch.tensor([0, 1], dtype=torch.int32)
        table = batch.block_table[row : row + 1]
        alone = replace(
            batch,
            query_start_loc=starts,
            query_start_loc_host=starts,
            seq_lens=lens,
            seq_lens_host=lens,
            block_table=table,
            num_decodes=1,
        )
        out = cpu_ops(backend).attention(**args | {"q": args["q"][row : row + 1], "batch": alone})
        assert torch.equal(out[0], together[row])


def coded_caches(codes: str, num_blocks: int, block_size: int, shape: Any) -> list[KVCache]:
    """Strided as blocks of all layers together are."""
    heads, dim = shape.kv_heads, shape.head_dim
    dtype = FP8 if codes == "fp8" else torch.int8
    memory = torch.zeros(num_blocks, 2, 2, block_size, heads, dim, dtype=dtype)
    if codes == "fp8":
        ones = torch.full((heads,), 0.5)
        return [KVCache(memory[:, i, 0], memory[:, i, 1], ones, ones) for i in range(2)]
    scales = torch.zeros(num_blocks, 2, 2, heads, block_size)
    return [
        KVCache(memory[:, i, 0], memory[:, i, 1], scales[:, i, 0], scales[:, i, 1])
        for i in range(2)
    ]


@pytest.mark.parametrize("backend", VARIANTS)
@by_format
@by_dtype
@pytest.mark.parametrize("shape", SHAPES)
def test_blocks_are_composed_of_the_ops(
    shape: str, dtype: torch.dtype, codes: str, backend: str
) -> None:
    """Prompts, then tokens behind them. In 16 bits the composed blocks round in more places, but
    not before the first layer's keys and values."""
    ops, sizes = cpu_ops(backend), SHAPES[shape]
    stack = ops.prepare_blocks(make_blocks(ops, sizes, dtype, dtype))
    results = []
    for run in (ops.run_blocks, lambda *args: run_blocks(ops, *args)):
        first = make_step(sizes, dtype, [9, 33, 4], [9, 33, 4])
        block_size = first.kv_caches[0].k.shape[1]
        caches = coded_caches(codes, 64, block_size, sizes)
        run(stack, first.residual, first.batch, caches)
        written = [it.clone().view(torch.uint8) for it in caches[0].paged]
        after = make_step(sizes, dtype, [1, 1, 3], [10, 34, 7])
        run(stack, after.residual, after.batch, caches)
        results.append((written, first.residual, after.residual))
    (codes_of, *residuals), (others, *composed) = results
    assert all(torch.equal(ours, other) for ours, other in zip(codes_of, others, strict=True))
    assert any(ours.any() for ours in codes_of)
    apart = 0.0 if dtype == F32 else 16 * torch.finfo(dtype).eps
    for ours, other in zip(residuals, composed, strict=True):
        assert float((ours - other).abs().max()) <= apart * float(ours.abs().max())


@by_backend
@by_format
def test_copies_codes_and_their_scales(codes: str, backend: str) -> None:
    generator = torch.Generator().manual_seed(2)
    drawn = torch.randint(-128, 128, (2, 5, 2, 2, 3), generator=generator).to(torch.int8)
    caches = [it.clone().view(FP8 if codes == "fp8" else torch.int8) for it in drawn]
    scales = torch.rand(2, 5, 2, 2, generator=generator)
    copied = scales.clone()
    src, dst = torch.tensor([1, 3, 1]), torch.tensor([3, 1, 4])
    options = dict(zip(("k_scale", "v_scale"), copied, strict=True)) if codes == "int8" else {}
    cpu_ops(backend).copy_blocks(*caches, src, dst, **options)
    for copy, was in zip(caches, drawn, strict=True):
        assert torch.equal(copy.view(torch.int8)[[3, 1, 4]], was[[1, 3, 1]])
    for scale, was in zip(copied, scales, strict=True):
        moved = codes == "int8"
        assert torch.equal(scale[[3, 1, 4]], was[[1, 3, 1] if moved else [3, 1, 4]])
        assert torch.equal(scale[[0, 2]], was[[0, 2]])


def test_scales_and_caches_must_fit() -> None:
    ops = best_cpu_ops()
    args = featured_attention_args(Maker(F32), [1], [4], 2, 2, 16, int8=True)
    with pytest.raises(ShapeError, match=r"attention: k_scale .* want float32 \[N, Hk, B\]"):
        ops.attention(**args | {"k_scale": args["k_scale"].transpose(1, 2).contiguous()})
    with pytest.raises(ShapeError, match="attention: v_scale is missing"):
        ops.attention(**args | {"v_scale": None})
    floats = attention_args(Maker(F32), [1], [4], 2, 2, 16)
    with pytest.raises(ShapeError, match=r"attention: caches of torch.float32 have no k_scale"):
        ops.attention(**floats, k_scale=torch.ones(2), v_scale=torch.ones(2))
    rope = featured_rope_args(Maker(F32), 2, 2, 2, 16, rotary_dim=16, fp8=True)
    with pytest.raises(ShapeError, match="rope_and_cache: k_scale is missing"):
        ops.rope_and_cache(**rope | {"k_scale": None, "v_scale": None})
    with pytest.raises(ShapeError, match=r"copy_blocks: k_scale is missing"):
        ids = torch.tensor([0])
        ops.copy_blocks(args["k_cache"], args["v_cache"], ids, ids)
