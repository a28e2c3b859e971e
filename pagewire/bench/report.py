"""A run's report: one JSON document, and what is printed of it."""

from __future__ import annotations

import datetime
import os
import platform
from dataclasses import dataclass
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from pagewire.bench.statistics import (
    DEFINITIONS,
    ENOUGH_FOR_P99,
    PERCENTILES,
    Objectives,
    output_rate,
    summarize,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pagewire.bench.record import Record

LATENCIES = {
    "ttft_s": "TTFT",
    "tpot_s": "TPOT",
    "itl_chunk_s": "ITL by chunk",
    "itl_token_s": "ITL by token",
    "e2e_s": "E2E",
}


@dataclass(frozen=True, slots=True)
class Run:
    """One measured run: what was asked of whom, and what came back."""

    settings: Mapping[str, Any]
    """All that makes the run again: target, workload, load, seed."""
    records: Sequence[Record]
    objectives: Objectives
    client_cpu_s: float
    """CPU time that the client itself took while measuring."""


def make_report(run: Run) -> dict[str, Any]:
    """JSON values only; times in seconds."""
    summary = summarize(run.records, run.objectives)
    duration = summary["duration_s"]
    return {
        "made_at": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "pagewire": version("pagewire"),
        "machine": {
            "platform": platform.platform(),
            "processor": _processor(),
            "cores": len(os.sched_getaffinity(0)),
        },
        "settings": dict(run.settings),
        "summary": summary,
        "client_cpu": run.client_cpu_s / duration if duration else 0.0,
        "output_rate": output_rate(run.records),
        "definitions": DEFINITIONS,
    }


def render_text(report: Mapping[str, Any]) -> str:
    summary = report["summary"]
    rates = (
        f"{summary['duration_s']:.2f} s: {summary['output_tokens_per_s']:.1f} output tokens/s, "
        f"{summary['prompt_tokens_per_s']:.1f} prompt tokens/s, "
        f"{summary['total_tokens_per_s']:.1f} total tokens/s, "
        f"{summary['requests_per_s']:.2f} requests/s"
    )
    tokens = (
        f"{summary['prompt_tokens']} prompt tokens{_hits(summary)}, "
        f"{summary['output_tokens']} output tokens{_coalescing(summary)}; "
        f"client CPU {100 * report['client_cpu']:.0f}% of a core"
    )
    lines = [_counts(summary), rates, tokens]
    if summary["goodput_per_s"] is not None:
        bounds = ", ".join(f"{k} <= {1e3 * v:g} ms" for k, v in summary["objectives_s"].items())
        lines.append(f"goodput {summary['goodput_per_s']:.2f} requests/s ({bounds})")
    lines += ["", *_latency_table(summary)]
    return "\n".join(lines) + "\n"


def _counts(summary: Mapping[str, Any]) -> str:
    parts = [f"{summary['successful']} of {summary['requests']} requests successful"]
    for kind in ("rejected", "errors"):
        if summary[kind]:
            codes = ", ".join(f"{code} {count}" for code, count in summary[kind].items())
            parts.append(f"{kind}: {codes}")
    if summary["unfinished"]:
        parts.append(f"{summary['unfinished']} unfinished")
    if summary["first_error"]:
        parts.append(f"first failure: {' '.join(summary['first_error'].split())[:200]}")
    return "; ".join(parts)


def _hits(summary: Mapping[str, Any]) -> str:
    rate = summary["cache_hit_rate"]
    return "" if rate is None else f" ({100 * rate:.0f}% from the prefix cache)"


def _coalescing(summary: Mapping[str, Any]) -> str:
    share = summary["tokens_per_chunk"]
    return "" if share is None else f" ({share:.2f} a message)"


def _latency_table(summary: Mapping[str, Any]) -> list[str]:
    columns = ("mean", *(f"p{q}" for q in PERCENTILES), "max")
    lines = [f"{'ms':14}" + "".join(f"{name:>10}" for name in columns) + f"{'values':>10}"]
    doubtful = False
    for key, name in LATENCIES.items():
        figures = summary[key]
        if figures is None:
            continue
        cells = []
        for column in columns:
            few = column == "p99" and figures["count"] < ENOUGH_FOR_P99
            doubtful |= few
            cells.append(f"{'~' if few else ''}{1e3 * figures[column]:.2f}".rjust(10))
        lines.append(f"{name:14}" + "".join(cells) + f"{figures['count']:>10}")
    if doubtful:
        lines.append(f"~ of fewer than {ENOUGH_FOR_P99:,} values")
    return lines


def _processor() -> str:
    """The CPU's name, where the system tells it."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            for line in lines:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor()
