"""What guessing ahead gains, on the CPU: the embedded model, with and without, in turns.

    python bench/speculation.py [--rounds 5] [--tokens 160] [--streams 1,2,4,8,16]
                                [--temperature 0] [--threads 2] [--show]

One engine core in this process. Each text kind has prompts whose answers repeat them
(an edited function, a summary that quotes) or do not (questions, stories). Every round runs
the same requests without speculation and with it; reported is the ratio of output tokens per
second of CPU time, all threads together, as other processes would be in any other time, and
of wall time beside it. Medians over rounds.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path

# As the engine's process does it.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from engine_core.core import EngineCore
from engine_core.engine_builder import build_engine
from engine_core.kv.manager import KVManager
from engine_core.sched.scheduler import Scheduler, SchedulerLimits
from pagewire.config import EMBEDDED_MODEL, EngineConfig
from pagewire.model_source import resolve_model
from pagewire.types import SamplingParams
from pagewire.wire.codec import pack_ids, unpack_counts, unpack_ids, unpack_request_ids
from pagewire.wire.messages import Add
from tokenizer_svc.loader import load_tokenizer

ANSWER = "<answer>"
"""What follows it begins the answer: so small a model paraphrases else."""
CODE = """class Inventory:
    def __init__(self, name, items=None):
        self.name = name
        self.items = items or {}

    def add_item(self, key, count, price):
        if key in self.items:
            self.items[key]["count"] += count
        else:
            self.items[key] = {"count": count, "price": price}
        return self.items[key]

    def remove_item(self, key, count):
        if key not in self.items:
            raise KeyError(key)
        self.items[key]["count"] -= count
        if self.items[key]["count"] <= 0:
            del self.items[key]

    def total_value(self):
        return sum(item["count"] * item["price"] for item in self.items.values())
"""
REPORT = """The harbour board met on Monday to discuss the new ferry line. "We cannot wait for \
another winter before the pier is repaired," said the harbour master, Ana Lindqvist. The \
engineers presented three plans, of which the cheapest costs 2.4 million crowns and takes \
eleven months. "The cheapest plan is not the safest plan," said the chief engineer, Per Holm, \
who favours the second one. The fishermen's union asked that the eastern quay stay open during \
the works. "Without the eastern quay there is no autumn season for us," said its speaker, \
Marta Nilsen. The board will decide in March."""
TEXTS = {
    "code edit": (
        f"Rename the class Inventory to Stock in this code, and repeat the whole code:\n{CODE}",
        f"Add a docstring to the method total_value. Repeat the whole code:\n{CODE}",
        f"Copy this code without any change:\n{CODE}",
    ),
    "summary with quotes": tuple(
        f"{REPORT}\n\n{question}{ANSWER}{begin}"
        for question, begin in (
            (
                "Summarize the report above, with all quotations.",
                'The board met on Monday. Ana Lindqvist said: "We cannot wait',
            ),
            ("Which sentences of it hold a quotation?", 'These:\n\n1. "We cannot wait'),
            ("What did Per Holm say, word for word?", 'He said: "The cheapest plan is'),
        )
    ),
    "question": (
        "Why is the sky blue?",
        "What should one look at when buying a used bicycle?",
        "Explain to a child how a lock on a canal works.",
        "What is the difference between a virus and a bacterium?",
    ),
    "story": (
        "Write a story about a lighthouse keeper who finds a letter.",
        "Write a scene in which two old friends meet at a railway station.",
        "Tell a tale of a fox that learns to swim.",
        "Write a poem about the first snow.",
    ),
}


@dataclass(frozen=True, slots=True)
class Run:
    num_tokens: int
    cpu_s: float
    wall_s: float
    ids: list[list[int]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=160)
    parser.add_argument("--streams", default="1,2,4,8,16")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--num-speculative-tokens", type=int, default=None)
    parser.add_argument("--prompt-lookup-min", type=int, default=None)
    parser.add_argument("--prompt-lookup-max", type=int, default=None)
    parser.add_argument("--texts", default="", help="Some of them, with commas. [all]")
    parser.add_argument("--show", action="store_true", help="The answers.")
    options = parser.parse_args()
    bench = _Bench(options)
    streams = [int(number) for number in options.streams.split(",")]
    print(bench.about)
    print(
        f"{'text':20} {'streams':>7} {'CPU':>6} {'wall':>6} {'accepted':>9} {'drafted':>8}  rounds"
    )
    for kind in options.texts.split(",") if options.texts else TEXTS:
        for num in streams:
            bench.compare(kind, num, options.rounds)


class _Bench:
    def __init__(self, options: argparse.Namespace) -> None:
        chosen = {
            name: value
            for name in ("num_speculative_tokens", "prompt_lookup_min", "prompt_lookup_max")
            if (value := getattr(options, name)) is not None
        }
        config = EngineConfig(
            device="cpu",
            dtype=options.dtype,
            cpu_threads=options.threads,
            max_num_seqs=32,
            speculative_method="ngram",
            **chosen,
        )
        built = build_engine(config, lambda *_: None)
        assert built.speculation is not None
        self._speculation = built.speculation
        limits = SchedulerLimits(
            *(config.max_num_seqs, built.max_num_batched_tokens, built.max_model_len),
            *(built.vocab_size, built.eos_token_ids),
        )
        self._scheduler = Scheduler(limits, KVManager(built.num_blocks, built.block_size))
        self._core = EngineCore(self._scheduler, built.runner, epoch=1)
        self._loaded = load_tokenizer(resolve_model(EMBEDDED_MODEL).path)
        self._numbers = itertools.count(1)
        self._tokens: int = options.tokens
        self._temperature: float = options.temperature
        self._show: bool = options.show
        self.about = (
            f"{built.model_name}, {built.dtype}, {options.tokens} tokens each, temperature "
            f"{options.temperature}; off beyond {built.speculation.most_decodes} streams"
        )

    def compare(self, kind: str, num_streams: int, rounds: int) -> None:
        prompts = list(
            itertools.islice(itertools.cycle(TEXTS[kind]), max(num_streams, len(TEXTS[kind])))
        )
        speculation = self._speculation
        self._run(prompts, num_streams)  # fills the prefix cache, and pays for first calls
        before = (speculation.num_accepted_tokens, speculation.num_draft_tokens)
        cpu, wall, same = [], [], True
        for _ in range(rounds):
            off = self._run(prompts, num_streams)
            self._scheduler.speculation = speculation
            on = self._run(prompts, num_streams)
            self._scheduler.speculation = None
            cpu.append((on.num_tokens / on.cpu_s) / (off.num_tokens / off.cpu_s))
            wall.append((on.num_tokens / on.wall_s) / (off.num_tokens / off.wall_s))
            same &= on.ids == off.ids
        accepted = speculation.num_accepted_tokens - before[0]
        drafted = speculation.num_draft_tokens - before[1]
        print(
            f"{kind:20} {num_streams:7} {statistics.median(cpu):6.2f} "
            f"{statistics.median(wall):6.2f} {accepted / max(1, drafted):8.0%} "
            f"{drafted / rounds / on.num_tokens:8.2f}  "
            + " ".join(f"{ratio:.2f}" for ratio in cpu)
            + ("" if same else "  (texts differ)"),
            flush=True,
        )
        if self._show:
            for ids in on.ids[: len(TEXTS[kind])]:
                print("   ", repr(self._loaded.tokenizer.decode(ids)))

    def _run(self, prompts: list[str], num_streams: int) -> Run:
        """So many of the prompts at a time, until all are answered."""
        waiting, ids = list(enumerate(map(self._ids, prompts))), {}
        request_of: dict[int, int] = {}
        cpu, wall, num_running = time.process_time(), time.perf_counter(), 0
        while waiting or num_running:
            while waiting and num_running < num_streams:
                index, prompt = waiting.pop(0)
                number = next(self._numbers)
                request_of[number] = index
                ids[index] = []
                sampling = SamplingParams(self._tokens, temperature=self._temperature, seed=index)
                self._core.add(1, Add(number, 1, pack_ids(prompt), 0, sampling), 0.0)
                num_running += 1
            for output in self._core.step(lambda: None).values():
                new, end = unpack_ids(output.token_ids), 0
                for number, count in zip(
                    unpack_request_ids(output.request_ids),
                    unpack_counts(output.counts),
                    strict=True,
                ):
                    begin, end = end, end + count
                    ids[request_of[number]] += new[begin:end]
                num_running -= len(output.finished)
        return Run(
            sum(map(len, ids.values())),
            time.process_time() - cpu,
            time.perf_counter() - wall,
            [ids[index] for index in range(len(prompts))],
        )

    def _ids(self, prompt: str) -> list[int]:
        prompt, _, answer = prompt.partition(ANSWER)
        text = (
            "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging "
            f"Face<|im_end|>\n<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n{answer}"
        )
        ids: list[int] = self._loaded.tokenizer.encode(text, add_special_tokens=False).ids
        return ids


if __name__ == "__main__":
    main()
