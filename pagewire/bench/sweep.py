"""The report of one workload at several concurrencies, one run after the other."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pagewire.bench.plot import Line, plot
from pagewire.bench.report import make_report, render_text
from pagewire.bench.statistics import ENOUGH_FOR_P99

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pagewire.bench.report import Run

_OF_ONE_RUN = ("summary", "client_cpu", "output_rate")


def make_sweep_report(runs: Sequence[Run]) -> dict[str, Any]:
    """What make_report() says of all runs alike; `runs`, with what it says of each; and `sweep`,
    a row of figures for each. Settings of the runs differ in their concurrency only, which
    ascends."""
    reports = [make_report(run) for run in runs]
    values = [report["settings"]["concurrency"] for report in reports]
    summaries = [report["summary"] for report in reports]
    itl = _itl_of_all(summaries)
    return {
        **{name: part for name, part in reports[0].items() if name not in _OF_ONE_RUN},
        "settings": {**reports[0]["settings"], "concurrency": values},
        "sweep": {
            "itl": itl,
            "rows": [_row(*of, itl) for of in zip(values, summaries, strict=True)],
        },
        "runs": [
            {"concurrency": value, **{name: report[name] for name in _OF_ONE_RUN}}
            for value, report in zip(values, reports, strict=True)
        ],
    }


def render_sweep_table(report: Mapping[str, Any]) -> str:
    """A line for each concurrency."""
    rows = report["sweep"]["rows"]
    itl = "ITL" if report["sweep"]["itl"] == "itl_token_s" else "ITL by chunk"
    columns = [
        ("concurrency", [f"{row['concurrency']}" for row in rows]),
        ("requests/s", [f"{row['requests_per_s']:.2f}" for row in rows]),
        ("output tokens/s", [f"{row['output_tokens_per_s']:.1f}" for row in rows]),
        ("TTFT p50 ms", [_ms(row["ttft_p50_s"]) for row in rows]),
        ("TTFT p99 ms", [_p99(row, "ttft") for row in rows]),
        (f"{itl} p99 ms", [_p99(row, "itl") for row in rows]),
        ("rejected", [f"{row['rejected']}" for row in rows]),
        ("errors", [f"{row['errors']}" for row in rows]),
    ]
    if _has_goodput(report):
        columns.insert(3, ("goodput/s", [f"{row['goodput_per_s']:.2f}" for row in rows]))
    widths = [max(map(len, (name, *cells))) for name, cells in columns]
    lines = [
        "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True))
        for line in zip(*((name, *cells) for name, cells in columns), strict=True)
    ]
    if any("~" in line for line in lines):
        lines.append(f"~ of fewer than {ENOUGH_FOR_P99:,} values")
    return "\n".join(lines) + "\n"


def render_sweep_text(report: Mapping[str, Any]) -> str:
    parts = [f"concurrency {run['concurrency']}\n{render_text(run)}" for run in report["runs"]]
    return "\n".join([render_sweep_table(report), *parts])


def sweep_plots(report: Mapping[str, Any]) -> list[str]:
    """<svg> elements: throughput, goodput where there are objectives, and TTFT."""
    rows = report["sweep"]["rows"]

    def line(name: str, figure: str, scale: float = 1.0) -> Line:
        points = [
            (row["concurrency"], row[figure] * scale) for row in rows if row[figure] is not None
        ]
        return Line(name, points, marked=True)

    throughput = [line("output", "output_tokens_per_s")]
    ttft = [line("p50", "ttft_p50_s", 1e3), line("p99", "ttft_p99_s", 1e3)]
    plots = [plot("Output tokens/s against concurrency", "concurrency", "tokens/s", throughput)]
    if _has_goodput(report):
        good = [line("goodput", "goodput_per_s")]
        plots.append(plot("Goodput against concurrency", "concurrency", "requests/s", good))
    plots.append(plot("TTFT p50/p99 against concurrency", "concurrency", "ms", ttft))
    return plots


def _itl_of_all(summaries: Sequence[Mapping[str, Any]]) -> str:
    """The finer of the two only if every run with gaps has it: rows should compare."""
    with_gaps = [summary for summary in summaries if summary["itl_chunk_s"] is not None]
    by_token = all(summary["itl_token_s"] is not None for summary in with_gaps)
    return "itl_token_s" if by_token else "itl_chunk_s"


def _row(concurrency: int, summary: Mapping[str, Any], itl: str) -> dict[str, Any]:
    ttft, gaps = summary["ttft_s"] or {}, summary[itl] or {}
    return {
        "concurrency": concurrency,
        "requests_per_s": summary["requests_per_s"],
        "output_tokens_per_s": summary["output_tokens_per_s"],
        "goodput_per_s": summary["goodput_per_s"],
        "ttft_p50_s": ttft.get("p50"),
        "ttft_p99_s": ttft.get("p99"),
        "ttft_count": ttft.get("count", 0),
        "itl_p99_s": gaps.get("p99"),
        "itl_count": gaps.get("count", 0),
        "rejected": sum(summary["rejected"].values()),
        "errors": sum(summary["errors"].values()),
        "unfinished": summary["unfinished"],
    }


def _has_goodput(report: Mapping[str, Any]) -> bool:
    return any(row["goodput_per_s"] is not None for row in report["sweep"]["rows"])


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1e3 * seconds:.2f}"


def _p99(row: Mapping[str, Any], of: str) -> str:
    few = 0 < row[f"{of}_count"] < ENOUGH_FOR_P99
    return ("~" if few else "") + _ms(row[f"{of}_p99_s"])
