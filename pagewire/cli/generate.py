"""`pagewire generate`: the text, and nothing else, on stdout."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

from pagewire.cli import EXIT_OK, EXIT_USAGE, fail, report, sampling_of
from pagewire.cli.connection import connection_of
from pagewire.cli.constraint import constraint_of
from pagewire.client import Ask, CallFailed, Client

if TYPE_CHECKING:
    import argparse

    from pagewire.client import TextStream


def run(options: argparse.Namespace) -> int:
    if not options.json and _json_only(options):
        fail("--logprobs, --prompt-logprobs, --n and --best-of need --json")
        return EXIT_USAGE
    with Client(connection_of(options), retry=None) as client:
        try:
            if options.json:
                _warn_of_silence(options)
                response = client.generate(_ask(options), options.timeout)
                sys.stdout.write(json.dumps(response, ensure_ascii=False, indent=2) + "\n")
            else:
                _print(client.stream(_ask(options), options.timeout))
        except CallFailed as failure:
            return report(failure, options.address)
    return EXIT_OK


def _warn_of_silence(options: argparse.Namespace) -> None:
    """To a person; a script waits for the end anyway."""
    if options.max_tokens is None and sys.stderr.isatty():
        sys.stderr.write(
            "pagewire: --json shows nothing before the end; --max-tokens would bound the answer, "
            "Ctrl-C cancels it\n"
        )


def _print(stream: TextStream) -> None:
    shown = False
    try:
        for text in stream:
            sys.stdout.write(text)
            sys.stdout.flush()
            shown = True
    finally:
        # What follows on a terminal, an error or the prompt, is not part of the text.
        if shown and sys.stdout.isatty():
            sys.stdout.write("\n")
            sys.stdout.flush()


def _ask(options: argparse.Namespace) -> Ask:
    prompt = sys.stdin.read() if options.prompt == "-" else options.prompt
    sampling = sampling_of(options) | _json_only(options) | constraint_of(options)
    if not (options.chat or options.system is not None):
        return Ask(prompt=prompt, model=options.model, sampling=sampling)
    system = [] if options.system is None else [("system", options.system)]
    return Ask(messages=[*system, ("user", prompt)], model=options.model, sampling=sampling)


def _json_only(options: argparse.Namespace) -> dict[str, int]:
    """Parameters whose results are more than one text."""
    names = ("logprobs", "prompt_logprobs", "n", "best_of")
    given = {name: getattr(options, name) for name in names}
    return {name: value for name, value in given.items() if value is not None}
