"""Guessing ahead changes nothing of what comes out: ids, distributions, endings."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine_core.sched.drafters import Drafter, ModelDrafter, NgramDrafter
from engine_core.sched.speculation import Speculation
from engine_core.sched.step_costs import StepCosts
from pagewire.types import FinishReason, SamplingParams
from pagewire.wire.codec import pack_ids
from pagewire.wire.messages import Add
from tests.parity.harness import (
    EPOCH,
    FRONTEND_ID,
    MAX_SAMPLED,
    Engine,
    assert_same_tokens,
    load,
    rows_of,
    transformers_greedy,
)
from tests.support.fake_model import Guesser
from tests.support.tiny_model import TinySpec, write_hf

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from engine_core.request import Request
    from tests.parity.harness import Loaded

SPEC = TinySpec(seed=3)
FREE = StepCosts({1: 1.0, 64: 1.0})
"""More tokens in a step cost nothing."""
CHEAP = StepCosts({1: 0.01, 64: 0.01})


def make_speculation(drafter: Drafter | None = None, most: int = 4) -> Speculation:
    return Speculation(
        drafter or NgramDrafter(1, 4),
        FREE,
        num_speculative_tokens=most,
        max_sampled_tokens=MAX_SAMPLED,
    )


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_hf(tmp_path_factory.mktemp("speculation") / "model", SPEC)


@pytest.fixture(scope="module")
def loaded(model: Path) -> Loaded:
    return load(str(model), "cpu", batch_invariant=True)


@pytest.fixture(scope="module")
def reference(model: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()


def draw_prompts(num: int, seed: int) -> list[list[int]]:
    """Half of them with a phrase that comes back."""
    rng = random.Random(seed)
    prompts = []
    for number in range(num):
        prompt = [rng.randrange(2, SPEC.vocab_size) for _ in range(rng.randint(4, 12))]
        if number % 2:
            prompt = (prompt * 4)[: 2 * len(prompt) + rng.randrange(len(prompt))]
        prompts.append(prompt)
    return prompts


def test_greedy_ids_of_200_prompts_are_those_of_transformers(
    loaded: Loaded, reference: Any
) -> None:
    prompts = draw_prompts(200, seed=1)
    speculation = make_speculation()
    engine = Engine(loaded, speculation=speculation, max_num_seqs=8)
    mine = engine.generate(prompts, 24)
    assert_same_tokens(mine, transformers_greedy(reference, prompts, 24))
    assert speculation.num_accepted_tokens > 100
    assert speculation.num_draft_tokens - speculation.num_accepted_tokens > 100


# vllm-project/vllm#41758, vllm-project/vllm#7627
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_ids_are_the_same_on_and_off_alone_and_in_a_batch(
    loaded: Loaded, temperature: float
) -> None:
    prompts = draw_prompts(20, seed=2)
    sampling = SamplingParams(64, temperature=temperature, seed=7, ignore_eos=True)
    plain = Engine(loaded).generate(prompts, 64, sampling)
    speculation = make_speculation()
    batched = Engine(loaded, speculation=speculation, max_num_seqs=8)
    assert_same_tokens(batched.generate(prompts, 64, sampling), plain)
    assert speculation.num_accepted_tokens > (50 if temperature == 0 else 0)
    alone = Engine(loaded, speculation=make_speculation(), max_num_seqs=1)
    assert_same_tokens([alone.generate([prompt], 64, sampling)[0] for prompt in prompts], plain)


class Always(Guesser):
    """A Drafter that guesses the same whatever came."""

    def __init__(self, token_ids: Sequence[int]) -> None:
        self._token_ids = list(token_ids)

    def propose(self, request: Request, most: int) -> list[int]:
        return self._token_ids[:most]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("is_same", [True, False])
def test_a_draft_model_changes_nothing(
    loaded: Loaded, tmp_path: Path, temperature: float, is_same: bool
) -> None:
    """The model itself, which guesses right but for rounding, also what is drawn at random,
    and a model that knows nothing of it."""
    draft = loaded
    if not is_same:
        draft = load(str(write_hf(tmp_path / "draft", replace(SPEC, seed=77))), "cpu")
    prompts = [*draw_prompts(12, seed=4), [7, 8, 9] * 60]
    sampling = SamplingParams(40, temperature, seed=3, top_p=0.95, ignore_eos=True)
    plain = Engine(loaded).generate(prompts, 40, sampling)
    speculation = make_speculation(ModelDrafter(CHEAP))
    engine = Engine(
        loaded, speculation=speculation, draft=draft, num_blocks=60, max_num_batched_tokens=70
    )
    assert_same_tokens(engine.generate(prompts, 40, sampling), plain)
    share = speculation.num_accepted_tokens / speculation.num_draft_tokens
    assert speculation.num_draft_tokens > 40
    assert share > 0.95 if is_same else share < 0.5


# vllm-project/vllm#41758
def test_draws_follow_the_exact_probabilities(loaded: Loaded, reference: Any) -> None:
    """Of all outputs of three tokens out of four: the second and third are drawn in one
    step, and the third counts where the guess at the second was right."""
    num_draws, allowed, prompt = 4000, (11, 23, 42, 58), [5, 9, 14, 3]
    temperature = 20.0  # the tiny model's logits are far apart
    contexts = [
        [*prompt, *known] for n in range(3) for known in itertools.product(allowed, repeat=n)
    ]
    logs = {}
    for context in contexts:
        with torch.inference_mode():
            logits = reference(torch.tensor([context])).logits[0, -1].double()
        logs[tuple(context[4:])] = torch.log_softmax(
            logits[list(allowed)] / temperature, dim=0
        ).tolist()
    outputs = list(itertools.product(range(4), repeat=3))
    exact = []
    for places in outputs:
        ids = [allowed[place] for place in places]
        exact.append(sum(logs[tuple(ids[:n])][places[n]] for n in range(3)))
    speculation = make_speculation(Always((23, 42)))
    engine = Engine(loaded, speculation=speculation, max_num_seqs=32)
    counts = dict.fromkeys(outputs, 0)
    asked = [
        SamplingParams(3, temperature, seed=seed, allowed_token_ids=allowed, ignore_eos=True)
        for seed in range(num_draws)
    ]
    for ids in engine.generate_each([(prompt, sampling) for sampling in asked]):
        counts[tuple(allowed.index(token_id) for token_id in ids)] += 1
    expected = num_draws * torch.tensor(exact, dtype=torch.float64).exp()
    assert expected.min() > 5
    assert speculation.num_accepted_tokens > 400
    drawn = torch.tensor(list(counts.values()), dtype=torch.float64)
    statistic = ((drawn - expected) ** 2 / expected).sum()
    # The chi-square distribution's upper tail, with one degree of freedom less than outputs.
    p_value = torch.special.gammaincc(
        torch.tensor((len(outputs) - 1) / 2, dtype=torch.float64), statistic / 2
    )
    assert p_value > 0.001


def test_a_dead_end_behind_a_right_guess(loaded: Loaded) -> None:
    """What came before it is output, with its logprobs, and then the request ends in error."""
    only = 42
    sampling = SamplingParams(
        9,
        temperature=0.0,
        logprobs=1,
        allowed_token_ids=(only,),
        bad_words=((only, only, only),),
        ignore_eos=True,
    )

    def outcome(speculation: Speculation | None) -> tuple[list[int], list[Any], list[int]]:
        engine = Engine(loaded, speculation=speculation)
        engine.core.add(FRONTEND_ID, Add(1, EPOCH, pack_ids([5, 9, 14]), 0, sampling), 0.0)
        ids: list[int] = []
        positions: list[Any] = []
        reasons: list[int] = []
        while engine.core.has_work():
            for output in engine.core.step(lambda: None).values():
                ids += [token_id for _, row in rows_of(output) for token_id in row]
                positions += [it for told in output.logprobs for it in told.output]
                reasons += [finished.reason for finished in output.finished]
        engine.kv_manager.check_all_free()
        engine.core.check_integrity()
        return ids, positions, reasons

    speculation = make_speculation(Always((only,) * 4))
    ids, positions, reasons = outcome(speculation)
    assert (ids, reasons) == ([only, only], [FinishReason.ERROR])
    assert [position.token_id for position in positions] == ids
    assert speculation.num_accepted_tokens == 1
    assert (ids, positions, reasons) == outcome(None)
