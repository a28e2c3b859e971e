"""One section in this process: python -m scripts.gpu_check.section NAME DEVICE WORK [--tiny]."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from pathlib import Path

from scripts.gpu_check.measure import Bench
from scripts.gpu_check.sections import BY_NAME


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("name", choices=BY_NAME)
    parser.add_argument("device", choices=("cuda", "cpu"))
    parser.add_argument("work", type=Path)
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    module, function = BY_NAME[options.name].place.split(":")
    section = getattr(importlib.import_module(f"scripts.gpu_check.{module}"), function)
    outcome = section(Bench(options.device, options.tiny), options.work)
    outcome.write(options.work / f"{options.name}.json")
    # A thread or a graph of others that does not end has no say in whether this one has.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


main()
