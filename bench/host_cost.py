"""What a step costs the host: scheduling, building the batch, handling the output.

    python bench/host_cost.py [--requests 256] [--steps 300] [--async] [--profile]
    python bench/host_cost.py --device-ms 8 [--async]

The engine's own loop body runs in this process, on one thread, over the simulated device
at no device time: the real scheduler, KV manager, rows and batch builder (CPU tensors),
and the outputs are encoded as they would be sent. What is left out is what a device needs
of the host besides: launching its kernels. All requests decode; each block and prefix
hash that 16 tokens bring is in it, so steps differ, and the mean is what counts. It is
the thread's CPU time, as other processes would be in any other.

With --device-ms the device takes that long over a step, and wall time is told too: how much
of the host's work the device waits for. --async plans a step while the one before runs.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import json
import pstats
import statistics
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from engine_core.core import EngineCore
from engine_core.device.roofline import GPUS, ModelCost
from engine_core.device.sim import SimDevice
from engine_core.kv.manager import KVManager
from engine_core.runner.sim_runner import SimRunner
from engine_core.sched.limits import SchedulerLimits
from engine_core.sched.scheduler import Scheduler
from pagewire.types import SamplingParams
from pagewire.wire.codec import encode, pack_ids
from pagewire.wire.messages import Add

if TYPE_CHECKING:
    from collections.abc import Callable

BLOCK_SIZE = 16
VOCAB_SIZE = 49_152
EPOCH = 1
PARTS = ("schedule", "launch", "result", "update", "rest", "encode")
WARM_UP_STEPS = 50


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--prompt", type=int, default=512, help="Tokens of each. [%(default)s]")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--temperature", type=float, default=0.8)
    parser.add_argument("--async", action="store_true", dest="async_scheduling")
    parser.add_argument(
        "--device-ms", type=float, default=0.0, help="Of the device, a step. [%(default)s]"
    )
    parser.add_argument("--profile", action="store_true", help="By function; slows it down.")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    bench = _Bench(options)
    bench.fill()
    for _ in range(WARM_UP_STEPS):
        bench.step()
    bench.forget()
    # As the engine process does once it is up.
    gc.collect()
    gc.freeze()
    if options.profile:
        with cProfile.Profile() as profile:
            for _ in range(options.steps):
                bench.step()
        pstats.Stats(profile).sort_stats("tottime").print_stats(40)
        return
    began = time.monotonic()
    for _ in range(options.steps):
        bench.step()
    wall_ms = 1e3 * (time.monotonic() - began) / options.steps
    figures = bench.figures()
    if options.json:
        print(json.dumps({**figures, "wall_ms": wall_ms}, indent=2))
        return
    mode = "async" if options.async_scheduling else "sync"
    print(f"{options.requests} requests decode, {options.steps} steps, {mode}, CPU ms a step")
    print("             mean    p50    p99")
    for part, of_part in figures.items():
        print(f"{part:9} {of_part['mean']:7.3f}{of_part['p50']:7.3f}{of_part['p99']:7.3f}")
    if options.device_ms:
        print(f"wall      {wall_ms:7.3f} ms a step, of which the device computes for all but")
        print(f"idle      {wall_ms - options.device_ms:7.3f} ms")


class _Bench:
    def __init__(self, options: argparse.Namespace) -> None:
        self._requests: int = options.requests
        self._prompt: int = options.prompt
        self._output = 2 * (options.steps + WARM_UP_STEPS) + options.prompt
        self._temperature: float = options.temperature
        requests, prompt = self._requests, self._prompt
        max_model_len = prompt + self._output
        self._limits = SchedulerLimits(
            max_num_seqs=requests,
            max_num_batched_tokens=8192,
            max_model_len=max_model_len,
            vocab_size=VOCAB_SIZE,
            eos_token_ids=(2,),
        )
        num_blocks = requests * (max_model_len // BLOCK_SIZE + 2) * 2
        self._scheduler = Scheduler(self._limits, KVManager(num_blocks, BLOCK_SIZE))
        device = SimDevice("sim", GPUS["h200"], None, 0.9)
        self._runner = SimRunner(
            None,
            NO_COST,
            device,
            range(100, 4000),
            max_num_seqs=requests,
            max_num_batched_tokens=8192,
            max_model_len=max_model_len,
            block_size=BLOCK_SIZE,
        )
        self._core = EngineCore(
            self._scheduler,
            self._runner,
            epoch=EPOCH,
            async_scheduling=options.async_scheduling,
        )
        self._seconds: dict[str, list[float]] = {part: [] for part in (*PARTS, "all")}
        self._now: dict[str, float] = {}
        self._scheduler.schedule = self._timed("schedule", self._scheduler.schedule)  # type: ignore[method-assign]
        self._scheduler.update = self._timed("update", self._scheduler.update)  # type: ignore[method-assign]
        launch = self._timed("launch", self._runner.launch)
        step_s = options.device_ms / 1e3

        def launch_timed(plan: Any) -> Any:
            device.run(step_s)
            pending = launch(plan)
            pending.result = self._timed("result", pending.result)
            return pending

        self._runner.launch = launch_timed  # type: ignore[method-assign]

    def fill(self) -> None:
        """All requests are admitted and past their prompts."""
        for index in range(self._requests):
            sampling = SamplingParams(
                max_tokens=self._output, temperature=self._temperature, seed=index, ignore_eos=True
            )
            ids = pack_ids((index * 7919 + at * 31) % VOCAB_SIZE for at in range(self._prompt))
            self._core.add(1, Add(index + 1, EPOCH, ids, 0, sampling), time.monotonic())
        while any(it.num_output_tokens == 0 for it in self._scheduler.running) or len(
            self._scheduler.waiting
        ):
            self._core.step(_nothing)

    def step(self) -> None:
        self._now = {}
        began = time.thread_time()
        outputs = self._core.step(_nothing)
        stepped = time.thread_time()
        for output in outputs.values():
            encode(output)
        ended = time.thread_time()
        self._now["rest"] = stepped - began - sum(self._now.values())
        self._now["encode"] = ended - stepped
        self._now["all"] = ended - began
        for part, seconds in self._now.items():
            self._seconds[part].append(seconds)
        assert len(self._scheduler.running) == self._requests

    def forget(self) -> None:
        for values in self._seconds.values():
            values.clear()

    def figures(self) -> dict[str, dict[str, float]]:
        """ms by part."""
        return {
            part: {
                "mean": 1e3 * statistics.fmean(values),
                "p50": 1e3 * statistics.median(values),
                "p99": 1e3 * sorted(values)[int(0.99 * len(values))],
            }
            for part, values in self._seconds.items()
        }

    def _timed(self, part: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any) -> Any:
            began = time.thread_time()
            try:
                return call(*args)
            finally:
                self._now[part] = time.thread_time() - began

        return timed


NO_COST = ModelCost(0, 0, VOCAB_SIZE, 0, 0, 0, 0, 2)


def _nothing() -> None:
    pass


if __name__ == "__main__":
    main()
