"""What bench/peers.py measured of several servers, side by side."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bench.floors import fraction

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

RSS = "RSS MiB"
FAILED = "failed requests"
OUTPUT = "output tokens"
"""Of the requests that succeeded. All servers are asked for as many."""
FIGURES = (
    *("output tok/s", "prompt tok/s", "TTFT p50 ms", "TTFT p99 ms", "ITL p50 ms", "ITL p99 ms"),
    *(RSS, FAILED, OUTPUT),
)
COUNTS = (FAILED, OUTPUT)


def figures_of(summary: Mapping[str, Any], rss_mib: float) -> dict[str, float | None]:
    """Of a report's summary, by the names of FIGURES: rates and latencies of the requests that
    succeeded, None for a latency that none of them has. rss_mib: of the server after them."""

    def ms(latency: str, percentile: str) -> float | None:
        values = summary[latency]
        return None if values is None else 1e3 * values[percentile]

    return {
        "output tok/s": summary["output_tokens_per_s"],
        "prompt tok/s": summary["prompt_tokens_per_s"],
        "TTFT p50 ms": ms("ttft_s", "p50"),
        "TTFT p99 ms": ms("ttft_s", "p99"),
        "ITL p50 ms": ms("itl_chunk_s", "p50"),
        "ITL p99 ms": ms("itl_chunk_s", "p99"),
        RSS: rss_mib,
        FAILED: summary["requests"] - summary["successful"],
        OUTPUT: summary["output_tokens"],
    }


@dataclass(frozen=True, slots=True)
class Comparison:
    """Of the first of the named servers with each other one, and of all with their floors."""

    names: Sequence[str]
    results: Sequence[Mapping[str, Any]]
    """Of each run of a workload: its server, workload and figures."""
    floors: Mapping[str, Mapping[str, Mapping[str, float]]]
    """By server, workload and figure; of servers and figures that have one."""

    def figures(self) -> dict[str, dict[str, dict[str, float]]]:
        """By workload, figure and server: medians over the runs, of failed requests the sum. What
        was not measured is left out."""
        return {
            workload: {
                figure: {
                    name: value
                    for name in self.names
                    if (value := self._value(name, workload, figure)) is not None
                }
                for figure in FIGURES
            }
            for workload in dict.fromkeys(result["workload"] for result in self.results)
        }

    def table(self) -> str:
        """Markdown: a row for each workload and figure, with ratios to the other servers and
        fractions of the floors. Failed requests have a row where there are any, output tokens
        where a server gave other numbers of them."""
        ours, *peers = self.names
        bounded = [name for name in self.names if name in self.floors]
        heads = [
            *self.names,
            *(f"{ours} / {peer}" for peer in peers),
            *(f"{name}, of its floor" for name in bounded),
        ]
        lines = [
            "| workload | figure | " + " | ".join(heads) + " |",
            "| --- | --- |" + " ---: |" * len(heads),
        ]
        for workload, figures in self.figures().items():
            for figure, values in figures.items():
                if (
                    not values
                    or (figure == FAILED and not any(values.values()))
                    or (figure == OUTPUT and len(set(values.values())) == 1)
                ):
                    continue
                form = ".0f" if figure in COUNTS else ".1f"
                cells = [format(values[n], form) if n in values else "-" for n in self.names]
                for peer in peers:
                    known = ours in values and values.get(peer) and figure not in COUNTS
                    cells.append(f"{values[ours] / values[peer]:.2f}" if known else "-")
                for name in bounded:
                    floor = self.floors[name][workload].get(figure)
                    # No time at all passes where most tokens come together.
                    value = values.get(name)
                    cells.append(
                        f"{fraction(figure, value, floor):.2f}" if value and floor else "-"
                    )
                lines.append(f"| {workload} | {figure} | " + " | ".join(cells) + " |")
        return "\n".join(lines)

    def _value(self, server: str, workload: str, figure: str) -> float | None:
        values: list[float] = [
            result["figures"][figure]
            for result in self.results
            if (result["server"], result["workload"]) == (server, workload)
            and result["figures"][figure] is not None
        ]
        if not values:
            return None
        return sum(values) if figure == FAILED else statistics.median(values)
