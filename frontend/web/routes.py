"""The web page: a chat and a live view, as plain files, read once at the start.

The files hold nothing secret and need no key, so that the page can ask for one; what it
then asks for (/v1/..., /live) is behind the gate like every other call. Nothing is loaded
from elsewhere, and the policy below sees to it that nothing can be.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from starlette.responses import Response
from starlette.routing import Route

from frontend.web.live import LiveView

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from starlette.requests import Request

    from frontend.dispatcher import Dispatcher
    from frontend.health import HealthBoard
    from frontend.metrics import Metrics

_STATIC = Path(__file__).parent / "static"
_INDEX = "index.html"
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'"
)
_HEADERS = {
    "content-security-policy": _POLICY,
    "cross-origin-opener-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "cache-control": "no-cache",
}


def page_routes() -> list[Route]:
    """The page is at /, what it is made of under /web/."""
    return [
        Route("/" if path.name == _INDEX else f"/web/{path.name}", _serve(path))
        for path in sorted(_STATIC.iterdir())
        if path.suffix in _TYPES
    ]


def live_route(dispatcher: Dispatcher, metrics: Metrics, health: HealthBoard) -> Route:
    view = LiveView(dispatcher, metrics, health)

    async def get_live(request: Request) -> Response:
        headers = {"content-type": "application/json", "cache-control": "no-store"}
        return Response(view.get(), headers=headers)

    return Route("/live", get_live)


def _serve(path: Path) -> Callable[[Request], Awaitable[Response]]:
    body = path.read_bytes()
    headers = {**_HEADERS, "content-type": _TYPES[path.suffix]}

    async def get_file(request: Request) -> Response:
        return Response(body, headers=headers)

    return get_file
