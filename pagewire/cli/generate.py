"""`pagewire generate`: the text, and nothing else, on stdout."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

from pagewire.cli import EXIT_OK, EXIT_USAGE, fail, report, sampling_of
from pagewire.cli.constraint import constraint_of
from pagewire.client import Ask, CallFailed, Client

if TYPE_CHECKING:
    import argparse


def run(options: argparse.Namespace) -> int:
    if not options.json and _logprobs_of(options):
        fail("--logprobs and --prompt-logprobs need --json")
        return EXIT_USAGE
    with Client(options.address) as client:
        try:
            if options.json:
                response = client.generate(_ask(options), options.timeout)
                sys.stdout.write(json.dumps(response, ensure_ascii=False, indent=2) + "\n")
            else:
                for text in client.stream(_ask(options), options.timeout):
                    sys.stdout.write(text)
                    sys.stdout.flush()
                if sys.stdout.isatty():
                    sys.stdout.write("\n")
        except CallFailed as failure:
            return report(failure, options.address)
    return EXIT_OK


def _ask(options: argparse.Namespace) -> Ask:
    prompt = sys.stdin.read() if options.prompt == "-" else options.prompt
    sampling = sampling_of(options) | _logprobs_of(options) | constraint_of(options)
    if not (options.chat or options.system is not None):
        return Ask(prompt=prompt, model=options.model, sampling=sampling)
    system = [] if options.system is None else [("system", options.system)]
    return Ask(messages=[*system, ("user", prompt)], model=options.model, sampling=sampling)


def _logprobs_of(options: argparse.Namespace) -> dict[str, int]:
    given = {name: getattr(options, name) for name in ("logprobs", "prompt_logprobs")}
    return {name: value for name, value in given.items() if value is not None}
