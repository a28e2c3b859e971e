"""Beam search on tiny random models: the sequences and scores of transformers' generate(),
however the search is batched, cut, cached or preempted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
import torch

from pagewire.types import BeamParams, SamplingParams
from pagewire.wire.codec import pack_ids, unpack_ids
from pagewire.wire.messages import Add, Finished
from tests.parity.harness import EPOCH, FRONTEND_ID, Engine, Loaded, load
from tests.support.tiny_model import TinySpec, write_hf

if TYPE_CHECKING:
    from collections.abc import Sequence

NUM_TOKENS = 24
MAX_SCORE_DIFF = 1e-4
EARLY_STOPPING: dict[str, Any] = {"true": True, "false": False, "never": "never"}

SPECS = {
    # Several ids end a sequence, and some of them soon.
    "llama": TinySpec(eos_token_id=[1, 77, 9, 30, 31, 150]),
    "mistral": TinySpec(architecture="MistralForCausalLM", hidden_size=72, seed=7),
}


@dataclass(frozen=True)
class Search:
    prompt: tuple[int, ...]
    beam: BeamParams
    stop_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    @property
    def sampling(self) -> SamplingParams:
        return SamplingParams(
            NUM_TOKENS,
            stop_token_ids=self.stop_ids,
            ignore_eos=self.ignore_eos,
            beam=self.beam,
        )


Found = list[tuple[list[int], float]]


class Case:
    """A spec written to disk, and what transformers makes of it."""

    def __init__(self, spec: TinySpec, directory: Any) -> None:
        from transformers import AutoModelForCausalLM

        self.path = str(write_hf(directory, spec))
        self.eos = spec.eos_token_id if isinstance(spec.eos_token_id, list) else [spec.eos_token_id]
        self._model: Any = AutoModelForCausalLM.from_pretrained(
            self.path, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        self.searches = list(searches())
        self.expected = [self._by_transformers(search) for search in self.searches]

    def _by_transformers(self, search: Search) -> Found:
        ends = [*search.stop_ids, *(() if search.ignore_eos else self.eos)]
        self._model.generation_config.eos_token_id = ends or None
        self._model.generation_config.pad_token_id = 0
        beam = search.beam
        with torch.inference_mode():
            out = self._model.generate(
                torch.tensor([search.prompt]),
                do_sample=False,
                max_new_tokens=NUM_TOKENS,
                **_beam_options(beam),
                return_dict_in_generate=True,
                output_scores=True,
            )
            outputs = [_until(row[len(search.prompt) :], ends) for row in out.sequences.tolist()]
            if beam.width == 1:
                return [(ids, self._score(search, ids)) for ids in outputs]
        return list(zip(outputs, out.sequences_scores.tolist(), strict=True))

    def _score(self, search: Search, ids: list[int]) -> float:
        """Of a greedy search, for which generate() has none."""
        logits = self._model(torch.tensor([[*search.prompt, *ids]])).logits[0]
        logprobs = logits.log_softmax(-1)[len(search.prompt) - 1 : -1]
        total = logprobs.gather(1, torch.tensor(ids).unsqueeze(1)).sum().item()
        return float(total / len(ids) ** search.beam.length_penalty)


def _beam_options(beam: BeamParams) -> dict[str, Any]:
    if beam.width == 1:
        return {}  # greedy, for which the others have no meaning
    return {
        "num_beams": beam.width,
        "num_return_sequences": beam.num_return,
        "early_stopping": EARLY_STOPPING[beam.early_stopping],
        "length_penalty": beam.length_penalty,
    }


def _until(ids: list[int], ends: Sequence[int]) -> list[int]:
    at = next((at for at, token_id in enumerate(ids) if token_id in ends), len(ids))
    return ids[: at + 1]


def searches() -> Any:
    generator = torch.Generator().manual_seed(31)
    lengths = [1, 15, 16, 17, 40, 90]
    prompts = [torch.randint(2, 300, (n,), generator=generator).tolist() for n in lengths]
    # Two share a long prefix.
    prompts[5][:40] = prompts[4]
    widths = [(2, 2), (4, 1), (1, 1), (4, 4), (3, 2)]
    ends: list[dict[str, Any]] = [{}, {"stop_ids": (5, 60, 61, 200)}, {"ignore_eos": True}]
    number = 0
    for early in EARLY_STOPPING:
        for penalty in (0.0, 1.0, 2.0, -0.5):
            for _ in range(2):
                width, num_return = widths[number % len(widths)]
                beam = BeamParams(width, num_return, penalty, early)  # type: ignore[arg-type]
                prompt = tuple(prompts[number % len(prompts)])
                yield Search(prompt, beam, **ends[number // 2 % len(ends)])
                number += 1


@pytest.fixture(scope="module", params=SPECS)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case(SPECS[request.param], tmp_path_factory.mktemp(request.param) / "model")


@pytest.fixture(scope="module")
def loaded(case: Case) -> Loaded:
    return load(case.path, "cpu")


def run(engine: Engine, asked: Sequence[Search], others: Sequence[Sequence[int]] = ()) -> Any:
    """All at once, with ordinary requests for these prompts among them."""
    for number, search in enumerate(asked):
        add = Add(number, EPOCH, pack_ids(search.prompt), 0, search.sampling)
        engine.core.add(FRONTEND_ID, add, 0.0)
    sampling = SamplingParams(NUM_TOKENS, temperature=1.0, ignore_eos=True)
    for number, prompt in enumerate(others):
        add = Add(1000 + number, EPOCH, pack_ids(prompt), 0, sampling)
        engine.core.add(FRONTEND_ID, add, 0.0)
    finishes: dict[int, Finished] = {}
    while engine.core.has_work():
        for output in engine.core.step(lambda: None).values():
            finishes.update((finished.request_id, finished) for finished in output.finished)
        engine.core.check_integrity()
    engine.kv_manager.check_all_free()
    return [
        [(unpack_ids(beam.token_ids), beam.score) for beam in finishes[number].beams]
        for number in range(len(asked))
    ]


def assert_same(ours: list[Found], expected: list[Found]) -> None:
    assert len(ours) == len(expected)
    for number, (mine, theirs) in enumerate(zip(ours, expected, strict=True)):
        assert [ids for ids, _ in mine] == [ids for ids, _ in theirs], number
        for (_, score), (_, other) in zip(mine, theirs, strict=True):
            assert abs(score - other) <= MAX_SCORE_DIFF * max(1.0, abs(other)), number


def test_the_cases_are_worth_it(case: Case) -> None:
    outputs = [ids for found in case.expected for ids, _ in found]
    assert {len(ids) for ids in outputs} >= {NUM_TOKENS}
    if len(case.eos) > 1:
        assert sum(len(ids) < NUM_TOKENS for ids in outputs) >= len(outputs) // 4


def test_alone_equals_transformers(loaded: Loaded, case: Case) -> None:
    engine = Engine(loaded)
    assert_same([run(engine, [search])[0] for search in case.searches], case.expected)


@pytest.mark.parametrize(
    "schedule",
    [
        {"max_num_seqs": 128},
        {"max_num_batched_tokens": 23, "max_num_seqs": 12},
        {"prefix_caching": True, "block_size": 4, "num_blocks": 600},
        # The longest needs 5 + 4 * 3 blocks.
        {"num_blocks": 19, "max_num_batched_tokens": 64},
        {"num_blocks": 19, "prefix_caching": True},
    ],
    ids=["batched", "chunked", "cached", "preempted", "preempted-cached"],
)
def test_schedule_and_company_change_nothing(
    loaded: Loaded, case: Case, schedule: dict[str, Any]
) -> None:
    engine = Engine(loaded, **schedule)
    others = [search.prompt for search in case.searches[:3]]
    assert_same(run(engine, case.searches, others), case.expected)
    if "num_blocks" in schedule and schedule["num_blocks"] < 20:
        assert engine.core.stats().total_preemptions > 0
    if schedule.get("prefix_caching"):
        assert engine.kv_manager.num_hit_tokens > 0
