"""The flags of `pagewire generate` that constrain the text."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

_NAMES = ("json_schema", "regex", "grammar", "json_object")


def add_constraint(parser: argparse.ArgumentParser) -> None:
    """One of them at most."""
    group = parser.add_mutually_exclusive_group()
    group.add_argument(
        "--json-schema", type=_content, metavar="FILE", help="The text is JSON of this schema."
    )
    group.add_argument(
        "--json-object", action="store_true", default=None, help="The text is a JSON object."
    )
    group.add_argument("--regex", metavar="TEXT", help="The whole text matches this.")
    group.add_argument(
        "--grammar", type=_content, metavar="FILE", help="The text follows this Lark grammar."
    )
    group.add_argument(
        "--choice",
        action="append",
        metavar="TEXT",
        help="The text is this, or another choice. Repeatable.",
    )


def constraint_of(options: argparse.Namespace) -> dict[str, Any]:
    """The sampling parameter that the flags gave, if any."""
    if options.choice is not None:
        return {"structured_output": {"choice": {"texts": options.choice}}}
    for name in _NAMES:
        value = getattr(options, name)
        if value is not None:
            return {"structured_output": {name: value}}
    return {}


def _content(name: str) -> str:
    try:
        return Path(name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise argparse.ArgumentTypeError(f"{name} cannot be read ({error})") from error
