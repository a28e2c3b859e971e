"""How far the loading of a model is: a bar for people, log lines for files."""

from __future__ import annotations

import logging
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_log = logging.getLogger(__name__)

_QUARTERS = 4


@contextmanager
def report_progress(
    model: str, stream: TextIO | None = None
) -> Iterator[Callable[[str, int, int], None]]:
    """Gives a callback (stage, done, total), to be called as a stage goes on.

    On a terminal (stream, default stderr) each stage has a bar, which goes away
    at the end; elsewhere each stage logs a line at every quarter.
    """
    stream = stream or sys.stderr
    if stream.isatty():
        with _bars(model, stream) as update:
            yield update
    else:
        yield _QuarterLines(model).update


@contextmanager
def _bars(model: str, stream: TextIO) -> Iterator[Callable[[str, int, int], None]]:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f}%"),
    )
    tasks: dict[str, TaskID] = {}
    with Progress(
        *columns, TimeElapsedColumn(), console=Console(file=stream), transient=True
    ) as progress:

        def update(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = progress.add_task(f"{model}: {stage}", total=total)
            progress.update(tasks[stage], completed=done, total=total)

        yield update


class _QuarterLines:
    def __init__(self, model: str) -> None:
        self._model = model
        self._reached: dict[str, int] = {}

    def update(self, stage: str, done: int, total: int) -> None:
        quarter = _QUARTERS * done // total if total else _QUARTERS
        if quarter > self._reached.get(stage, -1):
            self._reached[stage] = quarter
            _log.info("loading %s: %s %d%%", self._model, stage, 100 * quarter // _QUARTERS)
