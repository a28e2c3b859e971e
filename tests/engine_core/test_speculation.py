"""Guessing ahead: where guesses come from, how many there are, and what becomes of them."""

from __future__ import annotations

import random
from array import array
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from engine_core.engine_builder import build_engine
from engine_core.runner.rows import Rows
from engine_core.runner.verification import Verification
from engine_core.sched.acceptance import Acceptance
from engine_core.sched.drafters import ModelDrafter, NgramDrafter
from engine_core.sched.ngram import NgramIndex, follow
from engine_core.sched.plan import SeqStep, StepPlan
from engine_core.sched.speculation import Speculation
from engine_core.sched.step_costs import StepCosts
from engine_core.speculative import max_sampled_tokens, resolve_method
from pagewire.config import EngineConfig
from pagewire.errors import ConfigError, ModelLoadError
from pagewire.types import BeamParams, FinishReason, SamplingParams
from pagewire.wire.codec import unpack_counts, unpack_request_ids
from tests.support.fake_model import EOS, FakeEngine, Guesser, Oracle, alone
from tests.support.tiny_model import TinySpec, write_hf

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from engine_core.request import Request

PROMPT = [3, 5, 7, 3, 5, 7, 3, 5, 9]
FREE = StepCosts({1: 1.0, 64: 1.0})
PROPORTIONAL = StepCosts({1: 1.0, 64: 64.0})


# N-grams.


def best_place(ids: Sequence[int], min_size: int, max_size: int) -> int:
    """By comparing all places, the definition."""

    def likeness(place: int) -> int:
        size = 0
        while size < min(max_size, place) and ids[place - size - 1] == ids[len(ids) - size - 1]:
            size += 1
        return size

    places = [(likeness(place), place) for place in range(1, len(ids))]
    size, place = max(places, default=(0, -1))
    return place if size >= min_size else -1


@pytest.mark.parametrize("min_size", [1, 2, 3])
def test_the_index_finds_what_a_search_would(min_size: int) -> None:
    rng = random.Random(min_size)
    for _ in range(40):
        ids, index = array("i"), NgramIndex(min_size)
        vocabulary = rng.choice([3, 6, 40])
        while len(ids) < 60:
            ids.extend(rng.randrange(vocabulary) for _ in range(rng.choice([1, 1, 3])))
            index.extend(ids, 1000)
            place = index.find(ids, 4)
            expected = best_place(ids, min_size, 4)
            if vocabulary == 40:
                assert place == expected
            else:
                # There may be more places than are tried.
                assert (place < 0) == (expected < 0)


def test_a_long_prompt_is_indexed_bit_by_bit() -> None:
    ids, index = array("i", [1, 2, 3, 4] * 50), NgramIndex(2)
    taken = 0
    while (num := index.extend(ids, 30)) > 0:
        taken += num
        assert num <= 30
    assert taken == len(ids) - 2
    assert index.find(ids, 8) == len(ids) - 4
    ids.append(9)
    assert index.extend(ids, 30) == 1
    assert index.find(ids, 8) == -1


def test_a_repetition_is_expected_to_go_on() -> None:
    ids = array("i", [7, 1, 2, 1, 2])
    assert list(follow(ids, 3, 5)) == [1, 2, 1, 2, 1]
    assert list(follow(ids, 1, 3)) == [1, 2, 1]


def test_prompts_are_indexed_over_several_steps() -> None:
    drafter = NgramDrafter(2, 4)
    request: Any = SimpleNamespace(token_ids=array("i", [1, 2, 3, 4] * 1000), ngrams=None)
    tries = 0
    while True:
        drafter.begin_step(64)
        tries += 1
        if proposed := drafter.propose(request, 3):
            break
    assert list(proposed) == [1, 2, 3]
    assert tries == 2


# Costs and chances.


def test_costs_are_straight_lines_between_what_was_measured() -> None:
    costs = StepCosts({1: 1.0, 4: 1.3, 8: 2.1})
    assert [round(costs.seconds(n), 3) for n in (1, 2, 4, 6, 8)] == [1.0, 1.1, 1.3, 1.7, 2.1]
    assert costs.seconds(12) == pytest.approx(2.9)


def test_noise_in_a_measurement_is_bounded_by_the_larger_steps() -> None:
    costs = StepCosts({1: 5.0, 2: 1.1, 4: 9.0, 8: 2.0})
    assert [costs.seconds(n) for n in (1, 2, 4, 8)] == [1.1, 1.1, 2.0, 2.0]


def test_nothing_pays_where_a_token_costs_as_much_as_any_other() -> None:
    assert PROPORTIONAL.most_decodes(1.03) == 0
    assert FREE.most_decodes(1.03) == 64
    assert StepCosts({1: 1.0, 8: 1.0, 16: 2.0, 32: 4.0, 64: 8.0}).most_decodes(1.03) in range(4, 16)


def test_acceptance_follows_what_was_right_lately() -> None:
    acceptance = Acceptance()
    assert acceptance.rate == 0.5
    for _ in range(20):
        acceptance.observe(5, 5)
    assert acceptance.rate > 0.94
    for _ in range(20):
        acceptance.observe(5, 0)
    assert acceptance.rate < 0.1
    for _ in range(200):
        acceptance.not_tried()
    assert 0.35 < acceptance.rate < 0.5


def test_only_tokens_up_to_the_first_wrong_one_tell_something() -> None:
    one, other = Acceptance(), Acceptance()
    one.observe(8, 2)
    other.observe(3, 2)
    assert one.rate == other.rate


# What counts.


def test_draws_count_up_to_the_first_wrong_guess() -> None:
    seqs = (
        SeqStep(4, 9, 1, (), True),
        SeqStep(2, 5, 4, (), True, (11, 12, 13)),
        SeqStep(7, 5, 3, (), True, (21, 22)),
        SeqStep(1, 0, 6, (), False),
        SeqStep(0, 0, 6, (), True),
    )
    rows = Rows(8, 64, block_size=16)
    plan = StepPlan(1, (), (), seqs, has_drafts=True)
    for seq in seqs:
        rows.num_tokens[seq.row] = seq.num_computed_tokens + 1
        if seq.draft_token_ids:
            rows._write_drafts(seq.row, seq.draft_token_ids)
    verification = Verification(plan, rows)
    assert verification.rows.tolist() == [4, 2, 7, 0]
    verified = verification.read([50, 11, 12, 60, 61, 20, 22, 62, 51])
    assert verified.token_ids == [50, 60, 20, 51]
    assert verified.accepted == {2: (11, 12), 7: ()}


# The pass.


def make_engine(
    costs: StepCosts = FREE, *, wrong: float = 0.0, most: int = 4, **settings: Any
) -> FakeEngine:
    speculation = Speculation(
        Oracle(random.Random(0), wrong, short=False),
        costs,
        num_speculative_tokens=most,
        max_sampled_tokens=settings.pop("max_sampled_tokens", 64),
    )
    return FakeEngine(**{"block_size": 4, "speculation": speculation, **settings})


def speculation_of(engine: FakeEngine) -> Speculation:
    assert engine.scheduler.speculation is not None
    return engine.scheduler.speculation


def test_right_guesses_save_steps_and_come_in_one_row() -> None:
    engine = make_engine()
    engine.add(1, PROMPT, max_tokens=12, ignore_eos=True)
    rows = []
    while engine.core.has_work():
        for output in engine.step().values():
            rows += zip(
                unpack_request_ids(output.request_ids), unpack_counts(output.counts), strict=True
            )
    # The first by the prompt; then four guesses and one, until one is left.
    assert rows == [(1, 1), (1, 5), (1, 5), (1, 1)]
    assert engine.of(1).token_ids == alone(PROMPT, 12, ())
    assert engine.stats is not None
    assert engine.stats.total_drafts == 2
    assert engine.stats.total_draft_tokens == engine.stats.total_accepted_tokens == 8
    assert engine.stats.total_accepted_per_position == (2, 2, 2, 2)
    assert engine.stats.total_output_tokens == 12
    engine.check_at_rest()


def test_wrong_guesses_cost_no_token_and_are_given_up() -> None:
    engine = make_engine(StepCosts({1: 1.0, 64: 10.0}), wrong=1.0)
    engine.add(1, PROMPT, max_tokens=60, ignore_eos=True)
    engine.run()
    assert engine.of(1).token_ids == alone(PROMPT, 60, ())
    speculation = speculation_of(engine)
    assert speculation.num_accepted_tokens == 0
    # Some tries, and now and then another one.
    assert 3 <= speculation.num_draft_tokens < 40
    engine.check_at_rest()


def test_it_is_off_where_it_does_not_pay() -> None:
    engine = make_engine(PROPORTIONAL)
    for request_id in range(4):
        engine.add(request_id, [request_id + 2] * 5, max_tokens=20, ignore_eos=True)
    engine.run()
    assert speculation_of(engine).num_drafts == 0


def test_the_more_decode_the_fewer_guesses() -> None:
    """A step of eight costs what one of a single token does; beyond, tokens have their price."""
    costs = StepCosts({1: 1.0, 8: 1.0, 16: 2.0, 32: 4.0, 64: 8.0})
    lengths = []
    for num in (1, 2, 4, 8, 16):
        engine = make_engine(costs, max_num_seqs=16, num_blocks=400)
        for request_id in range(num):
            engine.add(request_id, [request_id + 2] * 3, max_tokens=90, ignore_eos=True)
        while len(engine.runner.plans) < 12:
            assert engine.core.has_work()
            engine.step()
        lengths.append(engine.runner.plans[-1].num_tokens / num - 1)
    assert lengths[0] == 4
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[-1] == 0


def test_guesses_keep_within_the_budget_and_the_places_to_draw() -> None:
    for settings, most in (({"max_num_batched_tokens": 6}, 6), ({"max_sampled_tokens": 5}, 5)):
        engine = make_engine(max_num_seqs=4, **settings)
        for request_id in range(3):
            engine.add(request_id, PROMPT, max_tokens=20, ignore_eos=True)
        engine.run()
        plans = [plan for plan in engine.runner.plans if plan.has_drafts]
        assert plans
        assert max(plan.num_tokens for plan in plans) == most
        for request_id in range(3):
            assert engine.of(request_id).token_ids == alone(PROMPT, 20, ())


def test_nobody_is_preempted_for_a_guess() -> None:
    def preemptions(**settings: Any) -> int:
        engine = make_engine(num_blocks=1 + 12, **settings)
        for request_id in range(2):
            engine.add(request_id, [request_id + 3] * 7, max_tokens=17, ignore_eos=True)
        engine.run()
        for request_id in range(2):
            assert engine.of(request_id).token_ids == alone([request_id + 3] * 7, 17, ())
        return engine.scheduler.total_preemptions

    # Together they fill the pool to the last block.
    assert preemptions() == preemptions(speculation=None) == 0


def test_a_guess_goes_without_where_blocks_are_short() -> None:
    engine = make_engine(num_blocks=1 + 4, block_size=4)
    engine.add(1, [3] * 8, max_tokens=8, ignore_eos=True)
    engine.run()
    assert engine.of(1).token_ids == alone([3] * 8, 8, ())
    engine.check_at_rest()


class Guess(Guesser):
    """A Drafter whose guesses are given."""

    def __init__(self, guess: Sequence[int]) -> None:
        self.guess = guess

    def propose(self, request: Request, most: int) -> Sequence[int]:
        return self.guess[:most]


def test_what_ends_the_output_is_no_guess() -> None:
    speculation = Speculation(
        Guess([4, EOS, 5]), FREE, num_speculative_tokens=3, max_sampled_tokens=64
    )
    engine = FakeEngine(speculation=speculation)
    engine.add(1, PROMPT, max_tokens=30)
    engine.run()
    assert engine.of(1).token_ids == alone(PROMPT, 30)
    guesses = {seq.draft_token_ids for plan in engine.runner.plans for seq in plan.seqs}
    assert guesses == {(), (4,)}


def prompt_that_stops(num_output: int) -> list[int]:
    """Whose output ends by EOS with that many tokens."""
    for start in range(3, 60):
        for length in range(1, 40):
            prompt = [start] * length
            ids = alone(prompt, num_output + 1)
            if len(ids) == num_output and ids[-1] == EOS:
                return prompt
    raise AssertionError(f"no prompt stops after {num_output} tokens")


@pytest.mark.parametrize("num_output", [2, 3, 4, 5, 6])
def test_an_end_is_noticed_wherever_it_falls(num_output: int) -> None:
    engine = make_engine(most=3)
    prompt = prompt_that_stops(num_output)
    engine.add(1, prompt, max_tokens=30)
    engine.add(2, prompt, max_tokens=num_output - 1)
    engine.run()
    assert engine.of(1).token_ids == alone(prompt, 30)
    assert engine.of(1).reason is FinishReason.STOP
    assert engine.of(1).finished[0].stop_token_id == EOS
    assert engine.of(2).token_ids == alone(prompt, num_output - 1)
    assert engine.of(2).reason is FinishReason.LENGTH
    engine.check_at_rest()


def test_accepted_blocks_and_no_others_are_hit_by_the_next_request() -> None:
    engine = make_engine(wrong=0.4, block_size=2)
    engine.add(1, PROMPT, max_tokens=24, ignore_eos=True)
    engine.run()
    speculation = speculation_of(engine)
    assert 0 < speculation.num_accepted_tokens < speculation.num_draft_tokens
    whole = [*PROMPT, *engine.of(1).token_ids]
    engine.add(2, [*whole, 3], max_tokens=8, ignore_eos=True)
    engine.run()
    # The last token's KV was never computed.
    assert engine.of(2).started[0].num_cached_tokens == (len(whole) - 1) // 2 * 2
    assert engine.of(2).token_ids == alone([*whole, 3], 8, ())


def test_beams_and_prompts_alone_go_on_without() -> None:
    engine = make_engine()
    beam = SamplingParams(
        max_tokens=6, temperature=0.0, ignore_eos=True, logprobs=8, beam=BeamParams(3, 1)
    )
    engine.add(1, PROMPT, sampling=beam)
    engine.add(2, PROMPT[::-1], max_tokens=0)
    engine.add(3, PROMPT[::-1], max_tokens=1)
    engine.run()
    assert speculation_of(engine).num_drafts == 0
    plain = FakeEngine(block_size=4)
    plain.add(1, PROMPT, sampling=beam)
    plain.run()
    assert engine.of(1).finished[0].beams == plain.of(1).finished[0].beams


def test_an_abort_while_guesses_are_verified() -> None:
    engine = make_engine()
    engine.add(1, PROMPT, max_tokens=50, ignore_eos=True)
    for _ in range(2):
        engine.step()
    engine.step(poll=lambda: engine.abort(1))
    assert engine.runner.plans[-1].has_drafts
    assert engine.of(1).reason is FinishReason.ABORT
    assert engine.of(1).token_ids == alone(PROMPT, 6, ())
    engine.check_at_rest()


# A draft model.


def make_model_engine(
    costs: StepCosts = FREE, drafting: StepCosts = FREE, **settings: Any
) -> FakeEngine:
    speculation = Speculation(
        ModelDrafter(drafting), costs, num_speculative_tokens=4, max_sampled_tokens=64
    )
    return FakeEngine(**{"block_size": 4, "speculation": speculation, **settings})


# A guess for nothing, against a step's second.
DEAR, CHEAP = StepCosts({1: 1.0, 64: 1.0}), StepCosts({1: 0.01, 64: 0.01})


def test_a_draft_model_follows_what_was_accepted() -> None:
    engine = make_model_engine(drafting=CHEAP)
    wrong = random.Random(1)
    engine.runner.guesses_wrong = lambda: wrong.random() < 0.3
    for request_id in range(3):
        engine.add(request_id, [request_id + 3] * 11, max_tokens=60, ignore_eos=True)
    engine.run()
    for request_id in range(3):
        assert engine.of(request_id).token_ids == alone([request_id + 3] * 11, 60, ())
    speculation = speculation_of(engine)
    assert 30 < speculation.num_accepted_tokens < speculation.num_draft_tokens - 10
    engine.check_at_rest()


def test_a_draft_model_catches_up_with_a_long_prompt_in_what_steps_leave() -> None:
    engine = make_model_engine(drafting=CHEAP, max_num_batched_tokens=20)
    engine.add(1, [3] * 90, max_tokens=30, ignore_eos=True)
    engine.run()
    assert engine.of(1).token_ids == alone([3] * 90, 30, ())
    steps = [step for plan in engine.runner.plans for step in plan.draft_steps]
    assert [(s.num_computed_tokens, s.num_new_tokens, s.num_drafts) for s in steps[:5]] == [
        *((19 * turn, 19, 0) for turn in range(4)),
        # The four tokens drawn meanwhile are among the rest.
        (76, 18, 0),
    ]
    assert speculation_of(engine).num_accepted_tokens > 10


@pytest.mark.parametrize("prompt_len", [20, 70])
def test_a_draft_model_guesses_within_its_context(prompt_len: int) -> None:
    context = 40
    engine = FakeEngine(
        block_size=4,
        speculation=Speculation(
            ModelDrafter(CHEAP, context), FREE, num_speculative_tokens=4, max_sampled_tokens=64
        ),
    )
    engine.add(1, [3] * prompt_len, max_tokens=50, ignore_eos=True)
    engine.run()
    assert engine.of(1).token_ids == alone([3] * prompt_len, 50, ())
    steps = [step for plan in engine.runner.plans for step in plan.draft_steps]
    # The last guess of a step is drawn, not looked at.
    seen = [s.num_computed_tokens + s.num_new_tokens + max(0, s.num_drafts - 1) for s in steps]
    assert max(seen, default=0) == (context if prompt_len < context else 0)
    # Up to there, all was guessed that can be.
    assert (speculation_of(engine).num_accepted_tokens > 10) == (prompt_len < context)


def test_a_draft_model_that_costs_as_much_as_the_model_is_not_asked() -> None:
    engine = make_model_engine(drafting=DEAR)
    engine.add(1, PROMPT, max_tokens=30, ignore_eos=True)
    engine.run()
    assert speculation_of(engine).num_drafts == 0


@pytest.mark.parametrize("num_output", [2, 3, 4, 5, 6])
def test_an_end_among_the_guesses_of_a_draft_model(num_output: int) -> None:
    """Whose ids the scheduler cannot look at before."""
    engine = make_model_engine(drafting=CHEAP)
    prompt = prompt_that_stops(num_output)
    engine.add(1, prompt, max_tokens=30)
    engine.run()
    assert engine.of(1).token_ids == alone(prompt, 30)
    assert engine.of(1).reason is FinishReason.STOP
    assert engine.of(1).finished[0].stop_token_id == EOS
    engine.check_at_rest()


def test_results_must_not_come_late() -> None:
    with pytest.raises(ValueError, match="draft tokens"):
        make_engine(async_scheduling=True)


# Configuration.


def device(*, is_synchronous: bool) -> Any:
    return SimpleNamespace(is_synchronous=is_synchronous)


def test_it_is_on_where_nothing_is_planned_ahead_anyway() -> None:
    assert resolve_method(EngineConfig(), device(is_synchronous=True)) == "ngram"
    assert resolve_method(EngineConfig(), device(is_synchronous=False)) == "none"
    asked = EngineConfig(speculative_method="ngram")
    assert resolve_method(asked, device(is_synchronous=False)) == "ngram"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"speculative_method": "draft"}, "draft needs --speculative-model"),
        (
            {"speculative_method": "ngram", "speculative_model": "x"},
            "is for --speculative-method draft, not ngram",
        ),
    ],
)
def test_a_draft_model_and_what_it_goes_with(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve_method(EngineConfig(**settings), device(is_synchronous=True))


def test_a_draft_model_of_another_vocabulary(tmp_path: Path) -> None:
    config = EngineConfig(
        model=str(write_hf(tmp_path / "model", TinySpec())),
        speculative_model=str(write_hf(tmp_path / "draft", TinySpec(vocab_size=290))),
        device="cpu",
        kv_cache_memory="16MiB",
    )
    with pytest.raises(ConfigError, match="vocabulary of 290 tokens, the model one of 300"):
        build_engine(config, lambda *_: None)


def test_a_draft_model_of_a_shorter_context(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def build(max_positions: int) -> None:
        draft = write_hf(tmp_path / f"draft{max_positions}", TinySpec(max_positions=max_positions))
        config = EngineConfig(
            model=str(write_hf(tmp_path / "model", TinySpec(max_positions=64))),
            speculative_model=str(draft),
            device="cpu",
            kv_cache_memory="16MiB",
            cpu_threads=1,
        )
        build_engine(config, lambda *_: None)

    build(64)
    assert "has a context" not in caplog.text
    build(40)
    assert (
        "draft40, the draft model, has a context of 40 tokens: sequences of up to 64" in caplog.text
    )
    with pytest.raises(
        ConfigError, match=r"--speculative-model .*draft8 has a context of 8 tokens"
    ):
        build(8)


def test_a_draft_model_that_is_not_there_is_named_by_its_own_flag(tmp_path: Path) -> None:
    config = EngineConfig(
        model=str(write_hf(tmp_path / "model", TinySpec())),
        speculative_model=str(tmp_path / "none"),
        device="cpu",
        kv_cache_memory="16MiB",
    )
    with pytest.raises(ModelLoadError, match=r"^--speculative-model .*none: no such file"):
        build_engine(config, lambda *_: None)


def test_lookup_sizes_that_contradict_each_other() -> None:
    config = EngineConfig(prompt_lookup_min=5, prompt_lookup_max=4)
    with pytest.raises(ConfigError, match=r"--prompt-lookup-min is 5.* is 4"):
        resolve_method(config, device(is_synchronous=True))


@pytest.mark.parametrize(
    ("num_seqs", "guesses", "budget", "most"),
    [(1, 7, 512, 8), (4, 7, 512, 32), (32, 7, 512, 64), (128, 7, 512, 128), (4, 7, 16, 16)],
)
def test_the_most_that_a_step_draws(num_seqs: int, guesses: int, budget: int, most: int) -> None:
    config = EngineConfig(max_num_seqs=num_seqs, num_speculative_tokens=guesses)
    assert max_sampled_tokens(config, "ngram", budget) == most
    assert max_sampled_tokens(config, "none", budget) == num_seqs


def test_costs_are_measured_where_an_engine_is_built(tmp_path: Path) -> None:
    def build(method: str) -> Any:
        config = EngineConfig.model_validate(
            {
                "model": str(write_hf(tmp_path / method, TinySpec())),
                "device": "cpu",
                "kv_cache_memory": "16MiB",
                "cpu_threads": 1,
                "speculative_method": method,
            }
        )
        return build_engine(config, lambda *_: None).speculation

    assert isinstance(build("ngram"), Speculation)
    assert build("none") is None


def test_a_draft_model_is_built_beside_the_model(tmp_path: Path) -> None:
    def num_blocks(**settings: Any) -> int:
        config = EngineConfig(
            model=str(write_hf(tmp_path / f"model{len(settings)}", TinySpec(num_layers=4))),
            device="cpu",
            kv_cache_memory="16MiB",
            cpu_threads=1,
            **settings,
        )
        built = build_engine(config, lambda *_: None)
        assert built.speculation is not None
        return built.num_blocks

    draft = str(write_hf(tmp_path / "draft", TinySpec(num_layers=2)))
    # The memory is for the KV of both: six layers and not four.
    assert num_blocks(speculative_model=draft) == pytest.approx(num_blocks() * 4 / 6, rel=0.01)
