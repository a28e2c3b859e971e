"""vLLM's routes that load and unload adapters.

The HTTP port is everybody's, so they are only for admins' keys, and off where there are no
keys; AdminService has a port of its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from starlette.routing import Route

from frontend.adapters import load_adapter, survey, unload_adapter
from frontend.openai.exchange import Endpoint
from frontend.openai.requests import LoadAdapterBody, UnloadAdapterBody
from frontend.openai.responses import LoadedAdapter, UnloadedAdapter
from pagewire.errors import FeatureDisabled, NotFound

if TYPE_CHECKING:
    from frontend.call_trace import CallTracing
    from frontend.dispatcher import Dispatcher
    from frontend.metrics import Metrics
    from frontend.openai.exchange import Exchange

_FIELDS = {"name": "lora_name", "path": "lora_path"}


def adapter_routes(
    dispatcher: Dispatcher,
    metrics: Metrics,
    tracing: CallTracing,
    *,
    max_body_bytes: int,
    has_keys: bool,
) -> list[Route]:
    side = dispatcher.engine_side

    def check() -> None:
        if not has_keys:
            raise FeatureDisabled("without --api-keys adapters are loaded by AdminService only")

    def name_field(field: str) -> str:
        return _FIELDS.get(field, field)

    async def load(exchange: Exchange) -> None:
        check()
        body = exchange.read(LoadAdapterBody)
        exchange.name_field = name_field
        await load_adapter(side, body.lora_name, body.lora_path)
        named = (it.info for it in survey(side).adapters if it.info.name == body.lora_name)
        if (found := next(named, None)) is None:  # unloaded already
            raise NotFound("adapter", body.lora_name, field="name")
        await exchange.answer(LoadedAdapter(found.name, found.path, found.rank))

    async def unload(exchange: Exchange) -> None:
        check()
        body = exchange.read(UnloadAdapterBody)
        exchange.name_field = name_field
        await unload_adapter(side, body.lora_name)
        await exchange.answer(UnloadedAdapter(body.lora_name))

    handlers = {"/v1/load_lora_adapter": load, "/v1/unload_lora_adapter": unload}
    return [
        Route(
            path,
            Endpoint(path, handler, metrics, tracing, max_body_bytes=max_body_bytes),
            methods=["POST"],
        )
        for path, handler in handlers.items()
    ]
