"""Builds the frontend's servers and carries them from start to drained exit.

start -> (NOT_SERVING until engine and tokenizer are there) -> SERVING
SIGTERM: NOT_SERVING, still accept (drain_grace), then refuse new, finish running
         (drain_timeout), end the rest, exit 0
a second signal, or the launcher's death: end at once
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import time
from typing import TYPE_CHECKING, Any

import grpc
from grpc_health.v1 import health_pb2_grpc

from frontend.admin_servicer import AdminServicer
from frontend.auth import Auth
from frontend.bodies import Bodies
from frontend.call_trace import CallTracing
from frontend.dispatcher import Dispatcher
from frontend.gate import Gate
from frontend.health import HealthBoard
from frontend.http import HttpServer
from frontend.interceptors import Edge
from frontend.kserve.servicer import InferenceServicer as KserveServicer
from frontend.metrics import Metrics
from frontend.model_servicer import ModelServicer
from frontend.openai.adapters import adapter_routes
from frontend.openai.routes import openai_routes
from frontend.reflection import add_reflection
from frontend.resume import Resumables
from frontend.servicer import InferenceServicer
from frontend.tls import tls_of
from frontend.tokenizer_servicer import TokenizerServicer
from frontend.vllm_engine import protocol as vllm_protocol
from frontend.watched_file import watch_forever
from frontend.web.routes import live_route, page_routes
from pagewire import collector
from pagewire.errors import ConfigError, Unavailable
from pagewire.kserve import inference_pb2_grpc as kserve_pb2_grpc
from pagewire.launch import ORPHANED
from pagewire.obs import ready
from pagewire.obs.complaints import Complaints
from pagewire.obs.traces import Tracer, find_endpoint
from pagewire.v1 import (
    admin_pb2_grpc,
    inference_pb2_grpc,
    model_pb2_grpc,
    tokenizer_pb2_grpc,
)

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from frontend.watched_file import WatchedFiles
    from pagewire.config import FrontendConfig

logger = logging.getLogger(__name__)

PUBLIC_SERVICES = (
    "pagewire.v1.InferenceService",
    "pagewire.v1.TokenizerService",
    "pagewire.v1.ModelService",
    "inference.GRPCInferenceService",
)
ADMIN_SERVICES = ("pagewire.v1.AdminService",)
HEALTH_SERVICE = "grpc.health.v1.Health"
MIN_OPEN_CALLS = 4096
FLUSH_S = 1.0
"""How long the last frames and statuses may take to leave after the drain."""


class Frontend:
    """One frontend process's servers, all in the running event loop."""

    def __init__(self, config: FrontendConfig) -> None:
        self._config = config
        receiver = find_endpoint(config.otlp_endpoint)
        self.tracer = None if receiver is None else Tracer(*receiver)
        """None where no spans are made."""
        self._tracing = CallTracing(self.tracer)
        self.metrics = Metrics()
        self._services: tuple[str, ...] = PUBLIC_SERVICES
        if config.vllm_protocol:
            vllm_protocol.check_installed()
            self._services += (vllm_protocol.SERVICE,)
        self.health = HealthBoard(("", *self._services), ADMIN_SERVICES)
        self.dispatcher = Dispatcher(config, self.metrics, self.health)
        self.resumables = Resumables(
            self.dispatcher, config.resume_ttl, config.max_requests, clock=time.monotonic
        )
        self._complaints = Complaints(logger)
        page = page_routes() if config.web_page else []
        self._auth = Auth(config.api_keys, config.auth_exempt, [route.path for route in page])
        self._tls = tls_of(config)
        self._http = HttpServer(
            config.host,
            config.http_port,
            self.metrics,
            self.health,
            auth=self._auth,
            complaints=self._complaints,
            tls=None if self._tls is None else self._tls.http_context(),
            routes=[
                *page,
                live_route(self.dispatcher, self.metrics, self.health),
                *openai_routes(
                    self.dispatcher,
                    self.metrics,
                    self.health,
                    self._tracing,
                    max_body_bytes=config.max_message_mib * 2**20,
                ),
                *adapter_routes(
                    self.dispatcher,
                    self.metrics,
                    self._tracing,
                    max_body_bytes=config.max_message_mib * 2**20,
                    has_keys=config.api_keys is not None,
                ),
            ],
        )
        self._signals = 0
        self._closed = False
        self._stop = asyncio.Event()
        self._stop_now = asyncio.Event()

    async def start(self) -> None:
        """Binds all ports. Raises ConfigError or BindError; does not wait for the engine."""
        config = self._config
        self._public = self._grpc_server((*self._services, HEALTH_SERVICE))
        inference_pb2_grpc.add_InferenceServiceServicer_to_server(
            InferenceServicer(self.dispatcher, self.resumables), self._public
        )
        tokenizer_pb2_grpc.add_TokenizerServiceServicer_to_server(
            TokenizerServicer(self.dispatcher), self._public
        )
        model_pb2_grpc.add_ModelServiceServicer_to_server(
            ModelServicer(self.dispatcher), self._public
        )
        kserve_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(
            KserveServicer(self.dispatcher, self.health), self._public
        )
        if config.vllm_protocol:
            vllm_protocol.add_to(self._public, self.dispatcher, self.resumables, self.health)
        self._admin = self._grpc_server((*ADMIN_SERVICES, HEALTH_SERVICE))
        admin_pb2_grpc.add_AdminServiceServicer_to_server(
            AdminServicer(self.dispatcher, config.drain_timeout), self._admin
        )
        self.address = self._bind(self._public, "--port", config.host, config.port)
        self.admin_address = self._bind(
            self._admin, "--admin-port", config.admin_host, config.admin_port
        )
        await self._http.start()
        await self.health.start()
        await self.dispatcher.start()
        await self._public.start()
        await self._admin.start()
        self._watch = asyncio.get_running_loop().create_task(
            watch_forever(self._watched()), name="watch-files"
        )
        logger.info(
            "listening: grpc %s, admin %s, http %s",
            self.address,
            self.admin_address,
            self.http_address,
        )

    def _watched(self) -> list[WatchedFiles[Any]]:
        files: list[WatchedFiles[Any] | None] = [
            self._auth.keys,
            self.dispatcher.tenants.limits,
            None if self._tls is None else self._tls.watched,
        ]
        return [watched for watched in files if watched is not None]

    @property
    def http_address(self) -> str:
        return self._http.address

    async def run(self) -> None:
        """Serves until a signal, then drains. Raises what start() raises."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)
        loop.add_signal_handler(ORPHANED, self._on_orphaned)
        await self.start()
        collector.settle()
        announce = loop.create_task(self._announce(), name="announce")
        await self._stop.wait()
        announce.cancel()
        await asyncio.gather(announce, return_exceptions=True)
        await self.drain()

    async def drain(self) -> None:
        """Finishes what runs, ends what does not finish, and closes everything."""
        self.health.set(draining=True)
        await self._unless_hurried(asyncio.sleep(self._config.drain_grace))
        self.dispatcher.drain()
        logger.info("draining %d requests", self.dispatcher.admission.requests)
        await self._unless_hurried(self.dispatcher.wait_idle(self._config.drain_timeout))
        await self.close()

    async def _unless_hurried(self, wait: Coroutine[Any, Any, object]) -> None:
        """Until `wait` is over, or a second signal comes."""
        hurry = asyncio.ensure_future(self._stop_now.wait())
        task = asyncio.ensure_future(wait)
        await asyncio.wait((task, hurry), return_when=asyncio.FIRST_COMPLETED)
        for pending in (task, hurry):
            pending.cancel()
        await asyncio.gather(task, hurry, return_exceptions=True)

    async def close(self) -> None:
        """Ends what still runs with UNAVAILABLE and frees every port. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._watch.cancel()
        unfinished = self.dispatcher.admission.requests
        if unfinished:
            logger.warning("ending %d unfinished requests", unfinished)
            self.dispatcher.fail_all(
                Unavailable("draining", "the server was shut down before the request ended")
            )
            self.resumables.close()
            await self.dispatcher.wait_idle(FLUSH_S)
        # Watches of health never end by themselves: the grace is for the last trailers.
        await asyncio.gather(self._public.stop(FLUSH_S / 2), self._admin.stop(FLUSH_S / 2))
        await self._http.close()
        await self.health.close()
        await self.dispatcher.close()
        if self.tracer is not None:
            await asyncio.to_thread(self.tracer.close)

    async def _announce(self) -> None:
        await self.health.wait_serving()
        engine = self.dispatcher.stats().ready
        ready.write_ready_file(
            self._config.ready_file,
            {
                ready.GRPC: self.address,
                ready.ADMIN: self.admin_address,
                ready.HTTP: self.http_address,
                ready.MODEL: engine.model_name if engine is not None else "",
            },
        )

    def _on_orphaned(self) -> None:
        logger.error("the launcher was killed")
        self._stop.set()
        self._stop_now.set()

    def _on_signal(self) -> None:
        self._signals += 1
        self._stop.set()
        if self._signals > 1:
            self._stop_now.set()

    def _grpc_server(self, services: tuple[str, ...]) -> grpc.aio.Server:
        config = self._config
        max_message_bytes = config.max_message_mib * 2**20
        options: list[tuple[str, int]] = []
        if config.max_connection_age:
            options.append(("grpc.max_connection_age_ms", int(config.max_connection_age * 1000)))
            if config.max_connection_age_grace:
                grace_ms = int(config.max_connection_age_grace * 1000)
                options.append(("grpc.max_connection_age_grace_ms", grace_ms))
        server = grpc.aio.server(
            interceptors=(
                Gate(self._auth, self.metrics, self._complaints),
                Bodies(),
                Edge(self.metrics, self._tracing),
            ),
            # Admission counts requests whose message has come. This bounds the calls that
            # are only opened, over all connections; gRPC refuses the rest by itself.
            maximum_concurrent_rpcs=max(MIN_OPEN_CALLS, 4 * config.max_requests),
            options=[
                *options,
                ("grpc.max_concurrent_streams", config.max_concurrent_streams),
                ("grpc.server_handshake_timeout_ms", 20_000),
                ("grpc.max_receive_message_length", max_message_bytes),
                ("grpc.max_send_message_length", max_message_bytes),
                # A port in use is an error, not a second listener on the same port.
                ("grpc.so_reuseport", 0),
                # Envoy and Go clients ping every 10 s and more, also without calls; the
                # defaults would answer with too_many_pings (vllm-project/vllm#55102).
                ("grpc.http2.min_ping_interval_without_data_ms", 5000),
                ("grpc.http2.max_ping_strikes", 0),
                ("grpc.keepalive_permit_without_calls", 1),
                # Finds clients that vanished without a FIN, so that their requests end.
                ("grpc.keepalive_time_ms", 30_000),
                ("grpc.keepalive_timeout_ms", 20_000),
            ],
        )
        health_pb2_grpc.add_HealthServicer_to_server(self.health.servicer, server)
        if config.reflection:
            add_reflection(server, services)
        return server

    def _bind(self, server: grpc.aio.Server, setting: str, host: str, port: int) -> str:
        target = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        bound = 0
        with contextlib.suppress(RuntimeError):
            if self._tls is None:
                bound = server.add_insecure_port(target)
            else:
                bound = server.add_secure_port(target, self._tls.grpc_credentials())
        if bound == 0:
            raise ConfigError(f"{setting}: cannot bind {target}, perhaps it is in use")
        return f"{target.rpartition(':')[0]}:{bound}"
