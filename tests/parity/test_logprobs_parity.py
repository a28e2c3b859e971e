"""Logprobs of output and prompt equal transformers' log softmax in float32, however the
requests are batched, cut, cached or preempted, and whatever is done to the logits later."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from engine_core.device.cpu import CpuDevice
from engine_core.runner import logprobs as runner_logprobs
from engine_core.runner.logprobs import report, sliced_report
from kernels.reference.ops import ReferenceOps
from pagewire.types import MAX_LOGPROBS, SamplingParams
from tests.parity.harness import Engine, Loaded, load
from tests.parity.logprobs import Answer, ask, check_against
from tests.support.tiny_model import TinySpec, write_hf

if TYPE_CHECKING:
    from pathlib import Path

NUM_TOKENS = 24

# Neighbours in a batch ask for different numbers, or for nothing.
ASKED = (
    (None, None),
    (0, None),
    (None, 0),
    (1, 1),
    (20, 20),
    (5, None),
    (None, 3),
    (2, 20),
    (None, None),
)


class Case:
    def __init__(self, spec: TinySpec, directory: Path) -> None:
        from transformers import AutoModelForCausalLM

        write_hf(directory, spec)
        self.model: Any = AutoModelForCausalLM.from_pretrained(
            directory, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        self.loaded = load(str(directory), "cpu")
        generator = torch.Generator().manual_seed(5)
        lengths = (1, 2, 15, 16, 17, 33, 64, 120)
        prompts = [
            torch.randint(2, spec.vocab_size, (n,), generator=generator).tolist() for n in lengths
        ]
        self.prompts = [*prompts, [*prompts[6][:50], 5, 6, 7]]

    def requests(self, **sampling: Any) -> list[tuple[list[int], SamplingParams]]:
        given: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True} | sampling
        return [
            (
                prompt,
                SamplingParams(
                    NUM_TOKENS, logprobs=logprobs, prompt_logprobs=prompt_logprobs, **given
                ),
            )
            for prompt, (logprobs, prompt_logprobs) in zip(self.prompts, ASKED, strict=True)
        ]

    def check(self, answers: list[Answer]) -> None:
        for answer in answers:
            assert len(answer.ids) == NUM_TOKENS
            check_against(self.model, answer)


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    spec = TinySpec(hidden_size=40, num_heads=5, num_kv_heads=1, tie_embeddings=True, seed=1)
    return Case(spec, tmp_path_factory.mktemp("logprobs") / "model")


def test_batched(case: Case) -> None:
    answers = ask(Engine(case.loaded), case.requests())
    case.check(answers)
    for answer in answers:
        for position in answer.output if answer.sampling.logprobs else ():
            assert position.rank == 1
            assert position.top_ids[0] == position.token_id  # greedy


@pytest.mark.parametrize("slice_elements", [1, 5 * 300, runner_logprobs.SLICE_ELEMENTS])
def test_chunked_and_sliced(
    case: Case, slice_elements: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner_logprobs, "SLICE_ELEMENTS", slice_elements)
    case.check(ask(Engine(case.loaded, max_num_batched_tokens=23), case.requests()))


def test_prefix_cached(case: Case) -> None:
    engine = Engine(case.loaded, prefix_caching=True)
    first, second = (ask(engine, case.requests()) for _ in range(2))
    case.check(first)
    case.check(second)
    for answer in second:
        wants_prompt = answer.sampling.prompt_logprobs is not None
        most = (len(answer.prompt) - 1) // 16 * 16
        assert answer.num_cached_tokens == (0 if wants_prompt else most)


def test_preempted(case: Case) -> None:
    engine = Engine(case.loaded, num_blocks=13, max_num_batched_tokens=32, prefix_caching=True)
    case.check(ask(engine, case.requests()))
    assert engine.core.stats().total_preemptions > 0


def test_from_a_device_that_hands_them_over_late(case: Case) -> None:
    late = CpuDevice("1GiB", 1)
    late.is_synchronous = False
    late.num_staging_sets = 2
    engine = Engine(replace(case.loaded, device=late), max_num_batched_tokens=23)
    case.check(ask(engine, case.requests()))


def test_they_are_of_the_model_not_of_what_is_drawn_from(case: Case) -> None:
    """vllm-project/vllm#10234: taken after top_k, they held -inf."""
    bias = tuple((token_id, 8.0) for token_id in range(10, 20))
    requests = case.requests(
        temperature=1.7,
        top_k=1,
        repetition_penalty=1.5,
        presence_penalty=1.0,
        logit_bias=bias,
        allowed_token_ids=tuple(range(5, 40)),
        min_tokens=3,
    )
    answers = ask(Engine(case.loaded), requests)
    case.check(answers)
    drawn = [token_id for answer in answers for token_id in answer.ids]
    assert set(drawn) <= set(range(5, 40))
    ranks = [position.rank for answer in answers for position in answer.output]
    assert max(ranks) > 20


def test_every_position_has_its_own_alternatives(case: Case) -> None:
    """sgl-project/sglang#2088: all showed those of the first."""
    sampling = SamplingParams(12, temperature=0.0, ignore_eos=True, logprobs=3)
    (answer,) = ask(Engine(case.loaded), [(case.prompts[5], sampling)])
    assert len({position.top_ids for position in answer.output}) > 6
    assert [p.top_ids[0] for p in answer.output] == answer.ids


OPS = ReferenceOps()


def test_a_vocabulary_smaller_than_what_is_asked_for() -> None:
    logits = torch.tensor([[0.5, 2.0, -1.0]])
    got = report(OPS, logits, torch.tensor([2]), 3)
    assert got.numbers.tolist() == [[3, 1, 0, 2]]


def test_equally_likely_tokens_are_in_order_of_their_ids_and_share_a_rank() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 2.0, 3.0, -1.0]])
    for top, ids in ((1, [1]), (2, [1, 2]), (3, [1, 2, 4]), (5, [1, 2, 4, 3, 0])):
        got = report(OPS, logits, torch.tensor([4]), top)
        assert got.numbers.tolist() == [[1, *ids]]
    assert report(OPS, logits, torch.tensor([0]), 0).numbers.tolist() == [[5]]


def test_report_equals_a_stable_sort() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(40, 300, generator=generator) * 4
    # Half of the rows have ties everywhere; one has nothing else.
    logits[::2] = logits[::2].round()
    logits[0] = 0.0
    token_ids = torch.randint(0, 300, (40,), generator=generator)
    expected = torch.log_softmax(logits, dim=-1)
    values, ids = expected.sort(dim=-1, descending=True, stable=True)
    got = report(OPS, logits, token_ids, MAX_LOGPROBS)
    assert torch.equal(got.numbers[:, 1:], ids[:, :MAX_LOGPROBS])
    assert torch.equal(got.values[:, 1:], values[:, :MAX_LOGPROBS])
    own = expected.gather(1, token_ids.unsqueeze(1))
    assert torch.equal(got.values[:, :1], own)
    assert torch.equal(got.numbers[:, 0], 1 + (expected > own).sum(1))
    for part in (logits[1::2], logits):  # without ties, and with
        half = sliced_report(OPS, part, token_ids[: len(part)], 7)
        assert torch.equal(half.numbers, report(OPS, part, token_ids[: len(part)], 7).numbers)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_smollm2() -> None:
    from tests.support.smollm2 import embedded_gguf, load_with_transformers
    from tokenizer_svc.loader import load_tokenizer

    loaded: Loaded = load(str(embedded_gguf()), "cpu")
    model = load_with_transformers()
    engine = Engine(loaded, prefix_caching=True)
    # vllm-project/vllm#8268, #3251: 33 ids, twice.
    asks = SamplingParams(1, temperature=0.0, ignore_eos=True, prompt_logprobs=1)
    twice = [ask(engine, [(range(100, 133), asks)])[0] for _ in range(2)]
    for answer in twice:
        assert len(answer.prompts[0]) == 33
        check_against(model, answer, 1e-3)
    assert twice[0].prompts == twice[1].prompts
    encode = load_tokenizer(embedded_gguf()).tokenizer.encode
    # vllm-project/vllm#10234: with top_k 1 at temperature 1 they were -inf.
    asks = SamplingParams(4, temperature=1.0, top_k=1, logprobs=1, prompt_logprobs=1)
    (answer,) = ask(engine, [(encode("seven green kettles").ids, asks)])
    check_against(model, answer, 1e-3)
    # sgl-project/sglang#2088: every position has its own.
    chat = "<|im_start|>user\nName one colour.<|im_end|>\n<|im_start|>assistant\n"
    asks = SamplingParams(6, temperature=0.0, ignore_eos=True, logprobs=3)
    (answer,) = ask(engine, [(encode(chat).ids, asks)])
    check_against(model, answer, 1e-3)
    assert [p.top_ids[0] for p in answer.output] == answer.ids
    assert len({p.top_ids for p in answer.output}) > 3
