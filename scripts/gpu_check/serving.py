"""How fast is the engine? Its decode steps, and its tokens a second."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from pagewire.types import SamplingParams
from scripts.gpu_check.engine import Engine
from scripts.gpu_check.models import LLAMA, checkpoint, prompts
from scripts.gpu_check.outcome import ENGINE, Outcome
from scripts.gpu_check.workload import Workload

if TYPE_CHECKING:
    from pathlib import Path

    from scripts.gpu_check.measure import Bench

_GAP_GOAL = 0.05
_STEP_GOALS = {1: 0.80, 64: 0.75}
_WARM_UP_STEPS = 10


def engine(bench: Bench, work: Path) -> Outcome:
    """Llama-3.2-1B's shape in the engine's own defaults, greedy."""
    outcome = Outcome()
    directory = checkpoint(LLAMA, work, bench)
    load = Workload.of(bench)
    batches = (1, 4) if bench.tiny else (1, 64, 256)
    context, steps = (40, 8) if bench.tiny else (1024, 100)
    runner = Engine(
        directory,
        bench,
        dtype="float32" if bench.tiny else "bfloat16",
        max_num_seqs=max(batches),
        max_num_batched_tokens=None if bench.tiny else 8192,
        max_model_len=512 if bench.tiny else 2048,
        kv_cache_memory="64MiB" if bench.tiny else "24GiB",
    )
    bandwidth = bench.copy_bandwidth()
    weight_bytes = sum(file.stat().st_size for file in directory.glob("*.safetensors"))
    for batch in batches:
        _decode_steps(outcome, runner, bench, batch, context, steps, weight_bytes, bandwidth)
    _throughput(outcome, runner, load)
    return outcome


def _decode_steps(
    outcome: Outcome,
    runner: Engine,
    bench: Bench,
    batch: int,
    context: int,
    steps: int,
    weight_bytes: int,
    bandwidth: float,
) -> None:
    load = Workload.of(bench)
    output = 2 * (steps + _WARM_UP_STEPS) + _WARM_UP_STEPS
    sampling = SamplingParams(output, temperature=0.0, ignore_eos=True)
    answers = [
        runner.add(prompt, sampling)
        for prompt in prompts(batch, context, load.vocab_size, seed=batch)
    ]
    while not all(answer.ids for answer in answers):
        runner.step()
    runner.step_seconds(_WARM_UP_STEPS)
    before = sum(len(answer.ids) for answer in answers)
    wall = runner.step_seconds(steps)
    drawn = sum(len(answer.ids) for answer in answers) - before
    assert drawn == batch * steps, (drawn, batch, steps)
    length = context + before / batch + steps / 2
    device = runner.device_seconds(_WARM_UP_STEPS)
    runner.run()
    floor = (weight_bytes + batch * length * load.kv_bytes_per_token) / bandwidth
    label = f"batch {batch}, context {context}"
    outcome.add(
        f"decode step, floor over time, {label}",
        wall * 1e3,
        "ms",
        ratio=floor / wall,
        goal=_STEP_GOALS.get(batch),
    )
    outcome.add(f"device alone, floor over time, {label}", device * 1e3, "ms", ratio=floor / device)
    outcome.add(
        f"host gap of a step, {label}",
        (wall - device) * 1e3,
        "ms",
        ratio=1 - device / wall,
        goal=_GAP_GOAL,
        at_most=True,
    )


def _throughput(outcome: Outcome, runner: Engine, load: Workload) -> None:
    for output in (load.warm_up_output, load.output):
        sampling = SamplingParams(output, temperature=0.0, ignore_eos=True)
        began = time.perf_counter()
        answers = [runner.add(prompt, sampling) for prompt in load.prompts(seed=output)]
        runner.run()
        seconds = time.perf_counter() - began
        assert all(len(answer.ids) == output for answer in answers)
    outcome.add(ENGINE, load.batch * load.output / seconds, "tokens/s")
