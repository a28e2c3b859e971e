"""`pagewire keys new`: a key for a client, and the line for the server's --api-keys file."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from pagewire.api_keys import DEFAULT_ROLES, new_key
from pagewire.cli import EXIT_OK, EXIT_USAGE, fail

if TYPE_CHECKING:
    import argparse


def run(options: argparse.Namespace) -> int:
    roles = tuple(options.role or DEFAULT_ROLES)
    try:
        key, entry = new_key(options.name, options.tenant, roles)
    except ValueError as error:
        fail(str(error))
        return EXIT_USAGE
    # The line alone on stdout, so that it can be appended: >> keys.txt
    sys.stderr.write(f"key, shown this once: {key}\n")
    sys.stdout.write(f"{entry.line()}\n")
    return EXIT_OK
