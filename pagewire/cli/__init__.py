"""The `pagewire` command. Each subcommand imports only what it needs."""

from __future__ import annotations

import argparse
import math
import os
import sys
from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, NoReturn

from pagewire.api_keys import DEFAULT_ROLES, ROLES
from pagewire.cli.bench_flags import add_bench
from pagewire.cli.connection import add_security
from pagewire.cli.constraint import add_constraint
from pagewire.errors import ConfigError, ModelLoadError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pagewire.client import CallFailed

EXIT_OK, EXIT_FAILED, EXIT_USAGE, EXIT_MODEL, EXIT_INTERRUPTED = 0, 1, 2, 3, 130

_ADDRESS_VARIABLE = "PAGEWIRE_ADDRESS"
_DEFAULT_ADDRESS = "127.0.0.1:50051"
_DEFAULT_HTTP = "127.0.0.1:8000"
_CALM = {"temperature": 0.2, "top_p": 0.9}
"""Small models wander off at temperature 1, and a person wants an answer that ends."""


def main(argv: Sequence[str] | None = None) -> int:
    """0: done; 1: the server failed or is not there; 2: the request or a flag is
    wrong; 3: the model cannot be loaded; 130: interrupted."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] == ["serve"]:
        return _serve(arguments[1:])
    options = _parser().parse_args(arguments)
    if options.command == "version":
        sys.stdout.write(f"pagewire {version('pagewire')}\n")
        return EXIT_OK
    try:
        command = import_module(f"pagewire.cli.{options.command}")
        status: int = command.run(options)
    except ConfigError as error:
        fail(str(error))
        return EXIT_USAGE
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader has seen enough; the interpreter must not flush into it again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_OK
    return status


def report(failure: CallFailed, address: str) -> int:
    """One line on stderr about a failed call, and the exit status for it."""
    if not failure.reached and failure.code == "UNAVAILABLE":
        fail(f"no server answers at {address}; start one with: pagewire serve")
    elif failure.field:
        fail(f"{failure.field}: {failure.message}")
    else:
        fail(f"{failure.message} ({failure.code})")
    return EXIT_USAGE if failure.code == "INVALID_ARGUMENT" else EXIT_FAILED


def fail(message: str) -> None:
    sys.stderr.write(f"pagewire: {' '.join(message.split())}\n")


def sampling_of(options: argparse.Namespace) -> dict[str, Any]:
    """The sampling parameters of the command line, by their API names."""
    names = (
        "max_tokens",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "seed",
        "stop",
        "stop_token_ids",
        "ignore_eos",
        "min_tokens",
        "repetition_penalty",
        "presence_penalty",
        "frequency_penalty",
        "bad_words",
    )
    given = {name: getattr(options, name) for name in names}
    if options.logit_bias is not None:
        given["logit_bias"] = dict(options.logit_bias)
    given = {name: value for name, value in given.items() if value is not None}
    return given if "temperature" in given else _CALM | given


def _serve(arguments: list[str]) -> int:
    from pagewire.config import ServeConfig
    from pagewire.launch import serve
    from pagewire.settings import load_config

    try:
        return serve(load_config(ServeConfig, arguments, "pagewire serve"))
    except ConfigError as error:
        fail(str(error))
        return EXIT_USAGE
    except ModelLoadError as error:
        fail(str(error))
        return EXIT_MODEL


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        fail(f"{message.removeprefix('argument ')} (see {self.prog} --help)")
        raise SystemExit(EXIT_USAGE)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="pagewire", description="Serve a language model, or talk to one.")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    commands.add_parser("serve", help="start a server (its flags: pagewire serve --help)")

    chat = commands.add_parser(
        "chat",
        help="talk to a server's model",
        description="Talk to a server's model.",
    )
    _add_connection(chat)
    _add_sampling(chat)
    chat.add_argument("--system", metavar="TEXT", help="The conversation's system message.")

    generate = commands.add_parser("generate", help="continue one prompt")
    generate.add_argument("prompt", metavar="PROMPT", help="The text, or - to read it from stdin.")
    _add_connection(generate)
    _add_sampling(generate)
    generate.add_argument(
        "--chat", action="store_true", help="Put the prompt through the chat template."
    )
    generate.add_argument(
        "--system", metavar="TEXT", help="A system message before it; implies --chat."
    )
    generate.add_argument(
        "--json",
        action="store_true",
        help="Print the whole response once it is there; --max-tokens bounds the wait.",
    )
    for flag, of in (("--logprobs", "an output token"), ("--prompt-logprobs", "a prompt token")):
        generate.add_argument(
            flag,
            type=int,
            metavar="K",
            help=f"With --json: how likely {of} was, and the K likeliest in its place.",
        )
    generate.add_argument(
        "--n", type=int, metavar="N", help="With --json: so many sequences of the one prompt."
    )
    generate.add_argument(
        "--best-of", type=int, metavar="N", help="With --json: of so many, the n likeliest."
    )
    add_constraint(generate)

    models = commands.add_parser("models", help="list what a server serves")
    _add_connection(models)
    models.add_argument("--json", action="store_true", help="Print every fact.")

    _add_top(commands)
    _add_keys(commands)
    add_bench(commands, os.environ.get(_ADDRESS_VARIABLE) or _DEFAULT_ADDRESS)

    commands.add_parser("version", help="print the version")
    return parser


def _add_top(commands: Any) -> None:
    top = commands.add_parser(
        "top",
        help="watch a server",
        description="Watch a server: its queue, KV blocks, rates and latencies, engines and "
        "tenants. Rates and percentiles are of the last interval. q leaves.",
    )
    top.add_argument(
        "--http",
        type=_address,
        default=_DEFAULT_HTTP,
        metavar="ADDRESS",
        help="The server's HTTP address. [%(default)s]",
    )
    top.add_argument(
        "--interval",
        type=_seconds,
        default=2.0,
        metavar="S",
        help="Seconds from one look to the next. [%(default)s]",
    )
    top.add_argument("--once", action="store_true", help="Print one interval's figures and end.")
    top.add_argument("--json", action="store_true", help="Print an object for each interval.")
    add_security(top)


def _add_keys(commands: Any) -> None:
    keys = commands.add_parser("keys", help="make API keys")
    kinds = keys.add_subparsers(dest="kind", metavar="KIND", required=True)
    new = kinds.add_parser(
        "new",
        help="make a key",
        description="Prints a new key on stderr, and on stdout its line for the file of "
        "--api-keys, which holds only the key's hash.",
    )
    new.add_argument("name", metavar="NAME", help="Whose it is; this is what logs show.")
    new.add_argument("--tenant", default="", help="The tenant that it acts for; * is any.")
    new.add_argument(
        "--role",
        action="append",
        choices=ROLES,
        help=f"What it is for. Repeatable. [{' '.join(DEFAULT_ROLES)}]",
    )


def _add_connection(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--address",
        type=_address,
        default=os.environ.get(_ADDRESS_VARIABLE) or _DEFAULT_ADDRESS,
        help=f"The server's gRPC address. Also {_ADDRESS_VARIABLE}. [%(default)s]",
    )
    parser.add_argument("--timeout", type=_seconds, metavar="S", help="Deadline of a call.")
    add_security(parser)


def _add_sampling(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "sampling",
        "Without --temperature it is 0.2, and --top-p 0.9. What else is left out has the "
        "server's default.",
    )
    group.add_argument("--model", help="A name from `pagewire models`.")
    group.add_argument("--max-tokens", type=int, metavar="N")
    group.add_argument("--temperature", type=float, metavar="X", help="0 is greedy.")
    group.add_argument("--top-p", type=float, metavar="X")
    group.add_argument("--top-k", type=int, metavar="N")
    group.add_argument("--min-p", type=float, metavar="X")
    group.add_argument("--seed", type=int, metavar="N")
    group.add_argument(
        "--stop", action="append", metavar="TEXT", help="End before this text. Repeatable."
    )
    group.add_argument(
        "--stop-token-id", action="append", type=int, dest="stop_token_ids", metavar="ID"
    )
    group.add_argument("--ignore-eos", action="store_true", default=None)
    group.add_argument("--min-tokens", type=int, metavar="N", help="Neither EOS nor a stop before.")
    group.add_argument(
        "--repetition-penalty", type=float, metavar="X", help="Over prompt and output; 1 is none."
    )
    group.add_argument("--presence-penalty", type=float, metavar="X", help="Over the output.")
    group.add_argument("--frequency-penalty", type=float, metavar="X", help="Over the output.")
    group.add_argument(
        "--logit-bias",
        action="append",
        type=_bias,
        metavar="ID=X",
        help="Add X to a token's logit. Repeatable.",
    )
    group.add_argument(
        "--bad-word",
        action="append",
        dest="bad_words",
        metavar="TEXT",
        help="Never draw this. Repeatable.",
    )


def _bias(text: str) -> tuple[int, float]:
    token_id, _, value = text.partition("=")
    try:
        return int(token_id), float(value)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be ID=X, got {text!r}") from None


def _address(text: str) -> str:
    if not text:
        raise argparse.ArgumentTypeError("must not be empty")
    return text


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"must be above 0, got {text}")
    return value
