"""The closed-loop loads that bench/peers.py asks of every server, and how much they are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pagewire.bench.workload import Lengths

if TYPE_CHECKING:
    from collections.abc import Callable

WORKLOADS = {
    "A": ("--num-requests=12", "--concurrency=1", "--input-len=112:144", "--output-len=128"),
    "B": ("--num-requests=40", "--concurrency=8", "--input-len=112:144", "--output-len=128"),
    "C": ("--num-requests=128", "--concurrency=32", "--input-len=32:512", "--output-len=32:256"),
    "D": (
        *("--workload=shared-prefix", "--prefix-len=512", "--input-len=24:40"),
        *("--num-requests=64", "--concurrency=16", "--output-len=64"),
    ),
    "E": ("--num-requests=64", "--concurrency=64", "--input-len=650:750", "--output-len=1"),
}
"""Flags of `pagewire bench serve`. One stream; eight; 32 of mixed lengths; 16 with a common
prefix; prompts only."""


def flags(workload: str, fraction: float = 1.0) -> list[str]:
    """With that fraction of its requests, but at least as many as run at a time."""
    values = _values(workload) | {"--num-requests": str(_num_requests(workload, fraction))}
    return [f"{name}={value}" for name, value in values.items()]


def seed(workload: str, turn: int) -> int:
    """Of its prompts in the turn-th run, from 1. Two workloads never share one: from the same seed
    their prompts would begin alike, and the later one would find the other's in prefix caches."""
    return turn * len(WORKLOADS) + list(WORKLOADS).index(workload)


@dataclass(frozen=True, slots=True)
class Size:
    """What a workload's requests are in the mean, over all that may be drawn."""

    concurrency: int
    num_requests: int
    shared: int
    """Tokens with which all prompts begin."""
    prompt: float
    """Tokens of a prompt after the shared ones."""
    prompt_pairs: float
    """(query, key) pairs among these tokens, each with itself and those before it."""
    output: float
    output_pairs: float
    """(query, key) pairs of the output tokens that are computed, all but the last, with each
    other."""


def size(workload: str, fraction: float = 1.0) -> Size:
    """With that fraction of its requests, as flags() has it."""
    values = _values(workload)
    prompt, output = Lengths.parse(values["--input-len"]), Lengths.parse(values["--output-len"])
    return Size(
        concurrency=int(values["--concurrency"]),
        num_requests=_num_requests(workload, fraction),
        shared=int(values.get("--prefix-len", 0)),
        prompt=_mean(prompt, float),
        prompt_pairs=_mean(prompt, _pairs),
        output=_mean(output, float),
        output_pairs=_mean(output, lambda count: _pairs(count - 1)),
    )


def _pairs(count: int) -> float:
    return count * (count + 1) / 2


def _mean(lengths: Lengths, of: Callable[[int], float]) -> float:
    counts = range(lengths.low, lengths.high + 1)
    return sum(map(of, counts)) / len(counts)


def _num_requests(workload: str, fraction: float) -> int:
    values = _values(workload)
    return max(int(values["--concurrency"]), round(int(values["--num-requests"]) * fraction))


def _values(workload: str) -> dict[str, str]:
    return dict(flag.split("=") for flag in WORKLOADS[workload])
