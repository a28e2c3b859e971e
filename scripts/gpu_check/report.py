"""One table and one JSON file of what all sections have found."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from scripts.gpu_check.outcome import BATCHING, COMPILED, ENGINE, Line
from scripts.gpu_check.sections import BY_NAME

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from scripts.gpu_check.runs import Run

_RIVALS = {"transformers_batching": BATCHING, "transformers_compiled": COMPILED}


def compare_throughput(runs: Mapping[str, Run]) -> list[Line]:
    """The engine's tokens a second over each rival's, where both are there."""
    ours = _value(runs.get("engine"), ENGINE)
    lines = []
    for section, what in _RIVALS.items():
        theirs = _value(runs.get(section), what)
        if ours is not None and theirs is not None:
            name = what.removesuffix(", tokens a second")
            lines.append(Line(f"engine over {name}", ours, "tokens/s", ratio=ours / theirs))
    return lines


def exit_status(runs: Mapping[str, Run]) -> int:
    """1 for wrong results, 2 where something of ours was not measured, 0 otherwise: a missed
    goal and a rival that does not run are told only."""
    for name, run in runs.items():
        is_wrong = run.outcome is not None and bool(run.outcome.failures)
        if is_wrong or (run.outcome is None and BY_NAME[name].is_parity):
            return 1
    if any(run.outcome is None and not BY_NAME[name].is_rival for name, run in runs.items()):
        return 2
    return 0


def table(runs: Mapping[str, Run], seconds: float) -> str:
    rows = [("section", "what", "measured", "ratio", "goal", "")]
    for name, run in runs.items():
        lines = run.outcome.lines if run.outcome is not None else []
        rows += [(name, *_cells(line)) for line in lines]
    rows += [("tokens/s", *_cells(line)) for line in compare_throughput(runs)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    text = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    for name, run in runs.items():
        if run.outcome is None:
            text.append(f"NOT FINISHED {name}: {run.reason}")
        else:
            text += [f"WRONG {name}: {failure}" for failure in run.outcome.failures]
            text += [f"note {name}: {note}" for note in run.outcome.notes]
    spent = ", ".join(f"{name} {run.seconds:.0f}" for name, run in runs.items())
    text.append(f"{seconds:.0f} s: {spent}")
    return "\n".join(text)


def write_json(
    path: Path, runs: Mapping[str, Run], versions: Mapping[str, str], seconds: float
) -> None:
    report: dict[str, Any] = {
        "versions": versions,
        "seconds": seconds,
        "exit_status": exit_status(runs),
        "sections": {name: asdict(run) for name, run in runs.items()},
        "throughput": [asdict(line) for line in compare_throughput(runs)],
    }
    path.write_text(json.dumps(report, indent=1) + "\n")


def _value(run: Run | None, what: str) -> float | None:
    return None if run is None or run.outcome is None else run.outcome.value(what)


def _cells(line: Line) -> tuple[str, str, str, str, str]:
    ratio = "" if line.ratio is None else f"{line.ratio:.3f}"
    goal = "" if line.goal is None else f"{'<=' if line.at_most else '>='} {line.goal:.2f}"
    return line.what, f"{line.value:.4g} {line.unit}", ratio, goal, line.verdict
