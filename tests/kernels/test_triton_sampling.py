"""The sampling kernels draw the reference's tokens, interpreted on the CPU.

As test_triton_parity.py, this needs a process of its own.
"""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch

from kernels.inputs import NAN, Row, sampling_batch
from kernels.reference.philox import uniform
from kernels.reference.sample import sample as reference_sample

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1; run by test_triton_runs.py", allow_module_level=True)

from kernels.cuda.ops import CudaOps
from kernels.cuda.sample import sample

pytestmark = pytest.mark.interpreter

INF = float("inf")
ROWS = [
    Row(),
    Row(temperature=0),
    Row(temperature=3.0, seed=2**64 - 5),
    Row(top_k=1),
    Row(top_k=40, position=3),
    Row(top_k=10**6, position=2**33),
    Row(top_p=0.9, sample_index=2),
    Row(top_p=1e-7),
    Row(min_p=0.05, seed=9),
    Row(min_p=1.0),
    Row(temperature=0.8, top_k=50, top_p=0.95, min_p=0.01, seed=5),
    Row(temperature=0, top_k=3, top_p=0.5),
]


def normal(*shape: int, seed: int = 0, scale: float = 3.0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale


def assert_same_draws(logits: torch.Tensor, rows: list[Row], num_parts: int = 1) -> None:
    batch = sampling_batch(rows)
    ids = sample(logits, batch, num_sms=1, num_parts=num_parts)
    assert ids.dtype == torch.int64
    assert ids.tolist() == reference_sample(logits, batch).tolist()


@pytest.mark.parametrize(
    ("dtype", "vocab_size"),
    [(torch.float32, 65), (torch.float16, 1500), (torch.bfloat16, 1), (torch.bfloat16, 700)],
    ids=str,
)
def test_draws_what_the_reference_draws(dtype: torch.dtype, vocab_size: int) -> None:
    assert_same_draws(normal(len(ROWS), vocab_size, seed=vocab_size).to(dtype), ROWS)


@pytest.mark.parametrize(("num_parts", "vocab_size"), [(2, 1500), (4, 2500)])
def test_parts_of_a_row_draw_the_same(num_parts: int, vocab_size: int) -> None:
    """Two parts of 1024 and 476 logits; four, of which the last has none."""
    rows = [ROWS[i] for i in (1, 8, 10)]
    logits = normal(len(rows), vocab_size, seed=1).bfloat16()
    # The greatest logit twice, in two parts.
    logits[0, [700, 1400]] = 50.0
    assert_same_draws(logits, rows, num_parts)


def test_ties_at_the_cut_follow_the_reference() -> None:
    """Whole numbers only: top_k keeps all that tie, top_p those of the highest ids."""
    filters = [Row(top_k=30), Row(top_p=0.5), Row(1.0, 20, 0.6), Row(min_p=0.13)]
    rows = [replace(row, position=i) for row in filters for i in range(2)]
    logits = normal(1, 1100, seed=6).round().expand(len(rows), -1).contiguous().bfloat16()
    assert_same_draws(logits, rows)
    assert_same_draws(logits[2::3, :1090], rows[2::3], num_parts=2)


def test_equal_logits_show_the_random_bits() -> None:
    """Of 1024 equal logits the one at u is drawn: ten bits of Philox a row."""
    seeds = [0, 2**32 - 1, 2**32, 2**64 - 1]
    positions = [0, 2**32 - 1, 2**32 + 7]
    rows = [
        Row(seed=seed, position=position, sample_index=i)
        for i, seed in enumerate(seeds)
        for position in positions
    ]
    batch = sampling_batch(rows)
    u = uniform(batch.seed, batch.position, batch.sample_index)
    ids = sample(torch.zeros(len(rows), 1024), batch, num_sms=1)
    assert ids.tolist() == (u * 1024).floor().long().tolist()
    assert len(set(ids.tolist())) > len(rows) * 3 // 4


def test_logits_that_are_no_numbers() -> None:
    logits = normal(7, 300, seed=8).bfloat16()
    logits[0] = NAN
    logits[1] = -INF
    logits[2, [40, 60]] = INF
    logits[3, ::3] = NAN
    logits[4, :200] = -INF
    logits[5, :] = -INF
    logits[5, 123] = 1.5
    logits[6, :] = -1e38
    filters = [Row(top_p=0.9), Row(top_k=4), Row(min_p=0.1)]
    rows = [filters[i % 3] for i in range(len(logits))]
    assert_same_draws(logits, rows)
    assert_same_draws(logits, [Row(seed=3)] * len(logits))


def test_greedy_takes_the_lowest_id_of_equals() -> None:
    logits = torch.tensor([[0.0, 5.0, 5.0, NAN], [NAN, NAN, -1.0, -1.0], [-0.0, 0.0, -1.0, 0.0]])
    for rows in ([Row(temperature=0.0)] * 3, [Row(temperature=0, top_p=0.5)] * 3):
        assert sample(logits, sampling_batch(rows), num_sms=1).tolist() == [1, 2, 0]
    mixed = sampling_batch([*[Row(temperature=0.0)] * 3, Row()])
    assert sample(logits[[0, 1, 2, 2]], mixed, num_sms=1)[:3].tolist() == [1, 2, 0]


@pytest.mark.parametrize("temperature", [1e-12, 1e-45])
def test_nearly_greedy(temperature: float) -> None:
    logits = normal(2, 300, seed=5).half()
    rows = [Row(temperature=temperature, seed=i, top_p=0.9) for i in range(2)]
    batch = sampling_batch(rows)
    assert torch.equal(sample(logits, batch, num_sms=1), logits.argmax(dim=-1))


def test_rows_of_a_wider_tensor() -> None:
    wide = normal(3, 200, seed=3)
    assert_same_draws(wide[:, 20:170], [Row(seed=i) for i in range(3)])


def test_through_the_ops() -> None:
    logits = normal(2, 130, seed=2).bfloat16()
    batch = sampling_batch([Row(top_p=0.8, seed=i) for i in range(2)])
    assert torch.equal(CudaOps(num_sms=1).sample(logits, batch), reference_sample(logits, batch))
    assert CudaOps(num_sms=1).sample(torch.zeros(0, 10), sampling_batch([])).tolist() == []
