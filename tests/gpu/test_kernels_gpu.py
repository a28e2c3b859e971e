"""The CUDA backend on a real device, bfloat16 too: the same cases as on the CPU."""

from __future__ import annotations

import os
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch

from kernels.blocks import route
from kernels.feature_inputs import (
    FEATURE_CASES,
    FP8_ATTENTION_CASES,
    FP8_ROPE_CASES,
    INT8_ATTENTION_CASES,
    INT8_ROPE_CASES,
    assert_nearest_codes,
    assert_nearest_int8,
    exact_kv,
)
from kernels.fp8 import quantize_activations, quantize_fp8
from kernels.inputs import (
    CASES,
    NAN,
    Case,
    Maker,
    Row,
    attention_args,
    penalized_rows,
    sampling_batch,
)
from kernels.int4 import quantize_int4
from kernels.reference.ops import ReferenceOps
from kernels.reference.philox import uniform
from kernels.tolerances import assert_within_budget
from tests.kernels.test_lora import TOKENS, add

if TYPE_CHECKING:
    from kernels.cuda.ops import CudaOps

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available(), reason="NO CUDA DEVICE: kernels not run on hardware"
    ),
    pytest.mark.skipif(
        os.environ.get("TRITON_INTERPRET") == "1", reason="kernels are interpreted in this process"
    ),
]

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def _attention(label: str, *sizes: object) -> Case:
    names = ("query_lens", "seq_lens", "heads", "kv_heads", "head_dim", "block_size")
    return Case("attention", label, partial(attention_args, **dict(zip(names, sizes, strict=True))))


# Sizes that the interpreter would take minutes for.
LARGE_CASES = [
    _attention("large-decode", [1] * 7, [1, 255, 4096, 8191, 33, 2048, 700], 32, 8, 128, 16),
    _attention("large-alone", [1], [32768], 16, 2, 64, 16),
    _attention("large-prefill", [1, 700, 2048], [300, 1500, 2048], 32, 8, 128, 16),
    _attention("large-head-80", [1, 1, 300], [1000, 50, 900], 32, 32, 80, 32),
    _attention("large-head-96", [1, 1, 300], [1000, 50, 900], 12, 4, 96, 16),
    _attention("large-head-256", [1, 1, 300], [1000, 50, 900], 8, 4, 256, 16),
    _attention("large-short-chunks", [1, 1, 2, 3], [4000, 50, 900, 3], 9, 3, 64, 16),
    _attention("large-group-70", [1, 40], [2000, 60], 70, 1, 64, 16),
]


@pytest.fixture(scope="module")
def ops() -> CudaOps:
    from kernels.cuda.ops import CudaOps

    # cuBLAS may otherwise sum 16-bit products in 16 bits, outside the error budget.
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    return CudaOps()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "case",
    [*CASES, *LARGE_CASES, *FEATURE_CASES, *FP8_ATTENTION_CASES, *INT8_ATTENTION_CASES],
    ids=str,
)
def test_matches_the_reference(case: Case, dtype: torch.dtype, ops: CudaOps) -> None:
    actual = case.run(ops, dtype, "cuda")
    reference = case.run(ReferenceOps(), dtype)
    exact = case.run(ReferenceOps(torch.float64), dtype, widen=True)
    assert actual.keys() == reference.keys()
    for name, value in actual.items():
        assert_within_budget(value, exact[name], reference[name], f"{case} {name}")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", FP8_ROPE_CASES, ids=str)
def test_writes_the_nearest_8_bit_floats(case: Case, dtype: torch.dtype, ops: CudaOps) -> None:
    """By the hardware's conversion, which the interpreter does not have."""
    actual = case.run(ops, dtype, "cuda")
    exact = case.run(ReferenceOps(torch.float64), dtype, widen=True)
    for name in ("k_cache", "v_cache"):
        assert_nearest_codes(actual[name], exact[name], dtype, f"{case} {name}")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tokens", TOKENS)
def test_adapters_match_the_reference(tokens: str, dtype: torch.dtype, ops: CudaOps) -> None:
    for rows, in_features in (((37,), 33), ((4096, 1024, 1024), 4096)):
        case = (dtype, rows, TOKENS[tokens])
        exact = add(ReferenceOps(torch.float64), *case, in_features=in_features, widen=True)
        reference = add(ReferenceOps(), *case, in_features=in_features)
        actual = add(ops, *case, in_features=in_features, device="cuda").cpu()
        assert_within_budget(actual, exact, reference, f"{rows} {tokens}")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", INT8_ROPE_CASES, ids=str)
def test_writes_the_nearest_integers(case: Case, dtype: torch.dtype, ops: CudaOps) -> None:
    actual = case.run(ops, dtype, "cuda")
    assert_nearest_int8(actual, exact_kv(case, dtype), dtype, str(case))


def test_equal_logits_show_the_random_bits(ops: CudaOps) -> None:
    """Of 2^16 equal logits the one at u is drawn: sixteen bits of Philox a row."""
    seeds = [0, 1, 2**32 - 1, 2**63 - 1, 2**63, 2**64 - 1]
    positions = [0, 1, 2**31, 2**32 - 1, 2**33]
    rows = [
        Row(seed=seed, position=position, sample_index=i)
        for i, seed in enumerate(seeds)
        for position in positions
    ]
    batch = sampling_batch(rows)
    u = uniform(batch.seed, batch.position, batch.sample_index)
    logits = torch.zeros(len(rows), 1 << 16, device="cuda")
    ids = ops.sample(logits, sampling_batch(rows, "cuda"))
    assert ids.tolist() == (u * (1 << 16)).floor().long().tolist()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sample_matches_the_reference(dtype: torch.dtype, ops: CudaOps) -> None:
    kinds = [
        Row(temperature=0.0),
        Row(seed=1),
        Row(temperature=0.7, top_k=50, seed=2),
        Row(temperature=1.3, top_p=0.8, seed=3, sample_index=1),
        Row(temperature=0.9, min_p=0.05, seed=2**64 - 1),
    ]
    rows = [
        Row(r.temperature, r.top_k, r.top_p, r.min_p, r.seed, position, r.sample_index)
        for position in range(20)
        for r in kinds
    ]
    logits = Maker(dtype).normal(len(rows), 49152) * 3
    logits[1, 7] = NAN
    expected = ReferenceOps().sample(logits, sampling_batch(rows))
    ids = ops.sample(logits.cuda(), sampling_batch(rows, "cuda"))
    assert torch.equal(ids.cpu(), expected)


@pytest.mark.parametrize("rows", [1, 3, 300])
def test_parts_of_a_row_draw_the_same(rows: int, ops: CudaOps) -> None:
    kinds = [Row(top_p=0.9, seed=4), Row(top_k=30, seed=5), Row(0.6, 100, 0.8, 0.02)]
    chosen = [replace(kinds[i % 3], position=i) for i in range(rows)]
    logits = Maker(torch.bfloat16).normal(rows, 256000) * 4
    expected = ReferenceOps().sample(logits[:6], sampling_batch(chosen[:6]))
    ids = ops.sample(logits.cuda(), sampling_batch(chosen, "cuda"))
    assert torch.equal(ids[:6].cpu(), expected)


def test_penalties_and_biases_equal_the_reference(ops: CudaOps) -> None:
    """Bit for bit: division and rounding are the hardware's here."""
    sizes = [700, 0, 3, 1025]
    expected, batch = penalized_rows(Maker(torch.float32), 50000, sizes, 9)
    ReferenceOps().apply_penalties(expected, batch)
    ReferenceOps().add_logit_bias(expected, batch.known, batch.counts)
    logits, there = penalized_rows(Maker(torch.float32, "cuda"), 50000, sizes, 9)
    ops.apply_penalties(logits, there)
    ops.add_logit_bias(logits, there.known, there.counts)
    assert torch.equal(logits.cpu(), expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_token_logprobs(dtype: torch.dtype, ops: CudaOps) -> None:
    logits = Maker(dtype).normal(20, 128256) * 4
    token_ids = Maker(dtype).integers(0, 128256, 20)
    exact = torch.log_softmax(logits.double(), dim=-1)
    reference = ReferenceOps().token_logprobs(logits, token_ids, with_all=True)
    told = ops.token_logprobs(logits.cuda(), token_ids.cuda(), with_all=True)
    assert told.all_values is not None
    assert reference.all_values is not None
    everything = told.all_values.cpu()
    assert_within_budget(everything, exact, reference.all_values, "token_logprobs")
    own = everything.gather(1, token_ids.unsqueeze(1))
    assert torch.equal(told.values.cpu(), own.squeeze(1))
    assert torch.equal(told.ranks.cpu(), 1 + (everything > own).sum(dim=1))
    alone = ops.token_logprobs(logits[7:8].cuda(), token_ids[7:8].cuda())
    assert torch.equal(alone.values[0], told.values[7])


def _assert_product(
    actual: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, label: str
) -> None:
    exact, reference = x.double() @ weight.double().T, x.float() @ weight.float().T
    assert_within_budget(actual.cpu(), exact, reference.to(actual.dtype), label)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tokens", [1, 30, 200])
@pytest.mark.parametrize("group", [32, 128])
def test_int4_linear(group: int, tokens: int, dtype: torch.dtype, ops: CudaOps) -> None:
    weight = quantize_int4(Maker(torch.float32).normal(1000, 2048), group)
    x = Maker(dtype).normal(tokens, 2048)
    prepared = ops.prepare_int4_linear([weight.to("cuda")], None, dtype)
    actual = ops.linear(x.cuda(), prepared)
    _assert_product(actual, x, weight.dequantize(torch.float64), "int4")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tokens", [1, 30, 200])
@pytest.mark.parametrize("block", [(0, 0), (1, 0), (128, 128)], ids=str)
def test_fp8_linear(block: tuple[int, int], tokens: int, dtype: torch.dtype, ops: CudaOps) -> None:
    weight = quantize_fp8(Maker(torch.float32).normal(1000, 2048), block)
    x = Maker(dtype).normal(tokens, 2048)
    prepared = ops.prepare_fp8_linear([weight.to("cuda")], None, dtype)
    left = x.double()
    if torch.cuda.get_device_capability() >= (8, 9):
        left = quantize_activations(x, weight.block[1]).dequantize(weight.block[1], torch.float64)
    actual = ops.linear(x.cuda(), prepared)
    _assert_product(actual, left, weight.dequantize(torch.float64), "fp8")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tokens", [1, 30, 500])
def test_experts(tokens: int, dtype: torch.dtype, ops: CudaOps) -> None:
    maker = Maker(dtype)
    x, gate_up = maker.normal(tokens, 512), maker.normal(8, 2 * 700, 512) / 512**0.5
    down = maker.normal(8, 512, 700) / 700**0.5
    ids = torch.stack([maker.permutation(8)[:2] for _ in range(tokens)])
    scales = maker.normal(tokens, 2, dtype=torch.float32).softmax(dim=1)
    wide = ReferenceOps(torch.float64)
    prepared = wide.prepare_experts(gate_up.double(), down.double())
    exact = wide.experts(x.double(), prepared, ids, scales, "silu")
    reference = ReferenceOps().experts(
        x, ReferenceOps().prepare_experts(gate_up, down), ids, scales, "silu"
    )
    prepared_cuda = ops.prepare_experts(gate_up.cuda(), down.cuda())
    actual = ops.experts(x.cuda(), prepared_cuda, ids.cuda(), scales.cuda(), "silu")
    assert_within_budget(actual.cpu(), exact, reference, "experts")


def test_a_captured_decode_replays_with_other_contents(ops: CudaOps) -> None:
    def args_of(seed: int, seq_lens: list[int]) -> dict[str, Any]:
        return attention_args(Maker(torch.bfloat16, "cuda", seed), [1] * 4, seq_lens, 8, 2, 64)

    # As many blocks, and as long a longest sequence: only contents and lengths differ.
    captured, again = args_of(1, [900, 17, 64, 5]), args_of(2, [900, 1, 33, 33])
    assert captured["k_cache"].shape == again["k_cache"].shape
    ops.attention(**captured)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = ops.attention(**captured)
    for name in ("q", "k_cache", "v_cache"):
        captured[name].copy_(again[name])
    captured["batch"].seq_lens.copy_(again["batch"].seq_lens)
    captured["batch"].block_table.copy_(again["batch"].block_table)
    graph.replay()
    torch.cuda.synchronize()
    assert out.isfinite().all()
    assert torch.equal(out, ops.attention(**again))


def test_captured_experts_follow_another_routing(ops: CudaOps) -> None:
    maker = Maker(torch.bfloat16, "cuda")
    x, router = maker.normal(30, 512), maker.normal(30, 8, dtype=torch.float32)
    weights = ops.prepare_experts(
        maker.normal(8, 2 * 700, 512) / 512**0.5, maker.normal(8, 512, 700) / 700**0.5
    )

    def mix() -> torch.Tensor:
        ids, scales = route(router, 2, renormalizes=True)
        return ops.experts(x, weights, ids, scales, "silu")

    mix()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = mix()
    # Every token to the same two experts is as uneven as it gets.
    router.copy_(torch.arange(8.0, device="cuda").expand(30, 8))
    x.copy_(maker.normal(30, 512))
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, mix())


@pytest.mark.parametrize("tokens", [1, 64])
@pytest.mark.parametrize("kind", ["int4", "fp8"])
def test_captured_products_replay_with_other_inputs(kind: str, tokens: int, ops: CudaOps) -> None:
    dtype = torch.bfloat16
    dense = Maker(torch.float32).normal(1000, 2048)
    if kind == "int4":
        weight: Any = ops.prepare_int4_linear([quantize_int4(dense, 128).to("cuda")], None, dtype)
    else:
        quantized = quantize_fp8(dense, (128, 128)).to("cuda")
        weight = ops.prepare_fp8_linear([quantized], None, dtype)
    maker = Maker(dtype, "cuda")
    x = maker.normal(tokens, 2048)
    ops.linear(x, weight)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = ops.linear(x, weight)
    x.copy_(maker.normal(tokens, 2048))
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, ops.linear(x, weight))
