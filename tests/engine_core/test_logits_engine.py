"""Penalties, masks and biases through the whole engine, on a tiny model."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest

from pagewire.types import FinishReason, SamplingParams
from pagewire.wire.codec import pack_ids, unpack_ids, unpack_request_ids
from pagewire.wire.messages import Add, Finished
from tests.parity.harness import EPOCH, FRONTEND_ID, Engine, Loaded, load
from tests.support.fake_model import FakeEngine
from tests.support.graph_device import GraphDevice
from tests.support.tiny_model import EOS_ID, TinySpec, write_hf

if TYPE_CHECKING:
    from collections.abc import Sequence

NUM_TOKENS = 24
PROMPTS = ([5, 90, 17, 250, 33, 8, 61], [40, 41, 40, 41] * 5, list(range(60, 91)), [7])
SAMPLINGS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0, "repetition_penalty": 1.5, "frequency_penalty": 0.5},
    {"temperature": 0.9, "seed": 5, "presence_penalty": 1.5, "logit_bias": ((9, 4.0), (1, 8.0))},
    {"temperature": 0.9, "seed": 6, "top_k": 30, "bad_words": ((9,), (4, 8)), "min_tokens": 20},
    {"temperature": 1.5, "seed": 7, "allowed_token_ids": tuple(range(40)), "min_tokens": 7},
    {"temperature": 0.8, "seed": 8},
)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    path = write_hf(tmp_path_factory.mktemp("tiny") / "model", TinySpec())
    return load(str(path), "cpu")


def params(max_tokens: int = NUM_TOKENS, **sampling: Any) -> SamplingParams:
    return SamplingParams(max_tokens, **sampling)


def serve(
    engine: Engine, asked: Sequence[tuple[Sequence[int], SamplingParams]], num_output: int = 0
) -> list[tuple[list[int], Finished]]:
    """All at once; of each prompt's ids the last num_output are output that is replayed."""
    outputs: dict[int, list[int]] = {}
    finishes: dict[int, Finished] = {}
    for number, (ids, sampling) in enumerate(asked):
        outputs[number] = []
        engine.core.add(FRONTEND_ID, Add(number, EPOCH, pack_ids(ids), num_output, sampling), 0.0)
    while engine.core.has_work():
        for output in engine.core.step(lambda: None).values():
            ids = unpack_request_ids(output.request_ids)
            for number, token_id in zip(ids, unpack_ids(output.token_ids), strict=True):
                outputs[number].append(token_id)
            finishes.update((finished.request_id, finished) for finished in output.finished)
        engine.core.check_integrity()
    engine.kv_manager.check_all_free()
    return [(outputs[number], finishes[number]) for number in outputs]


def all_asked() -> list[tuple[list[int], SamplingParams]]:
    return [(prompt, params(**sampling)) for prompt in PROMPTS for sampling in SAMPLINGS]


@pytest.fixture(scope="module")
def alone(loaded: Loaded) -> list[list[int]]:
    engine = Engine(loaded)
    return [serve(engine, [asked])[0][0] for asked in all_asked()]


def test_they_do_what_they_say(alone: list[list[int]]) -> None:
    for number, ids in enumerate(alone):
        sampling = params(**SAMPLINGS[number % len(SAMPLINGS)])
        assert EOS_ID not in ids[: sampling.min_tokens]
        assert len(ids) > sampling.min_tokens
        if sampling.allowed_token_ids is not None:
            assert set(ids) <= set(sampling.allowed_token_ids)
        if sampling.bad_words:
            assert 9 not in ids
            assert (4, 8) not in list(pairwise(ids))
    repeated = alone[0]
    assert len(set(repeated)) > len(repeated) // 2


@pytest.mark.parametrize(
    "schedule",
    [
        {},
        {"max_num_batched_tokens": 6, "max_num_seqs": 5},
        # Five requests of up to 55 tokens each, and 10 blocks of 16 in all.
        {"num_blocks": 11, "max_num_seqs": 5},
        {"prefix_caching": True, "block_size": 4},
    ],
    ids=["batched", "chunked", "preempted", "prefix-cached"],
)
def test_company_and_schedule_change_nothing(
    loaded: Loaded, alone: list[list[int]], schedule: dict[str, Any]
) -> None:
    engine = Engine(loaded, **schedule)
    assert [ids for ids, _ in serve(engine, all_asked())] == alone
    if "num_blocks" in schedule:
        assert engine.core.stats().total_preemptions > 0


@pytest.mark.parametrize(
    "schedule",
    [{}, {"max_num_batched_tokens": 6, "max_num_seqs": 5}, {"num_blocks": 11, "max_num_seqs": 5}],
    ids=["batched", "chunked", "preempted"],
)
def test_plans_made_before_the_ids_are_known_change_nothing(
    loaded: Loaded, alone: list[list[int]], schedule: dict[str, Any]
) -> None:
    late = replace(loaded, device=GraphDevice())
    engine = Engine(late, async_scheduling=True, **schedule)
    assert [ids for ids, _ in serve(engine, all_asked())] == alone
    if "num_blocks" in schedule:
        assert engine.core.stats().total_preemptions > 0


def test_only_what_looks_at_ids_waits_for_them(
    loaded: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    def serve_on(sampling: dict[str, Any]) -> int:
        device = GraphDevice()
        engine = Engine(replace(loaded, device=device), async_scheduling=True)
        launch, waits = engine.runner.launch, 0

        def count_waits(plan: Any) -> Any:
            nonlocal waits
            before = device.num_passed
            pending = launch(plan)
            waits += device.num_passed > before
            return pending

        monkeypatch.setattr(engine.runner, "launch", count_waits)
        [(ids, _)] = serve(engine, [(PROMPTS[0], params(ignore_eos=True, **sampling))])
        assert len(ids) == NUM_TOKENS
        return waits

    assert serve_on({"min_tokens": 7, "logit_bias": ((9, 4.0),)}) == 0
    assert serve_on({"allowed_token_ids": tuple(range(40))}) == 0
    # All steps but the first have an id to wait for.
    assert serve_on({"presence_penalty": 1.0}) == NUM_TOKENS - 1
    assert serve_on({"bad_words": ((4, 8),)}) == NUM_TOKENS - 1


@pytest.mark.parametrize("num_output", [1, 6])
def test_replayed_output_goes_on_as_before(
    loaded: Loaded, alone: list[list[int]], num_output: int
) -> None:
    asked = [
        ([*prompt, *ids[:num_output]], sampling)
        for (prompt, sampling), ids in zip(all_asked(), alone, strict=True)
        if len(ids) > num_output
    ]
    rest = [ids for ids, _ in serve(Engine(loaded), asked, num_output)]
    assert rest == [ids[num_output:] for ids in alone if len(ids) > num_output]


@pytest.mark.parametrize("min_tokens", [0, 1, 5])
def test_min_tokens_holds_eos_and_stop_ids_off(loaded: Loaded, min_tokens: int) -> None:
    for end, stops in ((EOS_ID, ()), (77, (77,))):
        sampling = params(
            temperature=0.0,
            min_tokens=min_tokens,
            stop_token_ids=stops,
            logit_bias=((end, 100.0),),
        )
        [(ids, finished)] = serve(Engine(loaded), [(PROMPTS[0], sampling)])
        assert len(ids) == min_tokens + 1
        assert (ids[-1], finished.reason) == (end, FinishReason.STOP)


@pytest.mark.parametrize("async_scheduling", [False, True], ids=["sync", "async"])
def test_a_dead_end_ends_its_request_alone(loaded: Loaded, async_scheduling: bool) -> None:
    # 9 is all there is, and after two of them nothing.
    dead = params(
        temperature=1.0, ignore_eos=True, allowed_token_ids=(9,), bad_words=((9, 9),), logprobs=2
    )
    asked = all_asked()[:3]
    device = GraphDevice() if async_scheduling else loaded.device
    engine = Engine(replace(loaded, device=device), async_scheduling=async_scheduling)
    results = serve(engine, [*asked, (PROMPTS[0], dead)])
    ids, finished = results[-1]
    assert ids == [9]
    assert finished.reason == FinishReason.ERROR
    assert finished.field == "sampling_params"
    assert "leave no token to draw" in finished.error
    alone = [serve(Engine(loaded), [one])[0][0] for one in asked]
    assert [ids for ids, _ in results[:-1]] == alone


@pytest.mark.parametrize(
    ("sampling", "message"),
    [
        ({"min_tokens": -1}, "min_tokens is -1"),
        ({"min_tokens": 9}, "min_tokens is 9"),
        ({"repetition_penalty": 0.0}, "repetition_penalty is 0.0"),
        ({"repetition_penalty": float("nan")}, "repetition_penalty is nan"),
        ({"repetition_penalty": float("inf")}, "repetition_penalty is inf"),
        ({"presence_penalty": float("nan")}, "presence_penalty is nan"),
        ({"frequency_penalty": 2.5}, "frequency_penalty is 2.5"),
        ({"logit_bias": ((3, float("nan")),)}, "logit_bias holds a bias"),
        ({"logit_bias": ((3, 101.0),)}, "logit_bias holds a bias"),
        ({"logit_bias": ((1000, 1.0),)}, "logit_bias holds 1000, outside the vocabulary of 1000"),
        ({"logit_bias": ((3, 1.0), (3, 2.0))}, "logit_bias names a token id twice"),
        ({"bad_words": ((1,), ())}, "bad_words holds a word without token ids"),
        ({"bad_words": ((1, -1),)}, "bad_words holds -1"),
        ({"allowed_token_ids": ()}, "allowed_token_ids is empty"),
        ({"allowed_token_ids": (3, 1000)}, "allowed_token_ids holds 1000"),
        # vllm-project/vllm#54195: an id past the vocabulary killed the engine.
        ({"stop_token_ids": (1000,), "min_tokens": 1}, "stop_token_ids holds 1000"),
        ({"stop_token_ids": (-1,)}, "stop_token_ids holds -1"),
    ],
)
def test_what_could_hurt_a_step_is_refused(sampling: dict[str, Any], message: str) -> None:
    engine = FakeEngine()
    engine.add(0, [5, 6], sampling=SamplingParams(max_tokens=8, **sampling))
    engine.step()
    heard = engine.of(0)
    assert heard.reason is FinishReason.ERROR
    assert message in heard.finished[0].error
    assert engine.runner.plans == []
    engine.check_at_rest()
