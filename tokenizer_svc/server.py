"""The room's gRPC server, from its first worker to its drained exit.

start -> NOT_SERVING until all workers have loaded -> SERVING
SIGTERM or SIGINT: NOT_SERVING, open sequences go on to their end (DRAIN_SECONDS at
most), exit; a second signal ends at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
from typing import TYPE_CHECKING

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from pagewire import collector, grpc_core
from pagewire.errors import ConfigError
from pagewire.obs import ready
from pagewire.v1 import detokenizer_pb2_grpc, tokenizer_pb2_grpc
from tokenizer_svc.servicer import DetokenizerServicer, TokenizerServicer, Work

if TYPE_CHECKING:
    from pagewire.config import TokenizerConfig
    from tokenizer_svc.pool import WorkerPool

log = logging.getLogger(__name__)

SERVICES = ("", "pagewire.v1.TokenizerService", "pagewire.v1.DetokenizerService")
"""Names that grpc.health.v1 answers for; "" is the whole server."""
DRAIN_SECONDS = 30.0
_STOP_GRACE_SECONDS = 0.2
_MAX_UNIX_PATH = 107


class TokenizerServer:
    """One server in the running event loop."""

    def __init__(self, config: TokenizerConfig, pool: WorkerPool, model_name: str) -> None:
        self._config = config
        self._pool = pool
        self._model_name = model_name
        self._work = Work()
        self._health = health.aio.HealthServicer()  # type: ignore[attr-defined]
        self._health_tasks: set[asyncio.Task[None]] = set()
        self._server = grpc.aio.server(options=_options(config.tokenizer_max_message_mib << 20))
        self._draining = False
        self.address = ""
        """What was bound: host:port or unix:/path."""

    async def start(self) -> None:
        """Binds, then waits for the workers and serves.

        Raises ConfigError if the address cannot be bound, ModelLoadError, ConfigError
        or InternalError if a worker cannot load.
        """
        tokenizer_pb2_grpc.add_TokenizerServiceServicer_to_server(
            TokenizerServicer(self._pool, self._work), self._server
        )
        detokenizer_pb2_grpc.add_DetokenizerServiceServicer_to_server(
            DetokenizerServicer(self._pool, self._work), self._server
        )
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        await self._set_health(False)
        self.address = _bind(self._server, self._config.tokenizer_bind)
        await self._server.start()
        facts = await self._pool.connect()
        self._pool.on_change = self._workers_changed
        await self._set_health(True)
        ready.write_ready_file(
            self._config.ready_file,
            {
                ready.GRPC: self.address,
                ready.MODEL: self._model_name,
                ready.CHAT_TEMPLATE: facts.has_chat_template,
            },
        )
        log.info(
            "serving %s on %s with %d workers (vocabulary %d, chat template: %s)",
            self._model_name,
            self.address,
            self._pool.num_workers,
            facts.vocab_size,
            "yes" if facts.has_chat_template else "no",
        )

    async def drain(self, at_once: asyncio.Event) -> None:
        """Waits for open sequences and calls; not past DRAIN_SECONDS, nor once
        `at_once` is set."""
        self._draining = True
        await self._set_health(False)
        idle = asyncio.create_task(self._work.wait_idle())
        hurry = asyncio.create_task(at_once.wait())
        done, _ = await asyncio.wait(
            (idle, hurry), timeout=DRAIN_SECONDS, return_when=asyncio.FIRST_COMPLETED
        )
        for task in (idle, hurry):
            task.cancel()
        if idle not in done:
            log.warning("stopping with work in flight")

    async def stop(self) -> None:
        """Ends the server and the workers."""
        for task in self._health_tasks:
            task.cancel()
        await self._server.stop(_STOP_GRACE_SECONDS)
        await self._pool.close()

    def _workers_changed(self, any_live: bool) -> None:
        if not self._draining:
            task = asyncio.get_running_loop().create_task(self._set_health(any_live))
            self._health_tasks.add(task)
            task.add_done_callback(self._health_tasks.discard)

    async def _set_health(self, serving: bool) -> None:
        status = health_pb2.HealthCheckResponse.ServingStatus
        for service in SERVICES:
            await self._health.set(service, status.SERVING if serving else status.NOT_SERVING)


async def run(config: TokenizerConfig, pool: WorkerPool, model_name: str) -> None:
    """Serves until SIGTERM or SIGINT. Raises what TokenizerServer.start raises."""
    signals, at_once = asyncio.Event(), asyncio.Event()

    def on_signal() -> None:
        (at_once if signals.is_set() else signals).set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    with grpc_core.patient_threads():
        server = TokenizerServer(config, pool, model_name)
    try:
        starting = asyncio.create_task(server.start())
        stopping = asyncio.create_task(signals.wait())
        await asyncio.wait((starting, stopping), return_when=asyncio.FIRST_COMPLETED)
        if not starting.done():
            starting.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await starting
            return
        await starting
        collector.settle()
        await stopping
        log.info("draining")
        await server.drain(at_once)
    finally:
        await server.stop()


def _options(max_message_bytes: int) -> list[tuple[str, int]]:
    return [
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", max_message_bytes),
        # A second server on the port must fail, not share it.
        ("grpc.so_reuseport", 0),
        # Clients ping on idle connections; the default answers GOAWAY too_many_pings.
        ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
        ("grpc.http2.max_ping_strikes", 0),
        ("grpc.keepalive_permit_without_calls", 1),
    ]


def _bind(server: grpc.aio.Server, address: str) -> str:
    """Binds host:port or unix:/path and returns it with the port that was bound."""
    if address.startswith("unix:"):
        path = address.removeprefix("unix:")
        if len(path.encode()) > _MAX_UNIX_PATH:
            raise ConfigError(
                f"--tokenizer-bind {address}: a socket path has {_MAX_UNIX_PATH} bytes at most"
            )
        host = ""
    else:
        host, _, port = address.rpartition(":")
        if not host or not port.isdecimal():
            raise ConfigError(f"--tokenizer-bind {address}: neither host:port nor unix:/path")
    try:
        bound = server.add_insecure_port(address)
    except RuntimeError:
        bound = 0
    if not bound:
        raise ConfigError(f"--tokenizer-bind {address}: cannot be bound (in use, or not ours)")
    return f"{host}:{bound}" if host else address
