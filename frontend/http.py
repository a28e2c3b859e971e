"""HTTP beside gRPC, in the same event loop: /metrics, /healthz, /readyz, and the routes of
frontend/openai/ and frontend/web/."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from typing import TYPE_CHECKING

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from frontend.gate import HttpGate
from frontend.metrics_page import MetricsPage
from frontend.openai.errors import plain_error
from pagewire.errors import ConfigError
from pagewire.obs.complaints import COMPLAINT_INTERVAL_S

if TYPE_CHECKING:
    import ssl
    from collections.abc import Iterator, Sequence

    from starlette.requests import Request

    from frontend.auth import Auth
    from frontend.health import HealthBoard
    from frontend.metrics import Metrics
    from pagewire.obs.complaints import Complaints


class _Seldom(logging.Filter):
    """Lets uvicorn's line about a stranger's garbage through once in a while."""

    _next_at = 0.0

    def filter(self, record: logging.LogRecord) -> bool:
        if record.msg != _GARBAGE:
            return True
        if record.created < self._next_at:
            return False
        self._next_at = record.created + COMPLAINT_INTERVAL_S
        return True


_GARBAGE = "Invalid HTTP request received."
_seldom = _Seldom()


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers: frontend/server.py decides when it ends."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class HttpServer:
    def __init__(
        self,
        host: str,
        port: int,
        metrics: Metrics,
        health: HealthBoard,
        *,
        auth: Auth,
        complaints: Complaints,
        tls: ssl.SSLContext | None = None,
        routes: Sequence[Route] = (),
    ) -> None:
        self._host, self._wanted_port = host, port
        self.app = make_app(metrics, health, routes)
        config = uvicorn.Config(
            HttpGate(self.app, auth, complaints),
            lifespan="off",
            ws="none",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=1,
        )
        config.load()
        logging.getLogger("uvicorn.error").addFilter(_seldom)
        config.ssl = tls
        self._server = _Server(config)

    @property
    def address(self) -> str:
        """host:port as bound."""
        return f"{self._host}:{self._port}"

    async def start(self) -> None:
        """Binds and serves. Raises ConfigError when the port cannot be had."""
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        # With its protocol, which tells asyncio to switch Nagle's algorithm off.
        self._socket = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self._socket.bind((self._host, self._wanted_port))
        except OSError as error:
            self._socket.close()
            raise ConfigError(
                f"--http-port: cannot bind {self._host}:{self._wanted_port}: {error.strerror}"
            ) from None
        self._port: int = self._socket.getsockname()[1]
        # Accepts (into the backlog) from here on, before the task has run.
        self._socket.listen(128)
        self._task = asyncio.get_running_loop().create_task(
            self._server.serve(sockets=[self._socket]), name="http"
        )

    async def close(self) -> None:
        self._server.should_exit = True
        await self._task
        self._socket.close()


def make_app(metrics: Metrics, health: HealthBoard, routes: Sequence[Route] = ()) -> Starlette:
    page = MetricsPage(metrics)

    async def get_metrics(request: Request) -> Response:
        body, content_type = page.get(request.headers.get("accept", ""))
        return Response(body, headers={"content-type": content_type})

    async def healthz(request: Request) -> Response:
        return PlainTextResponse("ok\n")

    async def no_route(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        told = plain_error(error.status_code, error.detail)
        return Response(told.body, told.status, error.headers, "application/json")

    async def readyz(request: Request) -> Response:
        if health.serving:
            return PlainTextResponse("ok\n")
        return PlainTextResponse("not serving\n", status_code=503)

    return Starlette(
        routes=[
            Route("/metrics", get_metrics),
            Route("/healthz", healthz),
            Route("/readyz", readyz),
            *routes,
        ],
        exception_handlers={HTTPException: no_route},
    )
