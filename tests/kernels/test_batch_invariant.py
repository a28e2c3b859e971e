"""What batch-invariant mode promises of each op: a row's result depends on its own
sequence alone, to the last bit. By op, dtype and CPU variant; tests/parity has the
model's logits, test_triton_parity.py the CUDA kernels under the interpreter."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from kernels.cpu.batch_invariant import BatchInvariantCpuOps, one_token_sequences
from kernels.inputs import Maker, attention_batch
from kernels.registry import UnsupportedOps, load_ops
from tests.support.cpu_kernels import VARIANTS, batch_invariant_cpu_ops, best_cpu_ops
from tests.support.invariance import (
    Attended,
    assert_attention_is_invariant,
    assert_linear_is_invariant,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kernels.ops import Ops

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.fixture(scope="module", params=VARIANTS)
def ops(request: pytest.FixtureRequest) -> Ops:
    return batch_invariant_cpu_ops(request.param)


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    found = request.param
    assert isinstance(found, torch.dtype)
    return found


@pytest.mark.parametrize("shape", [(64, 96), (100, 37), (577, 1030)])
def test_linear(ops: Ops, dtype: torch.dtype, threads: None, shape: tuple[int, int]) -> None:
    assert_linear_is_invariant(ops, dtype, 70, *shape)


@pytest.mark.parametrize(
    ("length", "heads"),
    # 1100 keys are several spans of a decode, and every tile's edge.
    [(150, (9, 3, 64)), (1100, (4, 2, 32)), (130, (5, 1, 80)), (90, (3, 3, 24))],
)
def test_attention(ops: Ops, dtype: torch.dtype, length: int, heads: tuple[int, int, int]) -> None:
    attended = Attended.make(dtype, length, *heads)
    assert_attention_is_invariant(ops, attended, [0, 16, 63, 64, length // 2, length - 1])


def test_rows_of_the_other_ops(ops: Ops, dtype: torch.dtype, threads: None) -> None:
    maker = Maker(dtype)
    x, residual, weight = maker.normal(50, 130), maker.normal(50, 130), maker.normal(130)
    added = residual.clone()
    whole = (
        ops.rms_norm(x, weight, 1e-5),
        ops.add_rms_norm(x, added, weight, 1e-5),
        added,
        ops.silu_mul(x),
    )
    for begin, end in ((0, 1), (7, 9), (13, 48), (49, 50)):
        added = residual[begin:end].clone()
        part = (
            ops.rms_norm(x[begin:end], weight, 1e-5),
            ops.add_rms_norm(x[begin:end], added, weight, 1e-5),
            added,
            ops.silu_mul(x[begin:end]),
        )
        for mine, of_all in zip(part, whole, strict=True):
            assert torch.equal(mine, of_all[begin:end])


def test_each_token_becomes_a_sequence() -> None:
    table = torch.tensor([[3, 4], [5, 0], [0, 0]], dtype=torch.int32)
    batch = attention_batch([1, 3, 2], [20, 5, 0], table, "cpu")
    alone = one_token_sequences(batch)
    assert alone.query_start_loc.tolist() == [0, 1, 2, 3, 4, 5, 6]
    assert alone.seq_lens.tolist() == [20, 3, 4, 5, 0, 0]
    assert alone.block_table.tolist() == [[3, 4], [5, 0], [5, 0], [5, 0], [0, 0], [0, 0]]
    assert alone.num_decodes == 6
    decodes = attention_batch([1, 1], [20, 5], table[:2], "cpu")
    assert one_token_sequences(decodes) is decodes


def test_only_backends_that_can_promise_it_load() -> None:
    best_cpu_ops()
    assert isinstance(load_ops("cpu", batch_invariant=True), BatchInvariantCpuOps)
    with pytest.raises(UnsupportedOps, match="'reference' cannot promise"):
        load_ops("reference", batch_invariant=True)


def test_torch_in_place_of_the_library_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kernels.cpu.library.supported_variants", list)
    with pytest.raises(UnsupportedOps, match="do not depend on the batch"):
        load_ops("cpu", batch_invariant=True)
