"""The kernels for penalties, biases and logprobs, interpreted on the CPU.

As test_triton_parity.py, this needs a process of its own. Penalties are held to torch's
float32 bit for bit, logprobs to torch's float64.
"""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch

from kernels.inputs import NAN, Maker, penalized_rows
from kernels.ops import TokenLists
from kernels.reference.ops import ReferenceOps
from kernels.shapes import ShapeError
from kernels.tolerances import assert_within_budget

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1; run by test_triton_runs.py", allow_module_level=True)

from kernels.cuda.ops import CudaOps
from kernels.cuda.penalties import BLOCK_K
from kernels.cuda.token_logprobs import PART_V

pytestmark = pytest.mark.interpreter

OPS = CudaOps(num_sms=1)
INF = float("inf")


def one_list(ids: list[int], row: int = 0) -> TokenLists:
    starts = torch.tensor([0, len(ids)])
    return TokenLists(torch.tensor([row]), starts, torch.tensor(ids, dtype=torch.int64), len(ids))


@pytest.mark.parametrize(
    "sizes", [[1], [0, 3, 0], [BLOCK_K, BLOCK_K + 1, 7, 0, 2 * BLOCK_K - 1], [0, 0]], ids=str
)
def test_penalties_equal_the_reference_bit_for_bit(sizes: list[int]) -> None:
    logits, batch = penalized_rows(Maker(torch.float32), 1100, sizes, 2 * len(sizes) + 1)
    expected = logits.clone()
    ReferenceOps().apply_penalties(expected, batch)
    assert torch.equal(expected, logits) == (sum(sizes) == 0)
    OPS.apply_penalties(logits, batch)
    assert torch.equal(logits.view(torch.int32), expected.view(torch.int32))


def test_penalties_on_views_of_one_upload() -> None:
    """As the runner makes them: views whose addresses are aligned to their elements only."""
    logits, batch = penalized_rows(Maker(torch.float32), 300, [5, 40, 17], 6)
    expected = logits.clone()
    ReferenceOps().apply_penalties(expected, batch)
    known = batch.known
    ints = torch.cat([known.rows, known.starts, known.ids]).split([3, 4, 62])
    factors = (batch.repetition, batch.frequency, batch.presence)
    *views, counts = torch.cat([*factors, batch.counts]).split([3, 3, 3, 62])
    OPS.apply_penalties(
        logits,
        replace(
            batch,
            known=TokenLists(*ints, longest=known.longest),
            counts=counts,
            repetition=views[0],
            frequency=views[1],
            presence=views[2],
        ),
    )
    assert torch.equal(logits, expected)


@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")
@pytest.mark.parametrize("repetition", [1e-40, 1e38, 1.7])
@pytest.mark.parametrize(("frequency", "presence"), [(0.0, 0.0), (-2.0, 3e38), (3e38, -3e38)])
def test_extremes_of_penalties(repetition: float, frequency: float, presence: float) -> None:
    values = [0.0, -0.0, 1e-40, -1e-40, 3e38, -3e38, INF, -INF, NAN, 1.5, -1.5]
    logits = torch.tensor([values, values])
    _, batch = penalized_rows(Maker(torch.float32), len(values), [len(values)], 2)
    batch = replace(
        batch,
        repetition=torch.tensor([repetition]),
        frequency=torch.tensor([frequency]),
        presence=torch.tensor([presence]),
    )
    expected = logits.clone()
    ReferenceOps().apply_penalties(expected, batch)
    OPS.apply_penalties(logits, batch)
    torch.testing.assert_close(logits, expected, rtol=0, atol=0, equal_nan=True)
    penalized = logits[int(batch.known.rows[0])]
    infinite = torch.tensor(values).isinf()
    assert torch.equal(penalized.isinf(), infinite)
    assert penalized[8].isnan()


@pytest.mark.parametrize("size", [0, 1, BLOCK_K + 5])
def test_biases_equal_the_reference_bit_for_bit(size: int) -> None:
    logits, batch = penalized_rows(Maker(torch.float32), 1100, [size, 3], 4)
    values = Maker(torch.float32, seed=1).normal(size + 3) * 50
    logits[int(batch.known.rows[1])] = -INF
    expected = logits.clone()
    ReferenceOps().add_logit_bias(expected, batch.known, values)
    OPS.add_logit_bias(logits, batch.known, values)
    assert torch.equal(logits, expected)


def test_rows_of_a_wider_tensor() -> None:
    wide = Maker(torch.float32).normal(4, 200)
    _, batch = penalized_rows(Maker(torch.float32), 150, [20, 30], 4)
    dense = wide[:, 30:180].contiguous()
    ReferenceOps().apply_penalties(dense, batch)
    ReferenceOps().add_logit_bias(dense, one_list([2, 149], row=3), torch.tensor([1.0, -2.0]))
    expected = wide.clone()
    expected[:, 30:180] = dense
    OPS.apply_penalties(wide[:, 30:180], batch)
    OPS.add_logit_bias(wide[:, 30:180], one_list([2, 149], row=3), torch.tensor([1.0, -2.0]))
    assert torch.equal(wide, expected)


def assert_logprobs(logits: torch.Tensor, token_ids: torch.Tensor) -> None:
    """Values against float64, ranks against what the op says of all tokens."""
    told = OPS.token_logprobs(logits, token_ids, with_all=True)
    assert told.all_values is not None
    exact = torch.log_softmax(logits.double(), dim=-1)
    reference = ReferenceOps().token_logprobs(logits, token_ids, with_all=True)
    assert reference.all_values is not None
    assert_within_budget(told.all_values, exact, reference.all_values, "token_logprobs")
    own = told.all_values.gather(1, token_ids.unsqueeze(1))
    assert torch.equal(told.values, own.squeeze(1))
    assert torch.equal(told.ranks, 1 + (told.all_values > own).sum(dim=1))
    alone = OPS.token_logprobs(logits, token_ids)
    assert alone.all_values is None
    assert torch.equal(alone.values, told.values)
    assert torch.equal(alone.ranks, told.ranks)


@pytest.mark.parametrize(
    ("vocab_size", "dtype"),
    [
        (1, torch.float32),
        (65, torch.float16),
        (PART_V, torch.bfloat16),
        (PART_V + 1, torch.float32),
        (3 * PART_V - 7, torch.bfloat16),
    ],
    ids=str,
)
def test_logprobs_and_ranks(vocab_size: int, dtype: torch.dtype) -> None:
    logits = Maker(dtype).normal(4, vocab_size) * 4
    logits[1] = logits[1].round()  # ties everywhere
    logits[2] += 200
    token_ids = Maker(dtype).integers(0, vocab_size, 4)
    token_ids[3] = logits[3].argmax()
    assert_logprobs(logits, token_ids)
    told = OPS.token_logprobs(logits, token_ids)
    assert told.ranks[3] == 1


@pytest.mark.parametrize("vocab_size", [700, 2 * PART_V + 3])
def test_ranks_of_well_separated_logits_are_the_reference_s(vocab_size: int) -> None:
    """Steps of 1 / 64 keep neighbours apart after rounding, so ranks have one right answer."""
    logits = torch.stack([Maker(torch.float32, seed=i).permutation(vocab_size) for i in range(3)])
    logits = logits / 64
    token_ids = torch.tensor([0, vocab_size - 1, 5])
    expected = ReferenceOps().token_logprobs(logits, token_ids)
    told = OPS.token_logprobs(logits, token_ids)
    assert torch.equal(told.ranks, expected.ranks)
    by_hand = vocab_size - (logits.gather(1, token_ids.unsqueeze(1)).squeeze(1) * 64).long()
    assert torch.equal(told.ranks, by_hand)


def test_a_row_s_logprobs_do_not_follow_the_batch() -> None:
    logits = Maker(torch.bfloat16).normal(5, 2 * PART_V + 100) * 3
    token_ids = torch.arange(5) * 1000
    together = OPS.token_logprobs(logits, token_ids)
    for i in range(5):
        alone = OPS.token_logprobs(logits[i : i + 1], token_ids[i : i + 1])
        assert torch.equal(alone.values[0], together.values[i])
        assert alone.ranks[0] == together.ranks[i]


@pytest.mark.filterwarnings("ignore:(invalid value|divide by zero):RuntimeWarning")
def test_logprobs_of_what_is_no_number() -> None:
    width = PART_V + 50
    logits = Maker(torch.float32).normal(5, width)
    logits[0, :PART_V] = -INF  # a part without a token
    logits[1] = -INF
    logits[2, 7] = INF
    logits[3, PART_V + 1] = NAN
    logits[4, 3:] = -INF
    token_ids = torch.tensor([PART_V + 3, 0, 7, 5, 4])
    told = OPS.token_logprobs(logits, token_ids, with_all=True)
    expected = ReferenceOps().token_logprobs(logits, token_ids, with_all=True)
    torch.testing.assert_close(told, expected, rtol=1e-6, atol=1e-6, equal_nan=True)
    assert told.values.isnan().tolist() == [False, True, True, True, False]


def test_logprobs_of_strided_rows_and_of_none() -> None:
    wide = Maker(torch.float16).normal(3, 200)
    assert_logprobs(wide[:, 20:170], torch.tensor([0, 149, 70]))
    told = OPS.token_logprobs(wide[:0], torch.zeros(0, dtype=torch.int64), with_all=True)
    assert [len(part) for part in told if part is not None] == [0, 0, 0]


@pytest.mark.parametrize("ops", [OPS, ReferenceOps()], ids=["cuda", "reference"])
def test_arguments_of_another_shape_are_refused(ops: CudaOps | ReferenceOps) -> None:
    logits, batch = penalized_rows(Maker(torch.float32), 50, [3, 4], 5)
    with pytest.raises(ShapeError, match="counts"):
        ops.apply_penalties(logits, replace(batch, counts=batch.counts[1:]))
    with pytest.raises(ShapeError, match="logits"):
        ops.apply_penalties(logits.bfloat16(), batch)
    with pytest.raises(ShapeError, match="values"):
        ops.add_logit_bias(logits, batch.known, torch.ones(3))
    with pytest.raises(ShapeError, match="token_ids"):
        ops.token_logprobs(logits, torch.zeros(5, dtype=torch.int32))
