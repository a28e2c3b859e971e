"""What structured output costs a step, on the CPU, without a model.

    python bench/structured_output.py [--batch 32] [--steps 50]

Every row follows a JSON schema over the embedded model's vocabulary, and draws
uniformly from what is allowed. Timed is the logits processor: grammar, mask and
the logits [batch, vocabulary] that it is put on.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from engine_core.grammar.compiler import GrammarCompiler
from engine_core.grammar.vocabulary import read_vocabulary
from engine_core.runner.rows import Rows
from engine_core.runner.structured import StructuredOutputs
from engine_core.sched.plan import NewSeq, StepPlan
from pagewire.config import EMBEDDED_MODEL
from pagewire.model_source import resolve_model
from pagewire.types import SamplingParams, StructuredOutput

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


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--steps", type=int, default=50)
    options = parser.parse_args()
    source = resolve_model(EMBEDDED_MODEL)
    compiler = GrammarCompiler(lambda: read_vocabulary(source, VOCAB_SIZE), (EOS,))
    for name in ("first constraint, vocabulary and all", "next constraint"):
        began = time.perf_counter()
        # Another text each time, as the same one would not be compiled in a server.
        grammar = compiler.compile(StructuredOutput("json_schema", SCHEMA + " " * len(name)))
        print(f"{name}: compiled in {1e3 * (time.perf_counter() - began):.1f} ms")

    rows = Rows(options.batch, options.steps + 4, 16)
    processor = StructuredOutputs(rows)
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


if __name__ == "__main__":
    main()
