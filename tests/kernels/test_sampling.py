"""Sampling: every backend draws the reference's tokens, from the right distribution."""

from __future__ import annotations

import dataclasses
import math
from functools import cache
from typing import TYPE_CHECKING

import pytest
import torch

from kernels.inputs import Row, sampling_batch
from kernels.reference.philox import uniform
from kernels.reference.sample import kept_weights
from tests.support.cpu_kernels import BACKENDS, REFERENCE, cpu_ops, threads

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kernels.ops import Ops, SamplingBatch

INF = float("inf")
NAN = float("nan")

ROWS = [
    Row(),
    Row(temperature=0),
    Row(temperature=0.3),
    Row(temperature=3.0),
    Row(top_k=1),
    Row(top_k=7),
    Row(top_k=500),
    Row(top_k=10**6),
    Row(top_p=0.9),
    Row(top_p=0.3),
    Row(top_p=1e-7),
    Row(min_p=0.05),
    Row(min_p=1.0),
    Row(temperature=0.8, top_k=50, top_p=0.95, min_p=0.01),
    Row(temperature=0, top_k=3, top_p=0.5),
    Row(temperature=1.5, top_p=0.99),
]


@pytest.fixture(params=("reference", *BACKENDS))
def ops(request: pytest.FixtureRequest) -> Iterator[Ops]:
    if request.param == "reference":
        yield REFERENCE
        return
    with threads(1 if request.param == "torch" else 2):
        yield cpu_ops(request.param)


def normal(*shape: int, seed: int = 0, scale: float = 3.0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale


def batch_of(row: Row, draws: int) -> SamplingBatch:
    return sampling_batch([dataclasses.replace(row, position=i) for i in range(draws)])


SEEDED_ROWS = [
    dataclasses.replace(row, seed=seed, position=31 * i + seed % 7, sample_index=i % 3)
    for seed in (1, 2**64 - 5)
    for i, row in enumerate(ROWS)
]


@cache
def reference_draws(
    vocab_size: int, dtype: torch.dtype
) -> tuple[torch.Tensor, SamplingBatch, torch.Tensor]:
    """Logits [R, V], their rows, and what the reference draws of them [R]."""
    logits = normal(len(SEEDED_ROWS), vocab_size, seed=vocab_size).to(dtype)
    batch = sampling_batch(SEEDED_ROWS)
    return logits, batch, REFERENCE.sample(logits, batch)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocab_size", [1, 2, 63, 65, 1000, 49152])
def test_draws_what_the_reference_draws(ops: Ops, vocab_size: int, dtype: torch.dtype) -> None:
    logits, batch, expected = reference_draws(vocab_size, dtype)
    actual = ops.sample(logits, batch)
    assert actual.dtype == torch.int64
    differing = (actual != expected).nonzero().flatten().tolist()
    # A backend that rounds exp in float32 may land on the neighbour where u * total is that
    # close to a step of the cumulative distribution, and only there.
    for r in differing:
        low, high = sorted((int(actual[r]), int(expected[r])))
        kept = kept_weights(logits[r : r + 1].double(), sampling_batch([SEEDED_ROWS[r]]))[0]
        u = float(uniform(batch.seed[r], batch.position[r], batch.sample_index[r]))
        between = kept[low:high].sum() - kept[low]
        step = kept[: low + 1].sum()
        assert between < 1e-5 * kept.sum(), (SEEDED_ROWS[r], low, high)
        assert abs(float(step - u * kept.sum())) < 1e-5 * float(kept.sum()), (
            SEEDED_ROWS[r],
            low,
            high,
        )
    assert len(differing) <= 1


def test_row_alone_is_row_in_batch(ops: Ops) -> None:
    logits = normal(len(ROWS), 777, seed=1)
    together = ops.sample(logits, sampling_batch(ROWS))
    for i, row in enumerate(ROWS):
        alone = ops.sample(logits[i : i + 1].clone(), sampling_batch([row]))
        assert alone[0] == together[i]
    # Again, in another order.
    order = torch.randperm(len(ROWS), generator=torch.Generator().manual_seed(2))
    shuffled = ops.sample(logits[order], sampling_batch([ROWS[i] for i in order.tolist()]))
    assert torch.equal(shuffled, together[order])


def test_rows_of_a_wider_tensor(ops: Ops) -> None:
    wide = normal(4, 200, seed=3)
    batch = sampling_batch([Row(seed=i) for i in range(4)])
    assert torch.equal(ops.sample(wide[:, :150], batch), ops.sample(wide[:, :150].clone(), batch))


@pytest.mark.parametrize("field", ["seed", "position", "sample_index"])
def test_each_coordinate_changes_the_draw(ops: Ops, field: str) -> None:
    logits = normal(1, 5000, seed=4, scale=0.1)
    ids = {
        int(ops.sample(logits, sampling_batch([dataclasses.replace(Row(), **{field: value})])))
        for value in (0, 1, 2, 3, 2**31 - 1)
    }
    assert len(ids) == 5


def test_both_words_of_the_seed_count(ops: Ops) -> None:
    logits = normal(1, 5000, seed=4, scale=0.1)
    seeds = (5, 5 + 2**32, 5 + 2**63)
    assert len({int(ops.sample(logits, sampling_batch([Row(seed=s)]))) for s in seeds}) == 3


def chi_square_limit(degrees: int) -> float:
    """The value that chi-square exceeds once in about 10^5 (Wilson and Hilferty, 1931)."""
    z = 4.265
    return degrees * (1 - 2 / (9 * degrees) + z * math.sqrt(2 / (9 * degrees))) ** 3


@pytest.mark.parametrize(
    "row",
    [Row(), Row(temperature=0.5), Row(top_k=5), Row(top_p=0.7), Row(min_p=0.2), Row(1.3, 12, 0.9)],
    ids=str,
)
def test_frequencies_fit_the_distribution(ops: Ops, row: Row) -> None:
    draws, vocab_size = 6000, 20
    logits = normal(1, vocab_size, seed=11, scale=1.0)
    kept = kept_weights(logits.double(), sampling_batch([row]))[0]
    expected = kept / kept.sum() * draws
    ids = ops.sample(logits.expand(draws, -1).contiguous(), batch_of(row, draws))
    counts = torch.bincount(ids, minlength=vocab_size).double()
    assert counts[expected == 0].sum() == 0
    kept_ids = expected > 0
    assert int(kept_ids.sum()) > 1
    statistic = float(((counts - expected)[kept_ids] ** 2 / expected[kept_ids]).sum())
    assert statistic < chi_square_limit(int(kept_ids.sum()) - 1)


def test_limit_of_chi_square_rejects_a_biased_draw() -> None:
    """The test above can fail: 6000 draws show a bias of one in ten."""
    expected = torch.full((20,), 300.0)
    biased = expected + torch.tensor([30.0, -30.0] * 10)
    assert float(((biased - expected) ** 2 / expected).sum()) > chi_square_limit(19)
    # Published: chi-square(10) exceeds 35.56 with probability 10^-4 (z = 3.719), so ours is above.
    assert 35.56 < chi_square_limit(10) < 45


@pytest.mark.parametrize("temperature", [0.0, 1e-12, 1e-38, 1e-45])
def test_greedy_and_nearly_greedy(ops: Ops, temperature: float) -> None:
    logits = normal(3, 300, seed=5)
    rows = [Row(temperature=temperature, seed=i, top_p=0.9) for i in range(3)]
    assert torch.equal(ops.sample(logits, sampling_batch(rows)), logits.argmax(dim=-1))


@pytest.mark.parametrize("vocab_size", [5, 64, 1000])
def test_greedy_ties_take_the_lowest_id(ops: Ops, vocab_size: int) -> None:
    logits = torch.zeros(2, vocab_size)
    logits[1, [3, vocab_size - 1]] = 5.0
    for rows in ([Row(temperature=0)] * 2, [Row(temperature=0), Row(temperature=0, top_k=2)]):
        assert ops.sample(logits, sampling_batch(rows)).tolist() == [0, 3]
    # One sampled row beside them takes another path to the same ids.
    mixed = torch.cat((logits, logits[:1]))
    rows = [Row(temperature=0), Row(temperature=0), Row(temperature=1)]
    assert ops.sample(mixed, sampling_batch(rows))[:2].tolist() == [0, 3]


@cache
def draws_with_ties() -> list[tuple[torch.Tensor, SamplingBatch, torch.Tensor]]:
    """As reference_draws, of whole numbers, for each filter."""
    filters = Row(top_k=3), Row(top_k=30), Row(top_p=0.5), Row(top_p=0.9), Row(1.0, 20, 0.6)
    rows = normal(1, 400, seed=6).round().expand(200, -1).contiguous()
    batches = [batch_of(row, 200) for row in filters]
    return [(rows, batch, REFERENCE.sample(rows, batch)) for batch in batches]


def test_ties_in_filters_follow_the_reference(ops: Ops) -> None:
    for rows, batch, expected in draws_with_ties():
        assert torch.equal(ops.sample(rows, batch), expected)


def test_minus_infinity_is_never_drawn(ops: Ops) -> None:
    logits = torch.full((200, 90), -INF)
    logits[:, [7, 70]] = torch.tensor([1.0, 1.5])
    for row in (Row(), Row(top_k=50), Row(top_p=0.9), Row(min_p=0.1)):
        ids = ops.sample(logits, batch_of(row, 200))
        assert set(ids.tolist()) == {7, 70}


def test_not_a_number_counts_as_minus_infinity(ops: Ops) -> None:
    logits = normal(4, 100, seed=7)
    poisoned = logits.clone()
    poisoned[:, ::3] = NAN
    logits[:, ::3] = -INF
    batch = sampling_batch([Row(), Row(temperature=0), Row(top_p=0.9), Row(top_k=4)])
    assert torch.equal(ops.sample(poisoned, batch), ops.sample(logits, batch))


def test_rows_without_a_finite_maximum_are_greedy(ops: Ops) -> None:
    logits = normal(3, 100, seed=8)
    logits[0] = NAN
    logits[1] = -INF
    logits[2, [40, 60]] = INF
    rows = [Row(top_p=0.9), Row(top_k=4), Row()]
    assert ops.sample(logits, sampling_batch(rows)).tolist() == [0, 0, 40]


def test_no_rows(ops: Ops) -> None:
    assert ops.sample(torch.zeros(0, 10), sampling_batch([])).tolist() == []
