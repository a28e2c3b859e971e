"""Logits processors against transformers' and against numpy, on random logits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from transformers.generation.logits_process import (
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from engine_core.runner.logits import LogitsProcessors
from engine_core.runner.rows import Rows
from engine_core.sched.plan import NO_TOKEN, NewSeq, StepPlan
from kernels.reference.ops import ReferenceOps
from pagewire.types import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Sequence

VOCAB_SIZE = 97
EOS = (2, 5)
MAX_LEN = 64
NUM_ROWS = 5
INF = float("inf")


class Batch:
    """Rows 0..n-1 that hold these sequences, and random logits for each."""

    def __init__(
        self, seqs: Sequence[tuple[Sequence[int], int, dict[str, Any]]], seed: int = 0
    ) -> None:
        """seqs: (ids, how many of them are prompt, sampling)."""
        self.rows = Rows(max(NUM_ROWS, len(seqs)), MAX_LEN, block_size=16)
        self.processors = LogitsProcessors(self.rows, EOS, ReferenceOps())
        new = tuple(
            NewSeq(row, tuple(ids), num_prompt, SamplingParams(max_tokens=50, **sampling))
            for row, (ids, num_prompt, sampling) in enumerate(seqs)
        )
        self.follow(StepPlan(1, (), new, ()))
        generator = torch.Generator().manual_seed(seed)
        self.logits = torch.randn(len(seqs), VOCAB_SIZE, generator=generator) * 5
        self.numbers = np.arange(len(seqs))

    def follow(self, plan: StepPlan) -> None:
        self.rows.apply(plan)
        self.processors.follow(plan)

    def draw(self, token_ids: Sequence[int]) -> None:
        """One more id in every row."""
        ends = self.rows.num_tokens[self.numbers].copy()
        tenancy = self.rows.tenancy[self.numbers].copy()
        self.rows.append_unresolved(self.numbers)
        self.rows.resolve(self.numbers, tenancy, ends, np.array(token_ids))

    def process(self) -> torch.Tensor:
        before = self.logits.clone()
        processed = self.processors.process(self.logits, self.numbers)
        assert torch.equal(self.logits, before), "the raw logits are for logprobs"
        drawn = processed.logits.argmax(dim=-1)
        assert torch.equal(processed.mark_dead_ends(drawn), drawn)
        return processed.logits


def random_ids(rng: np.random.Generator, size: int, high: int = VOCAB_SIZE) -> list[int]:
    ids: list[int] = rng.integers(0, high, size).tolist()
    return ids


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(7)


@pytest.mark.parametrize("penalty", [1.3, 0.7, 1.0])
def test_repetition_penalty(rng: np.random.Generator, penalty: float) -> None:
    seqs = [(random_ids(rng, n, 40), n // 2, {"repetition_penalty": penalty}) for n in (2, 9, 60)]
    batch = Batch(seqs)
    reference = RepetitionPenaltyLogitsProcessor(penalty)
    for at, row in enumerate(batch.process()):
        expected = reference(torch.tensor([seqs[at][0]]), batch.logits[at : at + 1].clone())
        assert torch.equal(row, expected[0])


def test_bad_words(rng: np.random.Generator) -> None:
    # Few ids, so that prefixes are met often.
    words = [(7,), (1, 2), (1, 3), (0, 1, 2), (2, 2, 2, 1), (3, 0)]
    seqs = [(random_ids(rng, n, 4), 1, {"bad_words": tuple(words)}) for n in range(1, 41)]
    batch = Batch(seqs)
    reference = NoBadWordsLogitsProcessor([list(word) for word in words], eos_token_id=None)
    processed = batch.process()
    for at, row in enumerate(processed):
        expected = reference(torch.tensor([seqs[at][0]]), batch.logits[at : at + 1].clone())
        assert torch.equal(row, expected[0]), seqs[at][0]
    assert (processed == -INF).sum(dim=-1).unique().numel() > 2


# vllm-project/vllm#23886: the end of a word is free where the word was not begun.
def test_the_end_of_a_bad_word_is_free_elsewhere() -> None:
    gorgeous = ((87, 46, 48), (35,))
    begun = ([9, 87, 46], 1, {"bad_words": gorgeous})
    other = ([9, 46, 87], 1, {"bad_words": gorgeous})
    short = ([46], 1, {"bad_words": gorgeous})
    banned = [
        torch.nonzero(row == -INF).flatten().tolist()
        for row in Batch([begun, other, short]).process()
    ]
    assert banned == [[35, 48], [35], [35]]


@pytest.mark.parametrize("num_output", [0, 1, 3, 4, 5])
def test_min_tokens(rng: np.random.Generator, num_output: int) -> None:
    ids = random_ids(rng, 6 + num_output)
    batch = Batch([(ids, 6, {"min_tokens": 4, "stop_token_ids": (11, 12), "ignore_eos": False})])
    reference = MinNewTokensLengthLogitsProcessor(6, 4, [*EOS, 11, 12])
    expected = reference(torch.tensor([ids]), batch.logits.clone())
    assert torch.equal(batch.process(), expected)
    assert (batch.process() == -INF).any() == (num_output < 4)


def test_logit_bias() -> None:
    bias = ((3, 100.0), (96, -2.5), (0, 0.125))
    batch = Batch([([4], 1, {}), ([4], 1, {"logit_bias": bias})])
    reference = SequenceBiasLogitsProcessor([[[i], value] for i, value in bias])
    expected = reference(torch.tensor([[4]]), batch.logits[1:].clone())
    processed = batch.process()
    assert torch.equal(processed[1:], expected)
    assert torch.equal(processed[0], batch.logits[0])


@pytest.mark.parametrize(
    ("presence", "frequency"), [(2.0, 2.0), (0.5, 0.0), (0.0, -1.25), (-2.0, 0.3)]
)
def test_presence_and_frequency_count_the_output_only(
    rng: np.random.Generator, presence: float, frequency: float
) -> None:
    asked = {"presence_penalty": presence, "frequency_penalty": frequency}
    seqs = [(random_ids(rng, n, 12), n // 2, asked) for n in (1, 2, 20, 63)]
    batch = Batch(seqs)
    expected = batch.logits.numpy().copy()
    for at, (ids, num_prompt, _) in enumerate(seqs):
        for token_id in set(ids[num_prompt:]):
            count = ids[num_prompt:].count(token_id)
            expected[at, token_id] -= np.float32(frequency) * np.float32(count)
            expected[at, token_id] -= np.float32(presence)
    np.testing.assert_array_equal(batch.process().numpy(), expected)


def test_allowed_token_ids() -> None:
    batch = Batch([([4], 1, {"allowed_token_ids": (9, 3, 9)}), ([4], 1, {})])
    processed = batch.process()
    assert torch.nonzero(processed[0] > -INF).flatten().tolist() == [3, 9]
    assert torch.equal(processed[0, [3, 9]], batch.logits[0, [3, 9]])
    assert torch.equal(processed[1], batch.logits[1])


MIXED: tuple[dict[str, Any], ...] = (
    {"repetition_penalty": 1.7, "frequency_penalty": 0.4, "bad_words": ((1, 2), (4,))},
    {},
    {"min_tokens": 6, "logit_bias": ((2, 50.0), (8, -3.0)), "presence_penalty": 1.5},
    {"allowed_token_ids": tuple(range(1, 30)), "repetition_penalty": 0.9, "bad_words": ((3, 3),)},
    {"frequency_penalty": -0.5},
)


def test_neighbours_and_the_way_here_change_nothing(rng: np.random.Generator) -> None:
    """Each step of a batch equals a row that is rebuilt alone from its ids (a replay)."""
    prompts = [random_ids(rng, n, 20) for n in (1, 4, 9, 2, 16)]
    batch = Batch([(ids, len(ids), mix) for ids, mix in zip(prompts, MIXED, strict=True)])
    known = [list(ids) for ids in prompts]
    for _ in range(20):
        processed = batch.process()
        for at, mix in enumerate(MIXED):
            alone = Batch([(known[at], len(prompts[at]), mix)])
            alone.logits = batch.logits[at : at + 1]
            assert torch.equal(alone.process()[0], processed[at])
        drawn = random_ids(rng, len(prompts), 20)
        batch.draw(drawn)
        for ids, token_id in zip(known, drawn, strict=True):
            ids.append(token_id)


def test_order_of_application() -> None:
    """A bias comes before the penalties, and brings nothing back that was banned."""
    asked = {
        "logit_bias": ((7, 10.0), (8, 100.0), (2, 100.0), (9, 100.0)),
        "repetition_penalty": 2.0,
        "presence_penalty": 1.0,
        "bad_words": ((8,),),
        "min_tokens": 9,
        "allowed_token_ids": (2, 7, 8, 10),
    }
    batch = Batch([([7, 7], 1, asked)])
    batch.logits[:] = 1.0
    processed = batch.process()[0]
    assert processed[7] == (1 + 10) / 2 - 1
    assert processed[10] == 1.0
    assert (processed[[2, 8, 9]] == -INF).all()


def test_rows_that_ask_for_nothing_cost_nothing() -> None:
    batch = Batch([([4], 1, {}), ([4], 1, {"min_tokens": 0, "repetition_penalty": 1.0})])
    processed = batch.processors.process(batch.logits, batch.numbers)
    assert processed.logits is batch.logits
    drawn = torch.tensor([3, 4])
    assert processed.mark_dead_ends(drawn) is drawn


def test_a_row_is_forgotten() -> None:
    batch = Batch([([4], 1, {"bad_words": ((3,),)}), ([4], 1, {"logit_bias": ((3, 1.0),)})])
    batch.follow(StepPlan(2, (0,), (NewSeq(0, (1,), 1, SamplingParams(max_tokens=5)),), ()))
    assert torch.equal(batch.process()[0], batch.logits[0])
    assert not batch.processors.concern(np.array([0]))
    assert batch.processors.concern(np.array([1]))


def test_a_row_without_a_token_left_is_told() -> None:
    dead = {"allowed_token_ids": (7, 9), "bad_words": ((7,), (4, 9))}
    batch = Batch([([4], 1, {"logit_bias": ((3, 1.0),)}), ([4], 1, dead), ([9, 3], 1, dead)])
    processed = batch.processors.process(batch.logits, batch.numbers)
    drawn = processed.logits.argmax(dim=-1)
    marked = processed.mark_dead_ends(drawn)
    assert marked.tolist() == [int(drawn[0]), NO_TOKEN, int(drawn[2])]
    assert drawn.min() >= 0


@pytest.mark.parametrize("penalty", [1e-40, 1e38])
def test_an_extreme_penalty_leaves_numbers(penalty: float) -> None:
    batch = Batch([(list(range(60)), 30, {"repetition_penalty": penalty, "presence_penalty": 2.0})])
    assert batch.process().isfinite().all()


def test_other_float_types_become_float32() -> None:
    batch = Batch([([4, 5], 1, {"frequency_penalty": 1.0})])
    batch.logits = batch.logits.bfloat16()
    processed = batch.process()
    assert processed.dtype is torch.float32
    batch.logits = batch.logits.float()
    assert torch.equal(batch.process(), processed)
