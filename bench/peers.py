"""Pagewire against its peers: each server in turn on this machine, the same loads for all.

    python bench/peers.py bench/peers.toml [--only pagewire,vllm] [--workloads A,C] [--runs 2]

The TOML file says how to start each server (see bench/peers.example.toml). Servers run one
at a time, each is waited for until it has answered a request, and is stopped before the
next one starts; the whole turn is repeated --runs times, so that what the machine does
meanwhile falls on all. The load comes from `pagewire bench serve`, whose figures are
printed as ratios: Pagewire's over the peer's, so that above 1 is better for throughput and
below 1 for latency and memory (resident in all of a server's processes after the workload). For
a server whose `floor` is set, its figures are also printed as fractions of what this machine
could do at best with such weights (bench/floors.py), after the ceilings that were measured before
each turn. Rates and latencies are of the requests that succeeded; those that failed are counted.

A server that does not start has no figures in that turn; one that ends in a workload, takes too
long for it or answers none of its requests has none of that workload, and is started again for
the rest. Each of these is told at once and after the tables, and makes the exit status 1.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.ceilings import Meter
from bench.comparison import COUNTS, FAILED, Comparison, figures_of
from bench.floors import Ceilings, ModelReads, floors
from bench.peer_server import Server, ServerFailed, read_servers, running
from bench.workloads import WORKLOADS, flags, seed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bench.peer_server import RunningServer

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True, slots=True)
class Failure:
    """Of a server: workloads of which there are no figures."""

    server: str
    run: int
    workloads: list[str]
    message: str
    output: str
    """The last lines of the server's."""

    def __str__(self) -> str:
        return f"{self.server} {','.join(self.workloads)} run {self.run}: FAILED: {self.message}"


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit status: 1 if a server failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("servers", type=Path, help="The TOML file.")
    parser.add_argument("--only", help="Names, with commas between. Default: all that can start.")
    parser.add_argument("--workloads", default="A,B,C,D,E")
    parser.add_argument("--runs", type=int, default=2)
    parser.add_argument(
        "--fraction", type=float, default=1.0, help="Of each workload's requests, for a short run."
    )
    parser.add_argument("--vocab-size", type=int, default=49_152)
    parser.add_argument(
        "--threads",
        type=int,
        default=len(os.sched_getaffinity(0)),
        help="Of which the ceilings are measured. [%(default)s]",
    )
    parser.add_argument(
        "--json",
        type=Path,
        help="Write there what the table is made of, and the report of every run.",
    )
    options = parser.parse_args(arguments)
    workloads = options.workloads.split(",")
    unknown = set(workloads) - WORKLOADS.keys()
    if unknown:
        parser.error(f"no such workload: {', '.join(sorted(unknown))}")
    if options.runs < 1:
        parser.error("--runs must be 1 or more")
    servers = _installed(read_servers(options.servers), options.only)
    models = {
        s.name: ModelReads.of(s.floor.model, s.floor.weights)
        for s in servers
        if s.floor is not None
    }
    results: list[dict[str, Any]] = []
    failures: list[Failure] = []
    ceilings: dict[str, Ceilings] = {}
    for turn in range(1, options.runs + 1):
        measured = _ceilings(models, options.threads)
        ceilings = {name: new.or_better(ceilings.get(name)) for name, new in measured.items()}
        at_best = {
            name: {
                workload: floors(models[name], found, workload, options.fraction)
                for workload in workloads
            }
            for name, found in ceilings.items()
        }
        for server in servers:
            measured_of, failed = _measure(
                server, workloads, turn, options.vocab_size, options.fraction
            )
            results += measured_of
            failures += failed
            comparison = Comparison([server.name for server in servers], results, at_best)
            if options.json is not None:
                document = {
                    "servers": comparison.names,
                    "ceilings": {name: asdict(found) for name, found in ceilings.items()},
                    "floors": at_best,
                    "figures": comparison.figures(),
                    "failures": [asdict(failure) for failure in failures],
                    "results": results,
                }
                options.json.write_text(json.dumps(document, indent=1) + "\n", "utf-8")
    for name, found in ceilings.items():
        print(f"{name}: {found}")
    print(comparison.table(), flush=True)
    print(*failures, sep="\n", end="\n" if failures else "", file=sys.stderr)
    return 1 if failures else 0


def _ceilings(models: dict[str, ModelReads], threads: int) -> dict[str, Ceilings]:
    if not models:
        return {}
    with tempfile.TemporaryDirectory() as directory:
        meter = Meter.build(Path(directory))
        return {name: meter.measure(threads, reads.weight_bytes) for name, reads in models.items()}


def _installed(servers: list[Server], only: str | None) -> list[Server]:
    wanted = None if only is None else only.split(",")
    unknown = set(wanted or ()) - {server.name for server in servers}
    if unknown:
        raise SystemExit(f"no such server: {', '.join(sorted(unknown))}")
    chosen = []
    for server in servers:
        if wanted is not None and server.name not in wanted:
            continue
        if wanted is None and not Path(server.command[0]).is_file():
            print(f"{server.name}: {server.command[0]} is not there; left out", file=sys.stderr)
            continue
        chosen.append(server)
    if not chosen:
        raise SystemExit("no server to measure")
    return chosen


def _measure(
    server: Server, workloads: list[str], turn: int, vocab_size: int, fraction: float
) -> tuple[list[dict[str, Any]], list[Failure]]:
    results: list[dict[str, Any]] = []
    failures: list[Failure] = []
    left = list(workloads)
    while left:
        begun: str | None = None
        try:
            with running(server) as started:
                while left:
                    begun = left.pop(0)
                    cpu_before = started.cpu_s()
                    report = _bench(server, started, begun, turn, vocab_size, fraction)
                    cpu_s = started.cpu_s() - cpu_before
                    results.append(_result(server, started, begun, turn, report, cpu_s))
        except ServerFailed as failure:
            lost = left if begun is None else [begun]
            failures.append(Failure(server.name, turn, list(lost), str(failure), failure.output))
            _tell(failures[-1])
            if begun is None:
                break
    return results, failures


def _tell(failure: Failure) -> None:
    lines = [str(failure), *(f"    {line}" for line in failure.output.splitlines())]
    print(*lines, sep="\n", file=sys.stderr, flush=True)


def _result(
    server: Server,
    started: RunningServer,
    workload: str,
    turn: int,
    report: dict[str, Any],
    cpu_s: float,
) -> dict[str, Any]:
    """Of a workload that was just done; told as well."""
    summary = report["summary"]
    result: dict[str, Any] = {
        "server": server.name,
        "workload": workload,
        "run": turn,
        "start_s": started.start_s,
        # Of the warm-up too, which the report's duration is not.
        "server_cpu_s": cpu_s,
        "figures": figures_of(summary, started.rss_mib()),
        "report": report,
    }
    figures = "  ".join(
        f"{name} {'-' if value is None else format(value, '.1f')}"
        for name, value in result["figures"].items()
        if name not in COUNTS
    )
    failed = result["figures"][FAILED]
    failures = f"  {failed} FAILED: {summary['first_error']}" if failed else ""
    print(f"{server.name} {workload} run {turn}: {figures}{failures}", flush=True)
    return result


def _bench(
    server: Server,
    started: RunningServer,
    workload: str,
    turn: int,
    vocab_size: int,
    fraction: float,
) -> dict[str, Any]:
    """The report of `pagewire bench serve`. Raises ServerFailed."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "report.json"
        command = [
            *(sys.executable, "-m", "pagewire.cli", "bench", "serve"),
            *(f"--target={server.target}", f"--address={server.address}"),
            *(f"--url=http://{server.address}", f"--extra-body={json.dumps(server.extra_body)}"),
            *([] if server.model is None else [f"--model={server.model}"]),
            # Others in each turn: the server of the last one may keep a cache on disk.
            *(f"--seed={seed(workload, turn)}", f"--vocab-size={vocab_size}", f"--json={path}"),
            *("--warm-up=16", "--no-progress", *flags(workload, fraction)),
        ]
        try:
            done = subprocess.run(
                command,
                check=False,
                cwd=ROOT,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                timeout=server.workload_timeout,
            )
        except subprocess.TimeoutExpired:
            raise started.failed(f"not done within {server.workload_timeout:g} s") from None
        report: dict[str, Any] | None = json.loads(path.read_text()) if path.exists() else None
    if report is None:
        started.check()
        raise started.failed(f"not measured: {done.stderr.strip()}")
    summary = report["summary"]
    answered = f"{summary['successful']} of {summary['requests']} requests were answered"
    started.check(f"; {answered}")
    if not summary["successful"]:
        raise started.failed(f"{answered}: {summary['first_error']}")
    return report


if __name__ == "__main__":
    sys.exit(main())
