"""The flags of `pagewire bench`."""

from __future__ import annotations

import argparse
import json
import math
from typing import TYPE_CHECKING, Any

from pagewire.cli.connection import add_security
from pagewire.number_list import number_list

if TYPE_CHECKING:
    from collections.abc import Callable


def add_bench(commands: Any, default_address: str) -> None:
    """Adds the command to main's subparsers."""
    bench = commands.add_parser("bench", help="measure a server or the engine")
    kinds = bench.add_subparsers(dest="kind", metavar="KIND", required=True)
    _add_serve(kinds, default_address)
    throughput = kinds.add_parser(
        "throughput",
        help="the engine by itself, all requests at once",
        description="Starts an engine, gives it all requests at once as token ids over its own "
        "wire (no gRPC, no text) and measures until the last has ended.",
    )
    _add_workload(throughput, num_requests=64, prompt="128:512", output="64:256", ids_only=True)
    latency = kinds.add_parser(
        "latency",
        help="the engine by itself, one request at a time",
        description="Starts an engine and gives it one request after the other as token ids over "
        "its own wire (no gRPC, no text).",
    )
    _add_workload(latency, num_requests=10, prompt="128", output="128", ids_only=True)
    for parser in (throughput, latency):
        parser.add_argument(
            "--start-timeout", type=_positive, default=300.0, metavar="S", help="[%(default)s]"
        )
        parser.add_argument(
            "engine_flags",
            nargs="*",
            metavar="-- ENGINE_FLAGS",
            help="The engine's settings, after --: those of python -m engine_core --help.",
        )
        _add_output(parser)


def _add_serve(kinds: Any, default_address: str) -> None:
    serve = kinds.add_parser(
        "serve",
        help="a running server, over gRPC or an OpenAI-compatible API",
        description="Loads a running server and measures what its clients see.",
    )
    target = serve.add_argument_group("target")
    target.add_argument("--target", choices=("grpc", "openai"), default="grpc")
    target.add_argument("--address", default=default_address, help="For grpc. [%(default)s]")
    add_security(target)
    target.add_argument(
        "--url",
        default="http://127.0.0.1:8000",
        help="For openai: without /v1; https:// for TLS. [%(default)s]",
    )
    target.add_argument("--model", help="The name that the server knows it by.")
    target.add_argument("--timeout", type=_positive, metavar="S", help="Of each request.")
    target.add_argument(
        "--extra-body", type=_object, default={}, metavar="JSON", help="For openai: more fields."
    )
    target.add_argument("--temperature", type=float, default=0.0, metavar="X", help="[%(default)s]")
    target.add_argument(
        "--stop-at-eos", action="store_true", help="Default: every output has its full length."
    )
    _add_workload(serve, num_requests=100, prompt="128:512", output="64:256", ids_only=False)
    load = serve.add_argument_group("load")
    load.add_argument(
        "--concurrency",
        type=_concurrencies,
        metavar="N[,N...]",
        help="Requests in flight; with --request-rate, at most. Of several, each has a run of its "
        "own, and the report sets them side by side. [8 without --request-rate]",
    )
    load.add_argument(
        "--request-rate", type=_rate, metavar="R", help="Arrivals a second; inf is all at once."
    )
    load.add_argument(
        "--burstiness",
        type=_positive,
        default=1.0,
        metavar="B",
        help="Shape of the gamma-distributed gaps between arrivals; 1 is Poisson. [%(default)s]",
    )
    load.add_argument(
        "--max-seconds", type=_positive, default=math.inf, metavar="S", help="Send nothing after."
    )
    load.add_argument(
        "--goodput",
        type=_objective,
        action="append",
        default=[],
        metavar="NAME:MS",
        help="An objective, NAME one of ttft, tpot, e2e. Repeatable.",
    )
    _add_output(serve)


def _add_workload(
    parser: argparse.ArgumentParser,
    *,
    num_requests: int,
    prompt: str,
    output: str,
    ids_only: bool,
) -> None:
    group = parser.add_argument_group("workload")
    choices = (
        ("random", "shared-prefix") if ids_only else ("random", "text", "shared-prefix", "file")
    )
    group.add_argument(
        "--workload",
        choices=choices,
        default="random",
        help="random: token ids, no prefix in common; shared-prefix: after common beginnings"
        + ("." if ids_only else "; text: common words; file: a JSONL file.")
        + " [%(default)s]",
    )
    if not ids_only:
        group.add_argument(
            "--file", metavar="PATH", help='Lines of {"prompt": text or [ids], "max_tokens": N}.'
        )
        group.add_argument(
            "--vocab-size", type=_count, metavar="N", help="For ids. [grpc: the server's; 32000]"
        )
    group.add_argument(
        "--num-requests", type=_count, default=num_requests, metavar="N", help="[%(default)s]"
    )
    group.add_argument(
        "--input-len",
        default=prompt,
        metavar="N[:M]",
        help="Prompt tokens, words for text; after the prefix for shared-prefix. [%(default)s]",
    )
    group.add_argument("--output-len", default=output, metavar="N[:M]", help="[%(default)s]")
    group.add_argument("--prefix-len", type=_count, default=512, metavar="N", help="[%(default)s]")
    group.add_argument("--num-prefixes", type=_count, default=1, metavar="N", help="[%(default)s]")
    group.add_argument("--seed", type=int, default=0, metavar="N", help="[%(default)s]")
    group.add_argument(
        "--warm-up", type=_number, default=8, metavar="N", help="Requests before. [%(default)s]"
    )


def _add_output(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("report")
    group.add_argument("--json", metavar="PATH", help="Write every figure there.")
    group.add_argument("--html", metavar="PATH", help="Write a page with plots there.")
    group.add_argument("--label", default="", metavar="TEXT", help="The report's title.")
    group.add_argument("--no-progress", action="store_true")


def _checked(convert: Callable[[str], Any], holds: Callable[[Any], bool], rule: str) -> Any:
    def parse(text: str) -> Any:
        try:
            value = convert(text)
        except ValueError:
            value = math.nan
        # NaN holds no rule.
        if not holds(value):
            raise argparse.ArgumentTypeError(f"must be {rule}, got {text!r}")
        return value

    return parse


_count = _checked(int, lambda value: value >= 1, "a number above 0")
_number = _checked(int, lambda value: value >= 0, "a number, 0 or more")
_positive = _checked(float, lambda value: 0 < value < math.inf, "above 0")
_rate = _checked(float, lambda value: value > 0, "above 0")


def _object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"must be a JSON object, got {text!r}")
    return value


def _concurrencies(text: str) -> tuple[int, ...]:
    """Ascending, each once."""
    try:
        return number_list(text)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"must be a number above 0, or several such as 1,4,16, got {text!r}"
        ) from None


def _objective(text: str) -> tuple[str, float]:
    """NAME:MS as (name, seconds)."""
    name, _, value = text.partition(":")
    if name not in ("ttft", "tpot", "e2e"):
        raise argparse.ArgumentTypeError(f"must be ttft, tpot or e2e and :MS, got {text!r}")
    return name, float(_positive(value)) / 1e3
