"""Hundreds of requests of all kinds at once over a real model: what each gets alone.

The KV pool is so small that they are preempted, chunked and moved to the host, and
many share prefixes or prompts. The ops are the batch-invariant ones: otherwise, in some
ten thousand draws, one lies so close to the edge between two tokens that the order of a
sum decides. The same with random schedules over a model of integers
is in tests/engine_core/test_core_random.py.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from engine_core.sched.speculation import Speculation
from engine_core.sched.step_costs import StepCosts
from pagewire.types import BeamParams, FinishReason, SamplingParams, StructuredOutput
from tests.parity.harness import MAX_SAMPLED, Engine, load
from tests.parity.schedules import Answer, Asked, Grammars, serve
from tests.support.fake_model import Guesser
from tests.support.tiny_model import EOS_ID, TinySpec, write_hf

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from engine_core.request import Request
    from tests.parity.harness import Loaded

NUM_REQUESTS = 260
SPEC = TinySpec(seed=41)
WANTED = (
    StructuredOutput("regex", "[a-m]{5,20}!"),
    StructuredOutput("choice", '["the first of the choices", "the second", "日本語"]'),
    StructuredOutput("json_schema", '{"type":"array","items":{"enum":[1,22,333]},"maxItems":3}'),
)


def plain(rng: random.Random) -> dict[str, Any]:
    return {"ignore_eos": rng.random() < 0.5, "top_p": rng.choice([1.0, 0.9])}


def greedy(rng: random.Random) -> dict[str, Any]:
    return {"temperature": 0.0, "stop_token_ids": (rng.randrange(2, SPEC.vocab_size),)}


def penalized(rng: random.Random) -> dict[str, Any]:
    return {
        "repetition_penalty": rng.choice([1.0, 1.3]),
        "presence_penalty": rng.choice([0.0, 0.5]),
        "frequency_penalty": 0.4,
        "min_tokens": rng.choice([0, 1]),
    }


def masked(rng: random.Random) -> dict[str, Any]:
    some = tuple(sorted(rng.sample(range(2, SPEC.vocab_size), 40)))
    return {
        "logit_bias": ((rng.choice(some), 4.0), (7, -100.0)),
        "bad_words": ((some[0],), (some[1], some[2])),
        "allowed_token_ids": some if rng.random() < 0.5 else None,
    }


def reported(rng: random.Random) -> dict[str, Any]:
    return {"logprobs": rng.choice([0, 3]), "prompt_logprobs": rng.choice([None, 2])}


def constrained(rng: random.Random) -> dict[str, Any]:
    return {"structured_output": rng.choice(WANTED), "max_tokens": 40}


def searched(rng: random.Random) -> dict[str, Any]:
    beam = BeamParams(
        width=2,
        num_return=rng.choice([1, 2]),
        length_penalty=rng.choice([0.0, 1.0]),
        early_stopping=rng.choice(["true", "false", "never"]),
    )
    return {"beam": beam, "max_tokens": rng.randint(1, 8)}


KINDS: tuple[Callable[[random.Random], dict[str, Any]], ...] = (
    *(plain, greedy, penalized, masked, reported, constrained, searched),
)
"""What to add a new kind of request to: a function that draws its sampling parameters."""


def draw_requests(rng: random.Random) -> list[Asked]:
    stems = [[rng.randrange(2, SPEC.vocab_size) for _ in range(60)] for _ in range(6)]
    asked: list[Asked] = []
    while len(asked) < NUM_REQUESTS:
        prompt = rng.choice(stems)[: rng.choice([0, 17, 40, 60])]
        prompt = prompt + [rng.randrange(2, SPEC.vocab_size) for _ in range(rng.randint(1, 25))]
        params = {"max_tokens": rng.randint(1, 24), "seed": rng.getrandbits(64)}
        one = Asked(
            prompt,
            SamplingParams(**(params | rng.choice(KINDS)(rng))),
            arrives=rng.randint(0, 60),
            aborts=None,
            priority=rng.choice([0, 0, 0, 1, -1]),
            tenant=rng.choice(["", "a", "b"]),
            cache_salt=rng.choice(["", "", "", "x"]),
            skip_prefix_cache=rng.random() < 0.1,
        )
        asked.append(one)
        can_branch = one.sampling.prompt_logprobs is None and one.sampling.beam is None
        if rng.random() < 0.15 and can_branch:
            asked += [replace(one, sample_index=n, leader=one) for n in range(1, 4)]
    for one in asked:
        if rng.random() < 0.12:
            one.aborts = one.arrives + rng.randint(0, 30)
    return sorted(asked, key=lambda one: one.arrives)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_hf(tmp_path_factory.mktemp("mixed") / "model", SPEC)


@pytest.fixture(scope="module")
def loaded(model: Path) -> Loaded:
    return load(str(model), "cpu", batch_invariant=True)


@pytest.fixture(scope="module")
def grammars(model: Path) -> Iterator[Grammars]:
    grammars = Grammars(model, SPEC.vocab_size, EOS_ID)
    yield grammars
    grammars.gate.close()


@pytest.fixture(scope="module")
def asked() -> list[Asked]:
    return draw_requests(random.Random(4))


@pytest.fixture(scope="module")
def alone(loaded: Loaded, grammars: Grammars, asked: list[Asked]) -> list[Answer]:
    """What each of them gets."""
    roomy = Engine(loaded, grammars=grammars.gate)
    return [
        serve(roomy, [replace(one, arrives=0, aborts=None, leader=None)], grammars)[0]
        for one in asked
    ]


class Answers(Guesser):
    """A Drafter that knows the answers, and is wrong now and then: also with what ends an
    output, or has no place in a grammar."""

    def __init__(self, alone: Sequence[Answer]) -> None:
        self._alone = alone
        self._rng = random.Random(5)

    def propose(self, request: Request, most: int) -> list[int]:
        begin = request.num_output_tokens
        ids = self._alone[request.request_id].ids[begin : begin + most]
        wrong = [self._rng.randrange(SPEC.vocab_size) for _ in range(most)]
        ids += wrong[len(ids) :]
        return [
            token_id if self._rng.random() < 0.85 else other
            for token_id, other in zip(ids, wrong, strict=True)
        ]


def make_speculation(alone: Sequence[Answer]) -> Speculation:
    """On a device on which more tokens cost nothing."""
    return Speculation(
        Answers(alone),
        StepCosts({1: 1.0, 64: 1.0}),
        num_speculative_tokens=5,
        max_sampled_tokens=MAX_SAMPLED,
    )


@pytest.mark.parametrize("speculates", [False, True])
def test_mixed_requests_get_what_they_get_alone(
    loaded: Loaded,
    grammars: Grammars,
    asked: list[Asked],
    alone: list[Answer],
    speculates: bool,
) -> None:
    engine = Engine(
        loaded,
        num_blocks=27,
        block_size=8,
        max_num_seqs=12,
        max_num_batched_tokens=37,
        prefix_caching=True,
        num_host_blocks=60,
        grammars=grammars.gate,
        speculation=make_speculation(alone) if speculates else None,
    )
    together = serve(engine, asked, grammars)
    num_aborted = 0
    for number, (one, mine, expected) in enumerate(zip(asked, together, alone, strict=True)):
        if mine.reason is FinishReason.ABORT:
            num_aborted += 1
            assert one.aborts is not None, number
            assert mine.ids == expected.ids[: len(mine.ids)], (number, one)
            continue
        assert mine.ids == expected.ids, (number, one)
        assert mine.reason == expected.reason, (number, one)
        assert (mine.output, mine.prompt) == (expected.output, expected.prompt), (number, one)
        assert mine.beams == expected.beams, (number, one)
    stats = engine.core.stats()
    assert num_aborted > 5
    assert stats.total_preemptions > 5
    assert stats.prefix_cache_hits > 100
    assert stats.total_offloaded_blocks > 20
    assert stats.total_restored_blocks > 0
    assert sum(len(answer.beams) > 0 for answer in together) > 15
    assert {answer.reason for answer in alone} == {FinishReason.STOP, FinishReason.LENGTH}
    if speculates:
        assert stats.total_accepted_tokens > 300
        assert stats.total_draft_tokens - stats.total_accepted_tokens > 300
