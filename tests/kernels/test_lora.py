"""Adapters in a batch: what they add, to whom, and that nobody else notices."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from kernels.cpu.batch_invariant import load_batch_invariant_cpu_ops
from kernels.inputs import Maker
from kernels.lora import NO_SLOT, LoraBatch, LoraGroup, LoraPart, LoraSlots
from kernels.ops import AttentionBlock, Block, MlpBlock
from kernels.reference.ops import ReferenceOps
from kernels.tolerances import assert_within_budget
from tests.kernels.test_blocks import BATCHES, SHAPES, make_blocks, make_step
from tests.support.cpu_kernels import BACKENDS, VARIANTS, cpu_ops

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kernels.ops import Ops

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
CPU = torch.device("cpu")
MAX_RANK = 5
ROWS = {"one": (37,), "qkv": (48, 7, 7)}
RANKS: tuple[int | None, ...] = (5, 1, None)
"""Of the fused matrices, taken in turn; None has no adapter."""
TOKENS = {
    "decode": [2, NO_SLOT, 0, 2],
    "all-the-same": [0] * 5,
    "chunks": [NO_SLOT, 0, *[1] * 40, *[NO_SLOT] * 9, *[0] * 17, 2],
}


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """Teams of threads on shared cores wait for each other most of the time."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def batch_of(slots: Sequence[int], device: str = "cpu") -> LoraBatch:
    batch = LoraBatch.of(np.array(slots), lambda values: torch.from_numpy(values).to(device))
    assert batch is not None
    return batch


def parts_of(
    maker: Maker,
    in_features: int,
    rows: Sequence[int],
    ranks: Sequence[int | None] = (*RANKS, *RANKS),
) -> list[LoraPart | None]:
    ranks = ranks[: len(rows)]
    return [
        None
        if rank is None
        else LoraPart(maker.normal(rank, in_features), maker.normal(out, rank) / in_features**0.5)
        for rank, out in zip(ranks, rows, strict=True)
    ]


def add(
    ops: Ops,
    dtype: torch.dtype,
    rows: Sequence[int],
    tokens: Sequence[int],
    *,
    in_features: int = 33,
    device: str = "cpu",
    widen: bool = False,
) -> torch.Tensor:
    """Slots 0 and 1 are filled, 2 has been, and is empty again."""
    maker = Maker(dtype, device, seed=5)
    cast = torch.float64 if widen else dtype
    slots = ops.lora_slots(3, MAX_RANK, in_features, rows, cast, torch.device(device))
    assert slots.num_slots == 3
    for slot in (1, 2, 0, 1):
        parts = parts_of(maker, in_features, rows)
        slots.fill(slot, [p if p is None else LoraPart(p.a.to(cast), p.b.to(cast)) for p in parts])
    slots.clear(2)
    x = maker.normal(len(tokens), in_features).to(cast)
    y = maker.normal(len(tokens), sum(rows)).to(cast)
    before = y.clone()
    ops.add_lora(y, x, slots, batch_of(tokens, device))
    untouched = [index for index, slot in enumerate(tokens) if slot in (NO_SLOT, 2)]
    assert torch.equal(y[untouched], before[untouched])
    assert widen or not any(
        torch.equal(y[i], before[i]) for i, it in enumerate(tokens) if it in (0, 1)
    )
    return y


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("rows", ROWS)
def test_matches_the_exact_result(rows: str, tokens: str, dtype: torch.dtype, backend: str) -> None:
    case = (ROWS[rows], TOKENS[tokens])
    exact = add(ReferenceOps(torch.float64), dtype, *case, widen=True)
    reference = add(ReferenceOps(), dtype, *case)
    assert_within_budget(add(cpu_ops(backend), dtype, *case), exact, reference, f"{rows} {tokens}")


def test_the_reference_is_the_product_with_the_sum() -> None:
    """y + B A x is (W + B A) x."""
    maker = Maker(torch.float64, seed=1)
    weight, x = maker.normal(20, 9), maker.normal(4, 9)
    part = LoraPart(maker.normal(3, 9), maker.normal(20, 3))
    ops = ReferenceOps(torch.float64)
    slots = ops.lora_slots(1, 8, 9, (20,), torch.float64, CPU)
    slots.fill(0, [part])
    y = x @ weight.T
    ops.add_lora(y, x, slots, batch_of([0, 0, NO_SLOT, 0]))
    merged = x @ (weight + part.b @ part.a).T
    assert torch.allclose(y[[0, 1, 3]], merged[[0, 1, 3]], rtol=1e-12, atol=1e-12)
    assert torch.equal(y[2], (x @ weight.T)[2])


def test_tokens_are_grouped_by_slot() -> None:
    batch = batch_of([NO_SLOT, 3, *[1] * 33, NO_SLOT, 3])
    assert batch.groups == (LoraGroup(1, 0, 33, first=2), LoraGroup(3, 33, 35, first=None))
    assert batch.tokens.tolist() == [*range(2, 35), 1, 36]
    assert batch.tiles.tolist() == [[1, 0, 16], [1, 16, 32], [1, 32, 33], [3, 33, 35]]
    assert batch.tiles.dtype == torch.int32
    assert LoraBatch.of(np.array([NO_SLOT, NO_SLOT]), torch.from_numpy) is None


def with_slots(ops: Ops, blocks: Sequence[Block], dtype: torch.dtype, shape: str) -> list[Block]:
    """Slot 0 of each product is filled."""
    maker, sizes = Maker(dtype, seed=9), SHAPES[shape]
    heads, kv_heads, dim = sizes.heads, sizes.kv_heads, sizes.head_dim

    def slots(in_features: int, *rows: int) -> LoraSlots:
        made = ops.lora_slots(2, MAX_RANK, in_features, rows, dtype, CPU)
        made.fill(0, parts_of(maker, in_features, rows))
        return made

    adapted: list[Block] = []
    for block in blocks:
        if isinstance(block, AttentionBlock):
            qkv = slots(sizes.hidden, heads * dim, kv_heads * dim, kv_heads * dim)
            out = slots(heads * dim, sizes.hidden)
            adapted.append(replace(block, qkv_lora=qkv, out_lora=out))
        else:
            assert isinstance(block, MlpBlock)
            gate_up = slots(sizes.hidden, sizes.inter, sizes.inter)
            down = slots(sizes.inter, sizes.hidden)
            adapted.append(replace(block, gate_up_lora=gate_up, down_lora=down))
    return adapted


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_tokens_without_an_adapter_are_the_same_to_the_last_bit(
    shape: str, dtype: torch.dtype
) -> None:
    """The blocks are composed where anybody has an adapter, and one call of C++ elsewhere."""
    cpu_ops(VARIANTS[-1])  # builds it
    ops = load_batch_invariant_cpu_ops()
    blocks = with_slots(ops, make_blocks(ops, SHAPES[shape], dtype, dtype), dtype, shape)
    stack = ops.prepare_blocks(blocks)
    query_lens, seq_lens = BATCHES["mixed"]
    alone = make_step(SHAPES[shape], dtype, query_lens, seq_lens)
    ops.run_blocks(stack, alone.residual, alone.batch, alone.kv_caches)
    beside = make_step(SHAPES[shape], dtype, query_lens, seq_lens)
    token_slots = np.full(sum(query_lens), NO_SLOT)
    token_slots[1] = 0
    token_slots[2:7] = 0
    batch = replace(beside.batch, lora=batch_of(token_slots.tolist()))
    ops.run_blocks(stack, beside.residual, batch, beside.kv_caches)
    others = token_slots == NO_SLOT
    assert torch.equal(beside.residual[others], alone.residual[others])
    assert not torch.equal(beside.residual[~others], alone.residual[~others])


@pytest.mark.parametrize("backend", VARIANTS)
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_a_token_does_not_depend_on_the_others_of_its_adapter(
    dtype: torch.dtype, backend: str
) -> None:
    maker, ops = Maker(dtype, seed=2), cpu_ops(backend)
    slots = ops.lora_slots(2, MAX_RANK, 130, (96, 40), dtype, CPU)
    slots.fill(1, parts_of(maker, 130, (96, 40)))
    x, y = maker.normal(37, 130), maker.normal(37, 136)
    together = y.clone()
    ops.add_lora(together, x, slots, batch_of([1] * 37))
    for at in (0, 17, 36):
        one = y[at : at + 1].clone()
        ops.add_lora(one, x[at : at + 1], slots, batch_of([1]))
        assert torch.equal(one[0], together[at])
