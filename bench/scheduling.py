"""What scheduling flags do to decodes beside long prompts, on a simulated GPU.

    python bench/scheduling.py [--gpu h200] [--long-prompts 1.0] [--seconds 30]

The engine's own loop body over the simulated device, in virtual time: a step takes what
the roofline model says and the host nothing, so a run of half a minute takes seconds and
is the same every time. Llama-3-8B's shape. Chats (200 to 600 prompt tokens, 200 to 400
output tokens) and long prompts (8,000 to 16,000, 64 output tokens) arrive at random.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from engine_core.core import EngineCore
from engine_core.device.roofline import GPUS, ModelCost
from engine_core.device.sim import SimDevice
from engine_core.kv.manager import KVManager
from engine_core.runner.sim_runner import SimRunner
from engine_core.sched.limits import SchedulerLimits
from engine_core.sched.prefill_budget import PrefillBudget
from engine_core.sched.scheduler import Scheduler
from pagewire.types import SamplingParams
from pagewire.wire.codec import encode, pack_ids, unpack_request_ids
from pagewire.wire.messages import Add

EPOCH = 1
BLOCK_SIZE = 16
MAX_NUM_SEQS = 256
MAX_MODEL_LEN = 32_768
# Llama-3-8B (its model card and config.json) in bfloat16.
LLAMA_3_8B = ModelCost(
    layer_params=6_979_588_096,
    head_params=525_336_576,
    vocab_size=128_256,
    weight_bytes=2 * 8_030_261_248,
    num_layers=32,
    query_width=131_072,
    kv_bytes_per_token=131_072,
    item_bytes=2,
)


@dataclass(frozen=True)
class Flags:
    max_num_batched_tokens: int = 2048
    long_prefill_token_threshold: int = 0
    max_mixed_prefill_tokens: int = 0
    short_prefill_share: float = 0.0
    itl_target_ms: float | None = None

    def __str__(self) -> str:
        text = f"budget {self.max_num_batched_tokens}"
        if self.long_prefill_token_threshold:
            text += f", long prefill {self.long_prefill_token_threshold}"
        if self.max_mixed_prefill_tokens:
            text += f", mixed prefill {self.max_mixed_prefill_tokens}"
        if self.itl_target_ms is not None:
            text += f", ITL target {self.itl_target_ms:g}"
        if self.short_prefill_share:
            text += f", share {self.short_prefill_share:g}"
        return text


COMPARED = (
    Flags(8192),
    Flags(8192, long_prefill_token_threshold=1024),
    Flags(2048),
    Flags(2048, long_prefill_token_threshold=1024),
    Flags(2048, long_prefill_token_threshold=512),
    Flags(2048, short_prefill_share=0.25),
    Flags(2048, short_prefill_share=0.5),
    Flags(2048, max_mixed_prefill_tokens=512),
    Flags(2048, itl_target_ms=15),
    Flags(2048, itl_target_ms=25),
    Flags(512),
)


@dataclass
class Stream:
    arrives_at: float
    num_prompt: int
    num_output: int
    token_times: list[float] = field(default_factory=list)

    @property
    def is_long(self) -> bool:
        return self.num_prompt >= 8000


@dataclass
class Clock:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gpu", choices=sorted(GPUS), default="h200")
    parser.add_argument("--chats", type=float, default=15.0, help="A second. [%(default)s]")
    parser.add_argument("--long-prompts", type=float, default=1.5, help="Likewise. [%(default)s]")
    parser.add_argument("--seconds", type=float, default=30.0, help="Of arrivals. [%(default)s]")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows = []
    for flags in COMPARED:
        streams = draw_streams(options.seed, options.seconds, options.chats, options.long_prompts)
        seconds = run(options.gpu, flags, streams)
        rows.append({"flags": str(flags), **figures(streams, seconds)})
    if options.json:
        print(json.dumps(rows, indent=2))
        return
    print(
        f"{options.gpu}, {options.chats:g} chats and {options.long_prompts:g} long prompts a second"
    )
    print("ms; chats: ITL p50 / p99 / max, TTFT p50 / p99; long prompts: TTFT p50 / p99; tokens/s")
    for row in rows:
        print(
            f"{row['flags']:40}{row['itl_p50']:7.1f}{row['itl_p99']:7.1f}{row['itl_max']:7.1f}"
            f"{row['chat_ttft_p50']:9.0f}{row['chat_ttft_p99']:7.0f}"
            f"{row['long_ttft_p50']:9.0f}{row['long_ttft_p99']:7.0f}{row['tokens_per_s']:9.0f}"
        )


def draw_streams(seed: int, seconds: float, chats: float, longs: float) -> list[Stream]:
    rng = random.Random(seed)
    streams = []
    for rate, prompt, output in (
        (chats, (200, 600), (200, 400)),
        (longs, (8000, 16_000), (64, 64)),
    ):
        now = 0.0
        while rate and (now := now + rng.expovariate(rate)) < seconds:
            streams.append(Stream(now, rng.randint(*prompt), rng.randint(*output)))
    return sorted(streams, key=lambda stream: stream.arrives_at)


def run(gpu: str, flags: Flags, streams: list[Stream]) -> float:
    """Fills in the streams' token times; returns how long it took until all had ended."""
    clock = Clock()
    free = 0.9 * GPUS[gpu].memory_bytes - LLAMA_3_8B.weight_bytes
    num_blocks = int(free / (BLOCK_SIZE * LLAMA_3_8B.kv_bytes_per_token))
    limits = SchedulerLimits(
        max_num_seqs=MAX_NUM_SEQS,
        max_num_batched_tokens=flags.max_num_batched_tokens,
        max_model_len=MAX_MODEL_LEN,
        vocab_size=LLAMA_3_8B.vocab_size,
        long_prefill_token_threshold=flags.long_prefill_token_threshold,
        max_mixed_prefill_tokens=flags.max_mixed_prefill_tokens,
        short_prefill_share=flags.short_prefill_share,
    )
    runner = SimRunner(
        GPUS[gpu],
        LLAMA_3_8B,
        SimDevice(f"sim:{gpu}", GPUS[gpu], None, 0.9, clock=clock, sleep=clock.sleep),
        range(100, 4000),
        max_num_seqs=MAX_NUM_SEQS,
        max_num_batched_tokens=flags.max_num_batched_tokens,
        max_model_len=MAX_MODEL_LEN,
        block_size=BLOCK_SIZE,
    )
    prefill_budget = None
    if flags.itl_target_ms is not None:
        prefill_budget = PrefillBudget(flags.itl_target_ms / 1e3)
    scheduler = Scheduler(limits, KVManager(num_blocks, BLOCK_SIZE), prefill_budget=prefill_budget)
    core = EngineCore(scheduler, runner, epoch=EPOCH, clock=clock)
    arrived = 0

    def poll() -> None:
        nonlocal arrived
        while arrived < len(streams) and streams[arrived].arrives_at <= clock.now:
            stream = streams[arrived]
            ids = pack_ids((arrived * 7919 + at) % 100_000 for at in range(stream.num_prompt))
            sampling = SamplingParams(max_tokens=stream.num_output, seed=arrived)
            core.add(1, Add(arrived, EPOCH, ids, 0, sampling), stream.arrives_at)
            arrived += 1

    while True:
        poll()
        if not core.has_work():
            if arrived == len(streams):
                return clock.now
            clock.now = streams[arrived].arrives_at
            continue
        for output in core.step(poll).values():
            encode(output)
            for request_id in unpack_request_ids(output.request_ids):
                streams[request_id].token_times.append(clock.now)


def figures(streams: list[Stream], seconds: float) -> dict[str, float]:
    assert all(len(stream.token_times) == stream.num_output for stream in streams)
    chats = [stream for stream in streams if not stream.is_long]
    gaps = [
        1e3 * (later - earlier)
        for stream in chats
        for earlier, later in zip(stream.token_times, stream.token_times[1:], strict=False)
    ]
    ttft = {
        name: [
            1e3 * (stream.token_times[0] - stream.arrives_at)
            for stream in streams
            if stream.is_long is is_long
        ]
        for name, is_long in (("chat", False), ("long", True))
    }
    return {
        "itl_p50": statistics.median(gaps),
        "itl_p99": _percentile(gaps, 0.99),
        "itl_max": max(gaps),
        **{f"{name}_ttft_p50": statistics.median(values) for name, values in ttft.items()},
        **{f"{name}_ttft_p99": _percentile(values, 0.99) for name, values in ttft.items()},
        "tokens_per_s": sum(stream.num_output for stream in streams) / seconds,
    }


def _percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


if __name__ == "__main__":
    main()
