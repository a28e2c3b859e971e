"""`pagewire bench`: runs a load, prints the figures, writes the reports."""

from __future__ import annotations

import json
import random
import resource
import sys
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import uvloop

from pagewire.bench.load import Load, RequestFailed
from pagewire.bench.load import run as run_load
from pagewire.bench.page import render_page, render_sweep_page
from pagewire.bench.report import Run, make_report, render_text
from pagewire.bench.statistics import Objectives
from pagewire.bench.sweep import make_sweep_report, render_sweep_text
from pagewire.bench.workload import (
    Lengths,
    from_file,
    other_prompts,
    random_ids,
    random_text,
    shared_prefix,
)
from pagewire.cli import EXIT_FAILED, EXIT_MODEL, EXIT_OK, EXIT_USAGE, fail
from pagewire.cli.connection import connection_of, http_tls_of
from pagewire.errors import ConfigError, ModelLoadError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from pagewire.bench.load import Target
    from pagewire.bench.record import Record
    from pagewire.bench.workload import Ask

_DEFAULT_VOCAB_SIZE = 32_000
_DEFAULT_CONCURRENCY = 8
_WARM_UP_TOKENS = 8


def run(options: argparse.Namespace) -> int:
    """0 if at least one request succeeded, else 1."""
    for path in (options.json, options.html):
        if path and not Path(path).resolve().parent.is_dir():
            fail(f"{path}: no such directory")
            return EXIT_USAGE
    try:
        runs = uvloop.run(_measure(options))
    except ConfigError as error:
        fail(str(error))
        return EXIT_USAGE
    except ModelLoadError as error:
        fail(str(error))
        return EXIT_MODEL
    except RequestFailed as error:
        fail(f"{error} ({error.code})")
        return EXIT_FAILED
    title = options.label or f"pagewire bench {options.kind}"
    if len(runs) == 1:
        report = make_report(runs[0])
        text, page = render_text(report), render_page(title, report, runs[0].records)
    else:
        report = make_sweep_report(runs)
        text = render_sweep_text(report)
        page = render_sweep_page(title, report, [run.records for run in runs])
    sys.stdout.write(text)
    if options.json:
        Path(options.json).write_text(json.dumps(report, indent=1) + "\n", "utf-8")
    if options.html:
        Path(options.html).write_text(page, "utf-8")
    return EXIT_OK if any(record.ok for run in runs for record in run.records) else EXIT_FAILED


@dataclass(frozen=True, slots=True)
class _Place:
    """A target that is there, and what it says of itself."""

    target: Target
    vocab_size: int
    facts: dict[str, Any]


async def _measure(options: argparse.Namespace) -> list[Run]:
    """A run for each concurrency."""
    async with AsyncExitStack() as stack:
        if options.kind == "serve":
            place = await _enter_server(options, stack)
        else:
            place = await _enter_engine(options, stack)
        asks = _asks(options, place.vocab_size, _rng("asks", options))
        loads = _loads(options, len(asks))
        return [
            await _run_once(options, place, _in_turn(options, asks, turn, place), load, turn)
            for turn, load in enumerate(loads)
        ]


async def _run_once(
    options: argparse.Namespace, place: _Place, asks: Sequence[Ask], load: Load, turn: int
) -> Run:
    await _warm_up(options, place, load, turn)
    objectives = Objectives(**dict(getattr(options, "goodput", ())))
    with _Progress(len(asks), quiet=options.no_progress) as progress:
        before = _cpu_s()
        records = await run_load(place.target, asks, load, _rng("load", options), progress.advance)
        cpu_s = _cpu_s() - before
    return Run(_settings(options, place, load), records, objectives, cpu_s)


def _in_turn(
    options: argparse.Namespace, asks: Sequence[Ask], turn: int, place: _Place
) -> Sequence[Ask]:
    """A file's prompts are the user's, and are sent as they are each time."""
    if turn == 0 or options.workload == "file":
        return asks
    return [other_prompts(ask, turn, place.vocab_size) for ask in asks]


async def _enter_server(options: argparse.Namespace, stack: AsyncExitStack) -> _Place:
    sampling = {"temperature": options.temperature, "ignore_eos": not options.stop_at_eos}
    if options.target == "grpc":
        from pagewire.bench.grpc_target import GrpcTarget

        server = await stack.enter_async_context(
            GrpcTarget(
                connection_of(options),
                model=options.model,
                sampling=sampling,
                timeout=options.timeout,
            )
        )
        needs_ids = options.workload in ("random", "shared-prefix")
        vocab_size = options.vocab_size or (await server.vocab_size() if needs_ids else 0)
        return _Place(server, vocab_size, {"address": options.address})
    try:
        from pagewire.bench.openai_target import OpenAITarget
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"--target openai needs {error.name}; install it with: pip install 'pagewire[bench]'"
        ) from None
    client = await stack.enter_async_context(
        OpenAITarget(
            options.url,
            model=options.model,
            body=sampling | options.extra_body,
            timeout=options.timeout,
            headers=dict(connection_of(options).metadata),
            tls=http_tls_of(options, options.url),
        )
    )
    return _Place(client, options.vocab_size or _DEFAULT_VOCAB_SIZE, {"url": options.url})


async def _enter_engine(options: argparse.Namespace, stack: AsyncExitStack) -> _Place:
    from pagewire.bench.engine_target import EngineTarget
    from pagewire.config import EngineConfig
    from pagewire.launch import runtime_directory
    from pagewire.settings import load_config

    config = load_config(EngineConfig, options.engine_flags, f"pagewire bench {options.kind} --")
    directory = stack.enter_context(runtime_directory())
    try:
        engine = await stack.enter_async_context(
            EngineTarget(config, directory, options.start_timeout)
        )
    except TimeoutError:
        raise ConfigError(f"the engine was not ready after {options.start_timeout:g} s") from None
    ready = engine.ready
    facts = {
        "model": ready.model_name,
        "dtype": ready.dtype,
        "device": ready.device,
        "engine_flags": " ".join(options.engine_flags),
    }
    return _Place(engine, ready.vocab_size, facts)


def _asks(options: argparse.Namespace, vocab_size: int, rng: random.Random) -> Sequence[Ask]:
    prompt = _lengths("--input-len", options.input_len)
    output = _lengths("--output-len", options.output_len)
    count = options.num_requests
    if options.workload == "text":
        return random_text(count, prompt, output, rng)
    if options.workload == "file":
        if options.file is None:
            raise ConfigError("--workload file needs --file")
        return from_file(Path(options.file), count, output)
    if options.workload == "random":
        return random_ids(count, prompt, output, vocab_size, rng)
    return shared_prefix(
        count, options.prefix_len, options.num_prefixes, prompt, output, vocab_size, rng
    )


def _rng(purpose: str, options: argparse.Namespace) -> random.Random:
    return random.Random(f"{purpose}/{options.seed}")  # noqa: S311


def _lengths(flag: str, text: str) -> Lengths:
    try:
        return Lengths.parse(text)
    except ValueError as error:
        raise ConfigError(f"{flag}: {error}") from None


def _loads(options: argparse.Namespace, count: int) -> list[Load]:
    """Of each run; several differ in their concurrency."""
    if options.kind == "throughput":
        return [Load(concurrency=count)]
    if options.kind == "latency":
        return [Load(concurrency=1)]
    values: tuple[int, ...] = options.concurrency or ()
    if len(values) > 1 and values[-1] > count:
        raise ConfigError(
            f"--concurrency: {values[-1]} cannot be in flight of --num-requests {count}"
        )
    if options.request_rate is None:
        return [
            Load(concurrency=value, max_seconds=options.max_seconds)
            for value in values or (_DEFAULT_CONCURRENCY,)
        ]
    return [
        Load(
            concurrency=value,
            rate=options.request_rate,
            burstiness=options.burstiness,
            max_seconds=options.max_seconds,
        )
        for value in values or (None,)
    ]


async def _warm_up(options: argparse.Namespace, place: _Place, load: Load, turn: int) -> None:
    """Other prompts of the same kind, so that the run's own are in no cache.

    Raises RequestFailed if not one succeeds before the first run: then there is nothing to
    measure. A server that fails later has its failures counted, beside what was measured.
    """
    rng = _rng("warm", options)
    asks = [
        type(ask)(min(ask.max_tokens, _WARM_UP_TOKENS), ask.ids, ask.text)
        for ask in _asks(options, place.vocab_size, rng)[: options.warm_up]
    ]
    if options.workload == "file":
        asks = asks[:1]
    if not asks:
        return
    records = await run_load(
        place.target, asks, Load(concurrency=min(len(asks), load.concurrency or len(asks))), rng
    )
    if turn == 0 and not any(record.ok for record in records):
        raise RequestFailed(records[0].error or "", f"no warm-up request: {records[0].message}")


def _settings(options: argparse.Namespace, place: _Place, load: Load) -> dict[str, Any]:
    """What makes the run again."""
    names = (
        *("kind", "target", "model", "workload", "file", "num_requests", "input_len"),
        *("output_len", "seed", "warm_up", "temperature", "stop_at_eos", "extra_body", "label"),
    )
    settings = {name: getattr(options, name, None) for name in names}
    if options.workload == "shared-prefix":
        settings |= {"prefix_len": options.prefix_len, "num_prefixes": options.num_prefixes}
    settings |= {
        "vocab_size": place.vocab_size or None,
        "loop": "closed" if load.rate is None else "open",
        "concurrency": load.concurrency,
        "request_rate": None if load.rate is None else str(load.rate),
        "burstiness": None if load.rate is None else load.burstiness,
        "max_seconds": None if load.max_seconds == float("inf") else load.max_seconds,
    }
    return settings | place.facts


class _Progress:
    """A bar on stderr, where that is a terminal."""

    def __init__(self, total: int, *, quiet: bool) -> None:
        self._total = total
        self._failed = 0
        self._bar: Any = None
        self._quiet = quiet or not sys.stderr.isatty()

    def __enter__(self) -> _Progress:
        if not self._quiet:
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
            from rich.progress import TimeElapsedColumn as Elapsed

            self._bar = Progress(
                *(BarColumn(), MofNCompleteColumn(), Elapsed()),
                TextColumn("{task.description}"),
                console=Console(stderr=True),
                transient=True,
            )
            self._bar.start()
            self._task = self._bar.add_task("", total=self._total)
        return self

    def __exit__(self, *_exc: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def advance(self, record: Record) -> None:
        if self._bar is None:
            return
        self._failed += not record.ok
        description = f"{self._failed} failed" if self._failed else ""
        self._bar.update(self._task, advance=1, description=description)


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime
