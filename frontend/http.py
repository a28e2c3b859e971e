"""HTTP beside gRPC, in the same event loop: /metrics, /healthz, /readyz."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from typing import TYPE_CHECKING

import uvicorn
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from pagewire.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from starlette.requests import Request

    from frontend.health import HealthBoard
    from frontend.metrics import Metrics


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers: frontend/server.py decides when it ends."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class HttpServer:
    def __init__(self, host: str, port: int, metrics: Metrics, health: HealthBoard) -> None:
        self._host, self._wanted_port = host, port
        self._server = _Server(
            uvicorn.Config(
                make_app(metrics, health),
                lifespan="off",
                ws="none",
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_graceful_shutdown=1,
            )
        )

    @property
    def address(self) -> str:
        """host:port as bound."""
        return f"{self._host}:{self._port}"

    async def start(self) -> None:
        """Binds and serves. Raises ConfigError when the port cannot be had."""
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        self._socket = socket.socket(family, socket.SOCK_STREAM)
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


def make_app(metrics: Metrics, health: HealthBoard) -> Starlette:
    async def get_metrics(request: Request) -> Response:
        return Response(metrics.exposition(), headers={"content-type": CONTENT_TYPE_LATEST})

    async def healthz(request: Request) -> Response:
        return PlainTextResponse("ok\n")

    async def readyz(request: Request) -> Response:
        if health.serving:
            return PlainTextResponse("ok\n")
        return PlainTextResponse("not serving\n", status_code=503)

    return Starlette(
        routes=[
            Route("/metrics", get_metrics),
            Route("/healthz", healthz),
            Route("/readyz", readyz),
        ]
    )
