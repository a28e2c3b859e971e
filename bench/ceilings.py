"""What this machine reaches at best, and what that makes of each workload for a model.

    python bench/ceilings.py [--threads 1,2] [--model smollm2-135m-instruct]
        [--weights bfloat16,packed]

Reading speed is measured over as many bytes as the model has weights, so that a cache which
holds them counts as it would for a step. Products are those of the instructions that
kernels/cpu's library for this CPU is built with (bench/ceilings.cpp says how); of AMX tiles
nothing is measured. bench/floors.py says what follows for the workloads of bench/peers.py.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.floors import FLOORS, WEIGHTS, Ceilings, ModelReads, floors
from bench.workloads import WORKLOADS
from kernels.cpu.build import FLAGS, build, find_compiler
from kernels.cpu.library import supported_variants

SOURCE = Path(__file__).with_suffix(".cpp")
TRIES = 200
"""Of a millisecond or a few each: on a machine that others use, the best of many is what the
machine can."""


@dataclass(frozen=True, slots=True)
class Meter:
    """The built program."""

    program: Path

    @classmethod
    def build(cls, directory: Path) -> Meter:
        """Raises kernels.cpu.build.BuildError where there is no compiler."""
        build()
        best = supported_variants()[-1]
        program = directory / "ceilings"
        command = [*find_compiler(), *FLAGS, *best.flags, "-pthread", str(SOURCE)]
        command += ["-o", str(program)]
        subprocess.run(command, check=True)
        return cls(program)

    def measure(self, threads: int, num_bytes: int, tries: int = TRIES) -> Ceilings:
        """num_bytes: about how many all threads together read, round and round."""
        command = [str(self.program), str(threads), str(num_bytes), str(tries)]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE)
        return Ceilings(threads=threads, **json.loads(done.stdout))


def main() -> None:
    cores = len(os.sched_getaffinity(0))
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", help="Counts, with commas between. Default: 1 and all cores.")
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--weights", default="bfloat16", help=f"Of {', '.join(WEIGHTS)}.")
    parser.add_argument("--tries", type=int, default=TRIES)
    options = parser.parse_args()
    counts = [int(count) for count in (options.threads or f"1,{cores}").split(",")]
    with tempfile.TemporaryDirectory() as directory:
        meter = Meter.build(Path(directory))
        for weights in options.weights.split(","):
            model = ModelReads.of(options.model, weights)
            measured = [
                meter.measure(threads, model.weight_bytes, options.tries)
                for threads in dict.fromkeys(counts)
            ]
            print(f"{options.model}, {weights}:", *measured, "", _table(model, measured), sep="\n")


def _table(model: ModelReads, measured: list[Ceilings]) -> str:
    """Markdown: the floor of each figure at each number of threads."""
    heads = [f"threads: {ceilings.threads}" for ceilings in measured]
    lines = [
        f"| workload | floor | {' | '.join(heads)} |",
        "| --- | --- |" + " ---: |" * len(heads),
    ]
    for workload in WORKLOADS:
        of_threads = [floors(model, ceilings, workload) for ceilings in measured]
        for figure in FLOORS:
            cells = [f"{found[figure]:.1f}" for found in of_threads if figure in found]
            if cells:
                lines.append(f"| {workload} | {figure} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
