"""Runs each section in a process of its own, within its time and the whole check's."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from scripts.gpu_check.outcome import Outcome

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from scripts.gpu_check.sections import Section

_LEAST_S = 5.0
_LAST_LINES = 8


@dataclass(frozen=True, slots=True)
class Run:
    outcome: Outcome | None
    """None if it did not finish."""
    reason: str
    """Why it did not."""
    seconds: float


def run_section(
    section: Section,
    arguments: list[str],
    work: Path,
    environment: Mapping[str, str],
    remaining_s: float,
) -> Run:
    """arguments: after the section's name. Its output goes to work/NAME.log."""
    limit = min(section.limit_s, remaining_s)
    if limit < _LEAST_S:
        return Run(None, "no time was left for it", 0.0)
    result, log = work / f"{section.name}.json", work / f"{section.name}.log"
    result.unlink(missing_ok=True)
    command = [sys.executable, "-m", "scripts.gpu_check.section", section.name, *arguments]
    began = time.monotonic()
    with log.open("wb") as output:
        # A session of its own, so that what it has started ends with it.
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env=dict(environment),
            start_new_session=True,
        )
        try:
            status = process.wait(limit)
            reason = f"exit status {status}: {_last_lines(log)}"
        except subprocess.TimeoutExpired:
            reason = f"stopped after {limit:.0f} s: {_last_lines(log)}"
        finally:
            _kill_group(process)
    seconds = time.monotonic() - began
    if not result.exists():
        return Run(None, reason, seconds)
    return Run(Outcome.read(result), "", seconds)


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _last_lines(log: Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines()
    return "\n    ".join(["", *lines[-_LAST_LINES:]])
