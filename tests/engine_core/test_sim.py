"""The simulated device and its runner, under a clock that only moves when somebody sleeps."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest
import torch

from engine_core.core import EngineCore
from engine_core.device.roofline import GPUS, ModelCost, step_seconds
from engine_core.device.sim import SimDevice
from engine_core.kv.manager import KVManager
from engine_core.runner.sim_runner import (
    SimRunner,
    find_unsimulated,
    printable_ids,
    step_work,
)
from engine_core.sched.limits import SchedulerLimits
from engine_core.sched.plan import NewSeq, SeqStep, StepPlan
from engine_core.sched.scheduler import Scheduler
from engine_core.sim_builder import build_simulated
from pagewire.config import EngineConfig
from pagewire.errors import ConfigError, ModelLoadError
from pagewire.types import BeamParams, FinishReason, SamplingParams, StructuredOutput
from pagewire.wire.codec import pack_ids, unpack_ids, unpack_request_ids
from pagewire.wire.messages import Add, Finished
from tests.support.tiny_model import TinySpec, config_json, write_hf

if TYPE_CHECKING:
    from pathlib import Path

H200 = GPUS["h200"]
COST = ModelCost(
    layer_params=7_000_000_000,
    head_params=500_000_000,
    vocab_size=1000,
    weight_bytes=16_000_000_000,
    num_layers=32,
    query_width=131_072,
    kv_bytes_per_token=131_072,
    item_bytes=2,
)
EOS = 2
IDS = range(100, 900)


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def make_device(clock: Clock, **flags: Any) -> SimDevice:
    settings = {"kv_cache_memory": None, "memory_utilization": 0.9, **flags}
    return SimDevice("sim:h200", H200, clock=clock, sleep=clock.sleep, **settings)


class Engine:
    """EngineCore over a SimRunner; all requests are of frontend 1."""

    def __init__(self, num_blocks: int = 200, max_num_batched_tokens: int = 64) -> None:
        self.clock = Clock()
        limits = SchedulerLimits(8, max_num_batched_tokens, 512, 1000, (EOS,))
        self.scheduler = Scheduler(limits, KVManager(num_blocks, 16))
        self.runner = SimRunner(
            H200,
            COST,
            make_device(self.clock),
            IDS,
            max_num_seqs=8,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=512,
            block_size=16,
        )
        self.core = EngineCore(
            self.scheduler,
            self.runner,
            epoch=1,
            clock=self.clock,
            find_unsupported=find_unsimulated,
        )
        self.tokens: dict[int, list[int]] = {}
        self.finished: dict[int, Finished] = {}

    def add(self, request_id: int, prompt: int = 8, **sampling: Any) -> None:
        params = SamplingParams(**{"max_tokens": 20, "seed": request_id, **sampling})
        self.core.add(
            1, Add(request_id, 1, pack_ids(range(prompt)), 0, params), received_at=self.clock()
        )

    def run(self) -> None:
        for _ in range(2000):
            if not self.core.has_work():
                self.core.check_integrity()
                return
            for output in self.core.step(lambda: None).values():
                ids = zip(
                    unpack_request_ids(output.request_ids),
                    unpack_ids(output.token_ids),
                    strict=True,
                )
                for request_id, token_id in ids:
                    self.tokens.setdefault(request_id, []).append(token_id)
                for finished in output.finished:
                    assert finished.request_id not in self.finished
                    self.finished[finished.request_id] = finished
        raise AssertionError("does not end")


# The device.


def test_launching_returns_at_once_and_the_result_waits() -> None:
    clock = Clock()
    device = make_device(clock)
    device.run(0.25)
    first = device.fetch(torch.tensor([7]))
    device.run(0.5)
    second = device.fetch(torch.tensor([8]))
    assert clock.now == 1000.0
    assert first.wait().tolist() == [7]
    assert clock.now == pytest.approx(1000.25)
    assert second.wait().tolist() == [8]
    assert clock.now == pytest.approx(1000.75)


def test_the_queue_does_not_begin_in_the_past() -> None:
    clock = Clock()
    device = make_device(clock)
    device.run(0.25)
    clock.now += 10
    device.run(0.5)
    device.fence().wait()
    assert clock.now == pytest.approx(1010.5)


def test_a_timer_measures_what_is_queued() -> None:
    device = make_device(Clock())
    device.run(1.0)
    timer = device.timer()
    device.run(0.125)
    timer.stop()
    assert timer.seconds() == pytest.approx(0.125)


def test_memory_that_is_not_there_is_named_with_figures() -> None:
    device = make_device(Clock())
    device.hold(120_000_000_000)
    # 90% of 141 GB, less an eighth of the step again, which is kept free.
    budget = device.profiled_kv_budget(lambda: device.hold(1_600_000_000), lambda: 100_000_000)
    assert budget.num_bytes == 5_000_000_000
    with pytest.raises(
        ConfigError,
        match=r"131\.32 GiB leaves nothing .* weights take 113\.25 GiB, the largest step 9\.31 GiB",
    ):
        device.profiled_kv_budget(lambda: device.hold(10_000_000_000), lambda: 0)


# The runner.


def test_a_step_takes_the_rooflines_time() -> None:
    engine = Engine()
    engine.add(1, prompt=40, max_tokens=3)
    engine.run()
    work = [step_work(np.array([40]), np.array([40]), 1)]
    work += [step_work(np.array([length]), np.array([1]), 1) for length in (41, 42)]
    expected = sum(step_seconds(H200, COST, step) for step in work)
    assert engine.clock.now - 1000 == pytest.approx(expected)
    assert expected > 3 * 14e9 / 4.3e12


def test_work_counts_pairs_as_causal_attention_does() -> None:
    lens, new = [5, 9, 3], [5, 4, 1]
    pairs = sum(
        key <= query
        for length, num in zip(lens, new, strict=True)
        for query in range(length - num, length)
        for key in range(length)
    )
    work = step_work(np.array(lens, np.int32), np.array(new, np.int32), 2)
    assert (work.num_tokens, work.num_sampled, work.num_context_tokens) == (10, 2, 17)
    assert work.num_pairs == pairs


def test_output_depends_on_seed_and_position_alone() -> None:
    """Whatever runs beside it, is preempted or chunked."""
    alone = Engine(max_num_batched_tokens=8)
    alone.add(5, prompt=30, max_tokens=120)
    alone.run()
    crowd = Engine(num_blocks=24)
    for request_id in range(1, 9):
        crowd.add(request_id, prompt=30, max_tokens=120)
    crowd.run()
    assert crowd.scheduler.total_preemptions > 0
    assert crowd.tokens[5] == alone.tokens[5]
    assert len({tuple(tokens) for tokens in crowd.tokens.values()}) == 8
    assert set(alone.tokens[5]) <= set(IDS)
    assert len(set(alone.tokens[5])) > 60


def test_sample_indices_and_greedy_requests() -> None:
    engine = Engine()
    for request_id, index in ((1, 0), (2, 1)):
        params = SamplingParams(max_tokens=20, seed=9)
        add = Add(request_id, 1, pack_ids(range(8)), 0, params, sample_index=index)
        engine.core.add(1, add, 0.0)
    engine.add(3, temperature=0.0)
    engine.add(4, temperature=0.0)
    engine.run()
    assert engine.tokens[1] != engine.tokens[2]
    assert engine.tokens[3] == engine.tokens[4]


def test_length_stop_ids_and_eos_only_when_asked() -> None:
    engine = Engine()
    engine.add(1, max_tokens=200)
    engine.run()
    drawn = engine.tokens[1]
    assert engine.finished[1].reason == FinishReason.LENGTH
    assert len(drawn) == 200
    at = next(at for at in range(5, 200) if drawn[at] not in drawn[:at])
    engine.add(2, seed=1, max_tokens=200, stop_token_ids=(drawn[at],))
    engine.add(3, allowed_token_ids=(EOS,))
    engine.add(4, max_tokens=9, allowed_token_ids=(EOS, 50), ignore_eos=True)
    engine.run()
    assert engine.tokens[2] == drawn[: at + 1]
    assert engine.finished[2].stop_token_id == drawn[at]
    assert engine.tokens[3] == [EOS]
    assert engine.finished[3].reason == FinishReason.STOP
    assert set(engine.tokens[4]) == {EOS, 50}


def test_a_row_forgets_what_its_last_tenant_allowed() -> None:
    engine = Engine()
    for request_id in range(1, 9):
        engine.add(request_id, allowed_token_ids=(50,))
    engine.run()
    for request_id in range(11, 19):
        engine.add(request_id)
    engine.run()
    assert all(set(engine.tokens[number]) <= set(IDS) for number in range(11, 19))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("structured_output", StructuredOutput("json_object", "")),
        ("logprobs", 0),
        ("prompt_logprobs", 1),
        ("beam_search", BeamParams(2, 2)),
        ("logit_bias", ((5, -100.0),)),
        ("bad_words", ((5,),)),
    ],
)
def test_what_would_have_to_be_true_is_refused(field: str, value: Any) -> None:
    engine = Engine()
    engine.add(1, **{field.removesuffix("_search"): value})
    engine.run()
    assert engine.finished[1].reason == FinishReason.ERROR
    assert engine.finished[1].field == f"sampling_params.{field}"
    assert engine.finished[1].error == f"{field} is not simulated"
    assert engine.tokens == {}


def test_min_tokens_is_refused_only_beside_what_could_end_it() -> None:
    plain = SamplingParams(max_tokens=9, min_tokens=9)
    assert find_unsimulated(plain) is None
    for change in ({"stop_token_ids": (5,)}, {"allowed_token_ids": (EOS, 5)}):
        found = find_unsimulated(msgspec.structs.replace(plain, **change))
        assert found is not None
        assert found[0] == "sampling_params.min_tokens"


def test_the_next_plan_can_be_launched_before_the_result_is_read() -> None:
    engine = Engine()
    params = SamplingParams(max_tokens=20, seed=3)
    new = NewSeq(0, tuple(range(8)), 8, params)
    first = engine.runner.launch(StepPlan(1, (), (new,), (SeqStep(0, 0, 8, (1,), True),)))
    second = engine.runner.launch(StepPlan(2, (), (), (SeqStep(0, 8, 1, (), True),)))
    assert engine.clock.now == 1000.0
    other = Engine()
    other.add(3, max_tokens=2)
    other.run()
    assert [*first.result().token_ids, *second.result().token_ids] == other.tokens[3]
    assert engine.clock.now == pytest.approx(other.clock.now)


def test_printable_ids() -> None:
    tokens = [b"</s>", b" word", b"\xe6\x97", b"x", b"\n", b"", b" two words", b" 1", b" \xc3\xa9t"]
    assert printable_ids(tokens, {0}) == [1, 8]
    assert printable_ids(tokens[2:8], {1}) == [4, 5]
    assert printable_ids(tokens[2:6], ()) == [1]
    assert printable_ids([b"\xff", b""], ()) == []


# The builder.


def config_only(directory: Path) -> Path:
    """No weights."""
    model = write_hf(directory, TinySpec(max_positions=4096))
    for file in model.glob("*.safetensors*"):
        file.unlink()
    return model


def test_a_configuration_is_enough(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    built = build_simulated(EngineConfig(model=str(config_only(tmp_path / "m")), device="sim:l4"))
    assert built.device == "sim:l4"
    (line,) = [r.message for r in caplog.records if "SIMULATED" in r.message]
    assert "NVIDIA L4" in line
    spec = TinySpec()
    block_bytes = 16 * 2 * spec.num_layers * spec.num_kv_heads * spec.real_head_dim * 4
    assert 21.6e9 * 0.99 < built.num_blocks * block_bytes < 21.6e9


def test_without_a_tokenizer_any_id_but_eos_is_drawn(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = config_only(tmp_path / "m")
    (model / "tokenizer.json").unlink()
    build_simulated(EngineConfig(model=str(model), device="sim:h200", kv_cache_memory="1GiB"))
    assert "may hold any id but the end of sequence" in caplog.text


@pytest.mark.parametrize(
    "flags",
    [
        {"quantization": "int8"},
        {"kv_offload_memory": "1GiB"},
        {"kernels": "reference"},
        {"batch_invariant": True},
        {"lora_modules": "sql=/sql"},
        {"lora_dir": "/adapters"},
    ],
)
def test_flags_that_are_not_simulated_are_named(tmp_path: Path, flags: dict[str, Any]) -> None:
    config = EngineConfig(model=str(tmp_path), device="sim:h100", **flags)
    name = next(iter(flags)).replace("_", "-")
    with pytest.raises(ConfigError, match=f"--{name} is not simulated by --device sim:h100"):
        build_simulated(config)


@pytest.mark.parametrize(
    ("spec", "changes", "message"),
    [
        (
            TinySpec(architecture="MistralForCausalLM", sliding_window=32),
            {},
            "sliding window of 32 at a context of 512",
        ),
        (
            TinySpec(architecture="MixtralForCausalLM"),
            {"max_model_len": 64},
            "does not simulate mixtures of experts",
        ),
    ],
)
def test_layers_that_the_roofline_does_not_know_are_refused(
    tmp_path: Path, spec: TinySpec, changes: dict[str, Any], message: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config_json(spec)))
    with pytest.raises(ConfigError, match=f"--device sim:l4 .*{message}"):
        build_simulated(EngineConfig(model=str(tmp_path), device="sim:l4", **changes))


def test_a_model_that_does_not_fit_is_refused_with_figures(tmp_path: Path) -> None:
    model = config_only(tmp_path / "m")
    config = json.loads((model / "config.json").read_text())
    config["intermediate_size"] = 10**8
    (model / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="leaves nothing for the KV cache: weights take"):
        build_simulated(EngineConfig(model=str(model), device="sim:l4"))


def test_a_broken_configuration_is_named(tmp_path: Path) -> None:
    model = config_only(tmp_path / "m")
    (model / "config.json").write_text("{}")
    with pytest.raises(ModelLoadError, match=r"config\.json"):
        build_simulated(EngineConfig(model=str(model), device="sim:l4"))
