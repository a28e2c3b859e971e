"""What structured output costs, on the CPU.

    python bench/structured_output.py [--batch 32] [--steps 50]
    python bench/structured_output.py --end-to-end [--batch 16] [--steps 64] [--rounds 3]

Without a model: every row follows a JSON schema over the embedded model's vocabulary,
and draws uniformly from what is allowed. Timed is the logits processor: grammar, mask
and the logits [batch, vocabulary] that it is put on.

End to end: the embedded model under a real engine core, in this process. Half of the
requests follow the schema, then none does, in turn; prompts, lengths and seeds are the
same. Reported are output tokens per second of both, and their ratio, by medians.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import sys
import threading
import time
from pathlib import Path

# As the engine's process does it: OpenMP threads that spin would take the cores that the
# C++ ops' own threads need.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from engine_core.core import EngineCore
from engine_core.engine_builder import build_engine
from engine_core.grammar.compiler import GrammarCompiler
from engine_core.grammar.gate import GrammarGate
from engine_core.grammar.vocabulary import read_vocabulary
from engine_core.kv.manager import KVManager
from engine_core.runner.rows import Rows
from engine_core.runner.structured import StructuredOutputs
from engine_core.sched.plan import NewSeq, StepPlan
from engine_core.sched.scheduler import Scheduler, SchedulerLimits
from pagewire.config import EMBEDDED_MODEL, EngineConfig
from pagewire.model_source import resolve_model
from pagewire.types import SamplingParams, StructuredOutput
from pagewire.wire.codec import pack_ids, unpack_ids
from pagewire.wire.messages import Add

VOCAB_SIZE, EOS = 49152, 2
SCHEMA = """{
  "type": "object",
  "properties": {
    "name": {"type": "string"},
    "scores": {"type": "array", "items": {"type": "number"}},
    "address": {"type": "object", "properties": {"street": {"type": "string"}}}
  },
  "required": ["name", "scores", "address"]
}"""
LONG_SCHEMA = """{"type": "array", "minItems": 500, "items":
{"type": "object", "properties": {"name": {"type": "string"}, "size": {"type": "number"}},
"required": ["name", "size"]}}"""
"""No answer to it ends within the measurement."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--end-to-end", action="store_true")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    if options.end_to_end:
        measure_end_to_end(options.batch, options.steps, options.rounds)
    else:
        measure_processor(options)


def measure_processor(options: argparse.Namespace) -> None:
    source = resolve_model(EMBEDDED_MODEL)
    compiler = GrammarCompiler(lambda: read_vocabulary(source, VOCAB_SIZE), (EOS,))
    for name in ("first constraint, vocabulary and all", "next constraint"):
        began = time.perf_counter()
        # Another text each time, as the same one would not be compiled in a server.
        grammar = compiler.compile(StructuredOutput("json_schema", SCHEMA + " " * len(name)))
        print(f"{name}: compiled in {1e3 * (time.perf_counter() - began):.1f} ms")

    rows = Rows(options.batch, options.steps + 4, 16)
    processor = StructuredOutputs(rows, ())
    new = [
        NewSeq(row, (5, 6), 2, SamplingParams(options.steps), None, grammar)
        for row in range(options.batch)
    ]
    rows.apply(StepPlan(1, (), tuple(new), ()))
    for seq in new:
        processor.admit(seq)
    listed = list(range(options.batch))
    generator = torch.Generator().manual_seed(1)
    times, plain_times = [], []
    for _ in range(options.steps):
        logits = torch.randn(options.batch, VOCAB_SIZE, generator=generator)
        began = time.perf_counter()
        logits.argmax(dim=1)
        plain_times.append(time.perf_counter() - began)
        began = time.perf_counter()
        processor.apply(logits, listed)
        times.append(time.perf_counter() - began)
        logits[:, EOS] = float("-inf")
        finite = logits.isfinite().any(dim=1)
        ids = logits.argmax(dim=1).tolist()
        for row, token_id in enumerate(ids):
            if finite[row]:
                rows.token_ids[row, rows.num_tokens[row]] = token_id
                rows.num_tokens[row] += 1
    print(
        f"batch {options.batch}, vocabulary {VOCAB_SIZE}: "
        f"median {1e3 * statistics.median(times):.2f} ms a step, "
        f"95th percentile {1e3 * float(np.quantile(times, 0.95)):.2f} ms "
        f"(argmax alone: {1e3 * statistics.median(plain_times):.2f} ms)"
    )


def measure_end_to_end(batch: int, num_tokens: int, rounds: int) -> None:
    built = build_engine(EngineConfig(device="cpu", max_num_seqs=batch), lambda *_: None)
    source = resolve_model(EMBEDDED_MODEL)
    compiler = GrammarCompiler(
        lambda: read_vocabulary(source, built.vocab_size), built.eos_token_ids
    )
    gate, compiled = GrammarGate(compiler.compile), threading.Semaphore(0)
    gate.set_wake(compiled.release)
    limits = SchedulerLimits(
        *(batch, built.max_num_batched_tokens, built.max_model_len),
        *(built.vocab_size, built.eos_token_ids),
    )
    manager = KVManager(built.num_blocks, built.block_size, enable_prefix_caching=False)
    core = EngineCore(Scheduler(limits, manager), built.runner, epoch=1, grammars=gate)
    numbers = itertools.count(1)

    def run(num_constrained: int) -> float:
        """Output tokens per second."""
        for seed in range(batch):
            wanted = StructuredOutput("json_schema", LONG_SCHEMA)
            sampling = SamplingParams(
                num_tokens,
                seed=seed,
                ignore_eos=seed >= num_constrained,
                structured_output=wanted if seed < num_constrained else None,
            )
            prompt = pack_ids([1, *range(500 + seed, 531 + seed)])
            core.add(1, Add(next(numbers), 1, prompt, 0, sampling), 0.0)
        began, num_done, num_drawn = time.perf_counter(), 0, 0
        while num_done < batch:
            if not core.has_work():
                compiled.acquire()
            for output in core.step(lambda: None).values():
                num_drawn += len(unpack_ids(output.token_ids))
                num_done += len(output.finished)
        assert num_drawn == batch * num_tokens, (num_drawn, "an answer ended early")
        return num_drawn / (time.perf_counter() - began)

    run(batch // 2)  # compiles the grammar, and pays for first calls
    rates: dict[int, list[float]] = {0: [], batch // 2: []}
    for _ in range(rounds):
        for num_constrained, measured in rates.items():
            measured.append(run(num_constrained))
    gate.close()
    plain, mixed = (statistics.median(measured) for measured in rates.values())
    print(
        f"{built.model_name}, {built.dtype}, batch {batch}, {num_tokens} tokens each: "
        f"{plain:.1f} tokens/s plain, {mixed:.1f} with half of them constrained: "
        f"ratio {mixed / plain:.3f} (rounds: "
        + ", ".join(f"{b / a:.3f}" for a, b in zip(*rates.values(), strict=True))
        + ")"
    )


if __name__ == "__main__":
    main()
