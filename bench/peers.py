"""Pagewire against its peers: each server in turn on this machine, the same loads for all.

    python bench/peers.py bench/peers.toml [--only pagewire,vllm] [--workloads A,C] [--runs 2]

The TOML file says how to start each server (see bench/peers.example.toml). Servers run one
at a time, each is waited for until it has answered a request, and is stopped before the
next one starts; the whole turn is repeated --runs times, so that what the machine does
meanwhile falls on all. The load comes from `pagewire bench serve`, whose figures are
printed as ratios: Pagewire's over the peer's, so that above 1 is better for throughput and
below 1 for latency. For a server whose `floor` is set, its figures are also printed as fractions
of what this machine could do at best with such weights (bench/floors.py), after the ceilings
that were measured before each turn.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import statistics
import string
import subprocess
import sys
import tempfile
import time
import tomllib
import urllib.error
import urllib.request
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.ceilings import Meter
from bench.floors import Ceilings, ModelReads, floors, fraction
from bench.workloads import WORKLOADS, flags

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

ROOT = Path(__file__).resolve().parent.parent
STOP_S = 20.0
POLL_S = 0.1

FIGURES = {
    "output tok/s": lambda summary: summary["output_tokens_per_s"],
    "prompt tok/s": lambda summary: summary["prompt_tokens_per_s"],
    "TTFT p50 ms": lambda summary: _ms(summary["ttft_s"], "p50"),
    "TTFT p99 ms": lambda summary: _ms(summary["ttft_s"], "p99"),
    "ITL p50 ms": lambda summary: _ms(summary["itl_chunk_s"], "p50"),
    "ITL p99 ms": lambda summary: _ms(summary["itl_chunk_s"], "p99"),
}


@dataclass(frozen=True, slots=True)
class Floor:
    """What bench/floors.py's ModelReads.of takes."""

    model: str
    weights: str


@dataclass(frozen=True, slots=True)
class Server:
    """One entry of the TOML file."""

    name: str
    command: list[str]
    target: str
    """grpc or openai."""
    address: str
    """host:port."""
    model: str | None = None
    environment: dict[str, str] = field(default_factory=dict)
    extra_body: dict[str, Any] = field(default_factory=dict)
    start_timeout: float = 300.0
    floor: Floor | None = None
    """Of the model that it runs; None: its figures are not set against one."""


def main() -> None:
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
    parser.add_argument("--json", type=Path, help="Write every figure there.")
    options = parser.parse_args()
    workloads = options.workloads.split(",")
    unknown = set(workloads) - WORKLOADS.keys()
    if unknown:
        parser.error(f"no such workload: {', '.join(sorted(unknown))}")
    servers = _installed(_read(options.servers), options.only)
    models = {
        s.name: ModelReads.of(s.floor.model, s.floor.weights)
        for s in servers
        if s.floor is not None
    }
    results: list[dict[str, Any]] = []
    ceilings: dict[str, Ceilings] = {}
    for turn in range(1, options.runs + 1):
        measured = _ceilings(models, options.threads)
        ceilings = {name: new.or_better(ceilings.get(name)) for name, new in measured.items()}
        for server in servers:
            results += _measure(server, workloads, turn, options.vocab_size, options.fraction)
            if options.json is not None:
                best = {name: asdict(found) for name, found in ceilings.items()}
                document = {"ceilings": best, "results": results}
                options.json.write_text(json.dumps(document, indent=1) + "\n", "utf-8")
    for name, found in ceilings.items():
        print(f"{name}: {found}")
    at_best = {
        name: {workload: floors(models[name], found, workload) for workload in workloads}
        for name, found in ceilings.items()
    }
    print(table(results, servers[0].name, at_best))


def _ceilings(models: dict[str, ModelReads], threads: int) -> dict[str, Ceilings]:
    if not models:
        return {}
    with tempfile.TemporaryDirectory() as directory:
        meter = Meter.build(Path(directory))
        return {name: meter.measure(threads, reads.weight_bytes) for name, reads in models.items()}


def _read(path: Path) -> list[Server]:
    """Raises SystemExit that names what is wrong."""
    document = tomllib.loads(path.read_text("utf-8"))
    values = {**os.environ, **document.get("variables", {})}
    servers = []
    for name, entry in document.get("server", {}).items():
        try:
            expanded = _expand(entry, values)
            if "floor" in expanded:
                expanded["floor"] = Floor(**expanded["floor"])
            servers.append(Server(name=name, **expanded))
        except KeyError as missing:
            raise SystemExit(f"{path}: [server.{name}] uses ${missing.args[0]}, not set") from None
        except TypeError as error:
            raise SystemExit(f"{path}: [server.{name}]: {error}") from None
    return servers


def _expand(value: Any, values: dict[str, str]) -> Any:
    if isinstance(value, str):
        return string.Template(value).substitute(values)
    if isinstance(value, list):
        return [_expand(item, values) for item in value]
    if isinstance(value, dict):
        return {key: _expand(item, values) for key, item in value.items()}
    return value


def _installed(servers: list[Server], only: str | None) -> list[Server]:
    wanted = None if only is None else only.split(",")
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
) -> list[dict[str, Any]]:
    results = []
    with _running(server) as (process, start_s):
        for workload in workloads:
            cpu_before = _cpu_s(process.pid)
            report = _bench(server, workload, turn, vocab_size, fraction)
            summary = report["summary"]
            cpu = (_cpu_s(process.pid) - cpu_before) / summary["duration_s"]
            result = {
                "server": server.name,
                "workload": workload,
                "run": turn,
                "start_s": start_s,
                "server_cpu": cpu,
                "rss_mib": _rss_mib(process.pid),
                "figures": {name: figure(summary) for name, figure in FIGURES.items()},
                "report": report,
            }
            results.append(result)
            figures = "  ".join(
                f"{name} {'-' if value is None else format(value, '.1f')}"
                for name, value in result["figures"].items()
            )
            failed = summary["requests"] - summary["successful"]
            failures = f"  {failed} FAILED: {summary['first_error']}" if failed else ""
            print(
                f"{server.name} {workload} run {turn}: {figures}  RSS {result['rss_mib']:.0f} MiB"
                f"{failures}",
                flush=True,
            )
    return results


def _bench(
    server: Server, workload: str, turn: int, vocab_size: int, fraction: float
) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "report.json"
        subprocess.run(
            [
                *(sys.executable, "-m", "pagewire.cli", "bench", "serve"),
                *(f"--target={server.target}", f"--address={server.address}"),
                *(
                    f"--url=http://{server.address}",
                    f"--extra-body={json.dumps(server.extra_body)}",
                ),
                *([] if server.model is None else [f"--model={server.model}"]),
                # Other prompts in each turn: the server of the last one may keep a cache on disk.
                *(f"--seed={turn}", f"--vocab-size={vocab_size}", f"--json={path}"),
                *("--warm-up=16", "--no-progress", *flags(workload, fraction)),
            ],
            check=True,
            cwd=ROOT,
            stdout=subprocess.DEVNULL,
        )
        report: dict[str, Any] = json.loads(path.read_text())
        return report


@contextlib.contextmanager
def _running(server: Server) -> Iterator[tuple[subprocess.Popen[bytes], float]]:
    """The server once it has answered a request, and the seconds that took."""
    with tempfile.TemporaryFile() as log:
        began = time.monotonic()
        process = subprocess.Popen(
            server.command,
            env={**os.environ, **server.environment},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            while not _answers(server):
                if process.poll() is not None or time.monotonic() - began > server.start_timeout:
                    log.seek(0)
                    sys.stderr.write(log.read()[-4000:].decode(errors="replace"))
                    raise SystemExit(f"{server.name} did not start")
                time.sleep(POLL_S)
            yield process, time.monotonic() - began
        finally:
            _stop(process)


def _answers(server: Server) -> bool:
    if server.target == "grpc":
        return _answers_grpc(server)
    body = {"prompt": [200, 504], "max_tokens": 1, "model": server.model} | server.extra_body
    request = urllib.request.Request(
        f"http://{server.address}/v1/completions",
        json.dumps(body).encode(),
        {"content-type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def _answers_grpc(server: Server) -> bool:
    import grpc

    from pagewire.v1 import common_pb2, inference_pb2, inference_pb2_grpc

    request = inference_pb2.GenerateRequest(
        prompt_token_ids=common_pb2.TokenIds(ids=[200, 504]),
        sampling_params=common_pb2.SamplingParams(max_tokens=1),
    )
    with grpc.insecure_channel(server.address) as channel:
        try:
            inference_pb2_grpc.InferenceServiceStub(channel).Generate(request, timeout=60)
        except grpc.RpcError:
            return False
    return True


def _stop(process: subprocess.Popen[bytes]) -> None:
    """The whole process group, which is the server's own."""
    with contextlib.suppress(ProcessLookupError):
        process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(STOP_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _family(pid: int) -> list[psutil.Process]:
    parent = psutil.Process(pid)
    return [parent, *parent.children(recursive=True)]


def _cpu_s(pid: int) -> float:
    times = [process.cpu_times() for process in _family(pid)]
    return sum(entry.user + entry.system for entry in times)


def _rss_mib(pid: int) -> float:
    return sum(process.memory_info().rss for process in _family(pid)) / 2**20


def _ms(figures: dict[str, float] | None, name: str) -> float | None:
    return None if figures is None else 1e3 * figures[name]


def table(
    results: list[dict[str, Any]], ours: str, at_best: Mapping[str, dict[str, dict[str, float]]]
) -> str:
    """Markdown: a row for each workload and figure, medians over the runs, `ours` over each
    peer as a ratio, and of each server in at_best the fraction of what it could do: floors by
    server, workload and figure."""
    names = list(dict.fromkeys(result["server"] for result in results))
    peers = [name for name in names if name != ours]
    bounded = [name for name in names if name in at_best]
    heads = [
        *names,
        *(f"{ours} / {p}" for p in peers),
        *(f"{name}, of its floor" for name in bounded),
    ]
    lines = [
        "| workload | figure | " + " | ".join(heads) + " |",
        "| --- | --- |" + " ---: |" * len(heads),
    ]
    for workload in dict.fromkeys(result["workload"] for result in results):
        for figure in FIGURES:
            medians = {name: _median(results, name, workload, figure) for name in names}
            if all(value is None for value in medians.values()):
                continue
            cells = ["-" if medians[n] is None else f"{medians[n]:.1f}" for n in names]
            own = medians[ours]
            for peer in peers:
                other = medians[peer]
                cells.append(f"{own / other:.2f}" if own is not None and other else "-")
            for name in bounded:
                value, floor = medians[name], at_best[name][workload].get(figure)
                known = value is not None and floor is not None
                cells.append(f"{fraction(figure, value, floor):.2f}" if known else "-")
            lines.append(f"| {workload} | {figure} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _median(results: list[dict[str, Any]], server: str, workload: str, figure: str) -> float | None:
    values = [
        result["figures"][figure]
        for result in results
        if (result["server"], result["workload"]) == (server, workload)
        and result["figures"][figure] is not None
    ]
    return statistics.median(values) if values else None


if __name__ == "__main__":
    main()
