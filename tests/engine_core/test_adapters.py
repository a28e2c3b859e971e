"""Adapters by name, under an engine whose model is made of integers."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine_core.kv.hashing import root_hash
from engine_core.lora.adapters import AdapterRefused, Adapters
from pagewire.errors import ModelLoadError
from pagewire.types import BeamParams, FinishReason, SamplingParams
from tests.support.fake_model import FakeEngine, adapter_start, alone

PROMPT = list(range(100, 140))


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine(num_adapters=2)


def refused(adapters: Adapters, name: str, path: str = "/a") -> str:
    with pytest.raises(AdapterRefused) as caught:
        adapters.load(name, path)
    return caught.value.code


def test_slots_are_given_until_there_are_none(engine: FakeEngine) -> None:
    adapters = engine.adapters
    adapters.load("one", "/a")
    adapters.load("two", "/b")
    assert sorted(engine.runner.adapters) == [0, 1]
    assert [info.name for info in adapters.infos()] == ["one", "two"]
    assert refused(adapters, "three") == "no_room"
    assert refused(adapters, "one") == "already_exists"
    assert refused(adapters, "a b") == "invalid_request"
    assert adapters.find("three") is None
    adapters.unload("one")
    adapters.load("three", "/c")
    engine.check_at_rest()


def test_the_models_own_name_is_taken() -> None:
    engine = FakeEngine(num_adapters=1)
    adapters = Adapters(engine.adapters._backend, 1, base_name="base", directory=Path("/"))
    assert refused(adapters, "base") == "already_exists"


def test_a_folder_that_is_refused_takes_no_slot(engine: FakeEngine) -> None:
    for _ in range(3):
        with pytest.raises(ModelLoadError, match="bad"):
            engine.adapters.load("one", "/bad")
    engine.adapters.load("one", "/good")
    engine.check_at_rest()


def test_without_adapters_there_are_none() -> None:
    engine = FakeEngine()
    assert refused(engine.adapters, "one") == "feature_disabled"
    engine.add(0, PROMPT, adapter="one")
    engine.run()
    assert engine.of(0).finished[0].error == "model 'one' does not exist"
    assert engine.of(0).finished[0].field == "model"


def test_several_in_one_batch_and_never_each_others_kv(engine: FakeEngine) -> None:
    engine.adapters.load("one", "/a")
    engine.adapters.load("two", "/b")
    starts = {"": 0, "one": adapter_start("/a"), "two": adapter_start("/b")}
    for turn in range(2):
        for number, name in enumerate(starts):
            engine.add(10 * turn + number, PROMPT, max_tokens=12, ignore_eos=True, adapter=name)
        engine.run()
        for number, start in enumerate(starts.values()):
            expected = alone(PROMPT, 12, (), start=start)
            assert engine.of(10 * turn + number).token_ids == expected
    # The second turn found what the first has left: two full blocks each.
    assert engine.kv_manager.num_hit_tokens == 3 * 32
    engine.check_at_rest()


def test_what_is_loaded_under_an_old_name_does_not_hit_the_old_kv(engine: FakeEngine) -> None:
    for number, path in enumerate(("/a", "/b", "/a")):
        engine.adapters.load("one", path)
        engine.add(number, PROMPT, max_tokens=6, ignore_eos=True, adapter="one")
        engine.run()
        assert engine.of(number).token_ids == alone(PROMPT, 6, (), start=adapter_start(path))
        engine.adapters.unload("one")
    # The same content may hit what it has left before it was unloaded.
    assert engine.kv_manager.num_hit_tokens == 32
    engine.check_at_rest()


def test_requests_go_on_after_their_adapter_is_unloaded(engine: FakeEngine) -> None:
    engine.adapters.load("one", "/a")
    engine.add(0, PROMPT, max_tokens=9, ignore_eos=True, adapter="one")
    engine.step()
    engine.adapters.unload("one")
    engine.add(1, PROMPT, adapter="one")
    # Another content under the name takes another slot.
    engine.adapters.load("one", "/b")
    engine.add(2, PROMPT, max_tokens=9, ignore_eos=True, adapter="one")
    assert refused(engine.adapters, "two") == "no_room"
    engine.run()
    assert engine.of(0).token_ids == alone(PROMPT, 9, (), start=adapter_start("/a"))
    assert engine.of(1).finished[0].error == "model 'one' does not exist"
    assert engine.of(2).token_ids == alone(PROMPT, 9, (), start=adapter_start("/b"))
    engine.adapters.load("two", "/c")
    engine.check_at_rest()


@pytest.mark.parametrize("end", ["abort", "frontend", "deadline"])
def test_whatever_ends_its_requests_the_slot_is_free(engine: FakeEngine, end: str) -> None:
    engine.adapters.load("one", "/a")
    deadline_ms = 1500.0 if end == "deadline" else None
    for request_id in range(3):
        engine.add(
            request_id,
            PROMPT,
            max_tokens=400,
            ignore_eos=True,
            adapter="one",
            deadline_ms=deadline_ms,
        )
    engine.step()
    engine.adapters.unload("one")
    if end == "abort":
        engine.abort(0, 1, 2)
    elif end == "frontend":
        engine.core.drop_frontend(1)
    engine.run()
    if end != "frontend":
        assert {engine.of(it).reason for it in range(3)} == {FinishReason.ABORT}
    assert engine.runner.adapters == {}
    engine.check_at_rest()


def test_preempted_requests_come_back_with_their_adapter() -> None:
    engine = FakeEngine(num_adapters=1, num_blocks=9, enable_prefix_caching=False)
    engine.adapters.load("one", "/a")
    for request_id in range(3):
        engine.add(request_id, PROMPT, max_tokens=40, ignore_eos=True, adapter="one")
    engine.run()
    expected = alone(PROMPT, 40, (), start=adapter_start("/a"))
    assert [engine.of(it).token_ids for it in range(3)] == [expected] * 3
    assert engine.core.stats().total_preemptions > 0
    engine.check_at_rest()


def test_beams_have_the_adapter_of_their_search(engine: FakeEngine) -> None:
    engine.adapters.load("one", "/a")
    found = []
    for request_id, name in enumerate(["", "one", "one"]):
        beam = BeamParams(width=3, num_return=3)
        sampling = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True, beam=beam)
        engine.add(request_id, PROMPT, sampling=sampling, adapter=name)
        engine.run()
        found.append([beam.token_ids for beam in engine.of(request_id).finished[0].beams])
    assert found[0] != found[1] == found[2]
    engine.check_at_rest()


def test_followers_share_the_prompt_of_a_leader_of_their_adapter_only(engine: FakeEngine) -> None:
    engine.adapters.load("one", "/a")
    engine.add(0, PROMPT, adapter="one", max_tokens=4, ignore_eos=True)
    engine.add(1, PROMPT, adapter="one", max_tokens=4, ignore_eos=True, sample_index=1, leader_id=0)
    engine.add(2, PROMPT, leader_id=0)
    engine.run()
    start = adapter_start("/a")
    assert engine.of(1).token_ids == alone(PROMPT, 4, (), sample_index=1, start=start)
    assert "another prompt" in engine.of(2).finished[0].error
    engine.check_at_rest()


def test_a_request_for_other_content_is_refused(engine: FakeEngine) -> None:
    engine.adapters.load("one", "/a")
    engine.add(0, PROMPT, adapter="one", adapter_digest=b"/b")
    engine.add(1, PROMPT, adapter="one", adapter_digest=b"/a", max_tokens=1)
    engine.run()
    assert engine.of(0).finished[0].error == "model 'one' is another one than it was"
    assert engine.of(1).reason is FinishReason.LENGTH


def test_the_hash_of_kv_tells_adapters_and_salts_apart() -> None:
    keys = [("", b""), ("a", b""), ("", b"a"), ("a", b"a"), ("", b"b")]
    assert len({root_hash(salt, adapter) for salt, adapter in keys}) == len(keys)
