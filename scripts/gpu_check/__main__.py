"""Parity and speed of the kernels and the engine on a GPU, in one command.

    scripts/gpu_check.sh --pack build/gpu_check/wheels    where there is a package registry
    scripts/gpu_check.sh                                  where there is a GPU

Prints one table, and writes it as JSON. Exit status: 0, also where goals are missed; 1 for
wrong results; 2 where something was not measured; 3 where nothing could be started.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import shutil
import signal
import sys
import time
from pathlib import Path

from scripts.gpu_check import report, wheels
from scripts.gpu_check.runs import Run, run_section
from scripts.gpu_check.sections import BY_NAME, SECTIONS

_ROOT = Path(__file__).resolve().parent.parent.parent
_WORK = _ROOT / "build" / "gpu_check"
_LIMIT_S = 470.0
_CANNOT_START = 3


def main() -> int:
    options = _parse()
    # So that what was started is ended, too, where this is.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    pyproject = _ROOT / "pyproject.toml"
    try:
        if options.pack is not None:
            wheels.pack(options.pack, pyproject)
            return 0
        site = _install(options.wheels, pyproject, options.work)
    except wheels.Missing as error:
        print(f"gpu_check: cannot start\n{error}", file=sys.stderr)
        return _CANNOT_START
    began = time.monotonic()
    options.work.mkdir(parents=True, exist_ok=True)
    options.out.mkdir(parents=True, exist_ok=True)
    paths = [str(site)] if site is not None else []
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([*paths, str(_ROOT)]),
        "PYTHONUNBUFFERED": "1",
        # Nothing is fetched, also where something could be.
        "HF_HUB_OFFLINE": "1",
    }
    arguments = [options.device, str(options.work), *(["--tiny"] if options.tiny else [])]
    runs: dict[str, Run] = {}
    for section in SECTIONS:
        if section.name not in options.sections:
            continue
        print(f"{section.name} ...", flush=True)
        remaining = options.limit - (time.monotonic() - began)
        run = run_section(section, arguments, options.work, environment, remaining)
        runs[section.name] = run
        log = options.work / f"{section.name}.log"
        if log.exists():
            shutil.copy(log, options.out)
    seconds = time.monotonic() - began
    print(report.table(runs, seconds), flush=True)
    report.write_json(options.out / "gpu_check.json", runs, _versions(), seconds)
    return report.exit_status(runs)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="gpu_check.sh",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--pack", type=Path, metavar="DIR", help="Download wheels to DIR, and end.")
    parser.add_argument(
        "--wheels",
        type=Path,
        default=_WORK / "wheels",
        metavar="DIR",
        help="Where to find what is not installed. [%(default)s]",
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument(
        "--tiny", action="store_true", help="Sizes that only show that everything runs."
    )
    parser.add_argument(
        "--sections",
        type=_section_names,
        default=list(BY_NAME),
        help=f"Of {','.join(BY_NAME)}. [all]",
    )
    parser.add_argument(
        "--limit", type=float, default=_LIMIT_S, help="Seconds for all. [%(default)s]"
    )
    parser.add_argument("--work", type=Path, default=_WORK, help="Checkpoints. [%(default)s]")
    parser.add_argument(
        "--out", type=Path, default=_WORK / "out", help="The JSON and the logs. [%(default)s]"
    )
    options = parser.parse_args()
    for name in ("pack", "wheels", "work", "out"):
        if getattr(options, name) is not None:
            setattr(options, name, getattr(options, name).resolve())
    if options.device == "cpu" and not options.tiny:
        parser.error("--device cpu needs --tiny: its figures would take hours")
    return options


def _section_names(text: str) -> list[str]:
    names = text.split(",")
    unknown = [name for name in names if name not in BY_NAME]
    if unknown:
        raise argparse.ArgumentTypeError(f"no section {unknown[0]!r}; known: {', '.join(BY_NAME)}")
    return names


def _install(directory: Path, pyproject: Path, work: Path) -> Path | None:
    """Where the wheels went that this environment needs, if it needs any. Raises Missing."""
    needed = wheels.resolve(
        wheels.requirements(pyproject), directory if directory.is_dir() else None
    )
    if not needed:
        return None
    site = work / "site"
    shutil.rmtree(site, ignore_errors=True)
    wheels.install(needed, site)
    return site


def _versions() -> dict[str, str]:
    return {
        "python": sys.version.split()[0],
        **{name: importlib.metadata.version(name) for name in sorted(wheels.EXPECTED)},
    }


if __name__ == "__main__":
    sys.exit(main())
