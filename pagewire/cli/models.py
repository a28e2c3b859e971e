"""`pagewire models`: what a server serves."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

from pagewire.cli import EXIT_OK, report
from pagewire.cli.connection import connection_of
from pagewire.client import CallFailed, Client

if TYPE_CHECKING:
    import argparse

_COLUMNS = ("name", "architecture", "max_model_len", "dtype", "device")


def run(options: argparse.Namespace) -> int:
    with Client(connection_of(options), retry=None) as client:
        try:
            models = client.models(options.timeout)
        except CallFailed as failure:
            return report(failure, options.address)
    if options.json:
        sys.stdout.write(json.dumps(models, ensure_ascii=False, indent=2) + "\n")
        return EXIT_OK
    rows = [_COLUMNS, *(tuple(str(model[key]) for key in _COLUMNS) for model in models)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_COLUMNS))]
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        sys.stdout.write("  ".join(cells).rstrip() + "\n")
    return EXIT_OK
