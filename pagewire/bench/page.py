"""The report as one HTML page that needs nothing else."""

from __future__ import annotations

import html
import json
from typing import TYPE_CHECKING, Any

from pagewire.bench.plot import Line, distribution, plot
from pagewire.bench.report import LATENCIES, render_text
from pagewire.bench.statistics import token_gaps
from pagewire.bench.sweep import render_sweep_table, sweep_plots

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pagewire.bench.record import Record

_STYLE = """
:root { color-scheme: light dark; font: 15px/1.5 system-ui, sans-serif; }
body { max-width: 76rem; margin: 2rem auto; padding: 0 1rem; }
pre { overflow-x: auto; font-size: 13px; }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(24rem, 1fr)); gap: 1.5rem; }
svg { width: 100%; height: auto; }
th { text-align: left; vertical-align: top; padding-right: 1rem; font-weight: 600; }
"""


def render_page(title: str, report: Mapping[str, Any], records: Sequence[Record]) -> str:
    """Of make_report()'s."""
    return _page(title, report, _section(report, records))


def render_sweep_page(
    title: str, report: Mapping[str, Any], records: Sequence[Sequence[Record]]
) -> str:
    """Of make_sweep_report()'s; `records` are of each run."""
    parts = [
        f"<h2>Concurrency {run['concurrency']}</h2>{_section(run, of_run)}"
        for run, of_run in zip(report["runs"], records, strict=True)
    ]
    table = html.escape(render_sweep_table(report))
    overview = f'<pre>{table}</pre><div class="plots">{"".join(sweep_plots(report))}</div>'
    return _page(title, report, overview + "".join(parts))


def _section(run: Mapping[str, Any], records: Sequence[Record]) -> str:
    return (
        f"<pre>{html.escape(render_text(run))}</pre>"
        f'<div class="plots">{"".join(_plots(run, records))}</div>'
    )


def _page(title: str, report: Mapping[str, Any], content: str) -> str:
    settings = {name: value for name, value in report["settings"].items() if value is not None}
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f"<title>{html.escape(title)}</title><style>{_STYLE}</style></head><body>"
        f"<h1>{html.escape(title)}</h1>"
        f"<p>{html.escape(report['made_at'])}, pagewire {html.escape(report['pagewire'])}, "
        f"{html.escape(report['machine']['processor'])}, {report['machine']['cores']} cores</p>"
        f"{content}"
        f"<h2>Settings</h2>{_table(settings)}"
        f"<h2>Definitions</h2>{_table(report['definitions'])}"
        "</body></html>\n"
    )


def _plots(report: Mapping[str, Any], records: Sequence[Record]) -> list[str]:
    good = [record for record in records if record.ok]
    ms = 1e3
    ttft = distribution([r.ttft for r in good if r.ttft is not None], ms)
    tpot = distribution([r.tpot for r in good if r.tpot is not None], ms)
    e2e = distribution([r.e2e for r in good])
    gaps = [
        Line(LATENCIES["itl_chunk_s"], distribution([g for r in good for g in r.chunk_gaps()], ms)),
        Line(LATENCIES["itl_token_s"], distribution(token_gaps(good), ms)),
    ]
    began = min((record.sent_at for record in records), default=0.0)
    first = [(r.sent_at - began, r.ttft * ms) for r in good if r.ttft is not None]
    return [
        plot("Time to first token", "ms", "% of requests", [Line("TTFT", ttft)]),
        plot("Inter-token latency", "ms", "% of gaps", gaps),
        plot("Time per output token", "ms", "% of requests", [Line("TPOT", tpot)]),
        plot("End to end", "s", "% of requests", [Line("E2E", e2e)]),
        plot("Output", "s", "tokens/s", [Line("output", report["output_rate"])]),
        plot("TTFT over the run", "s", "ms", [Line("TTFT", sorted(first))]),
    ]


def _table(values: Mapping[str, Any]) -> str:
    rows = (
        f"<tr><th>{html.escape(name)}</th>"
        f"<td>{html.escape(value if isinstance(value, str) else json.dumps(value))}</td></tr>"
        for name, value in values.items()
    )
    return f"<table>{''.join(rows)}</table>"
