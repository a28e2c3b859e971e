"""grpc.health.v1, fed by the engine's heartbeat, the tokenizer's stream and the drain.

The protocol is grpcio's own servicer (Check, and a Watch that stays open and
reports each change). This file decides what is true:

    SERVING = engine ready and not stalled, tokenizer up, not draining
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from grpc_health.v1 import health, health_pb2

if TYPE_CHECKING:
    from collections.abc import Iterable

logger = logging.getLogger(__name__)

# grpc.health.v1.HealthCheckResponse.ServingStatus
SERVING = 1
NOT_SERVING = 2


@dataclass(frozen=True, slots=True)
class Condition:
    engine: bool = False
    tokenizer: bool = False
    stalled: bool = False
    draining: bool = False

    @property
    def serving(self) -> bool:
        return self.engine and self.tokenizer and not self.stalled and not self.draining


class _Servicer(health.aio.HealthServicer):  # type: ignore[name-defined,misc]
    """grpcio's does not implement List, and logs a traceback when it is called."""

    async def List(self, request: health_pb2.HealthListRequest, context: object) -> Any:
        statuses = {
            service: health_pb2.HealthCheckResponse(status=status)
            for service, status in self._server_status.items()
        }
        return health_pb2.HealthListResponse(statuses=statuses)


class HealthBoard:
    """The one place that knows whether this frontend serves.

    set() may be called from anywhere in the loop; watchers are told in order by
    one task. `services` share one status; `always_serving` are those whose use
    does not depend on it.
    """

    def __init__(self, services: Iterable[str], always_serving: Iterable[str] = ()) -> None:
        self._services = tuple(services)
        self._always = tuple(always_serving)
        self.servicer: Any = _Servicer()
        self.condition = Condition()
        self._changed = asyncio.Event()
        self._served = asyncio.Event()

    @property
    def serving(self) -> bool:
        return self.condition.serving

    async def start(self) -> None:
        for service in self._services:
            await self.servicer.set(service, NOT_SERVING)
        for service in self._always:
            await self.servicer.set(service, SERVING)
        self._task = asyncio.get_running_loop().create_task(self._publish(), name="health")

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    def set(self, **facts: bool) -> None:
        """Changes fields of the condition by name."""
        condition = replace(self.condition, **facts)
        if condition.serving != self.condition.serving:
            told = ", ".join(
                f"{name} {'yes' if on else 'no'}" for name, on in asdict(condition).items()
            )
            logger.info("%s (%s)", "serving" if condition.serving else "not serving", told)
        self.condition = condition
        self._changed.set()
        if condition.serving:
            self._served.set()

    async def wait_serving(self) -> None:
        """Returns once the frontend has served for the first time."""
        await self._served.wait()

    async def _publish(self) -> None:
        while True:
            await self._changed.wait()
            self._changed.clear()
            status = SERVING if self.serving else NOT_SERVING
            for service in self._services:
                await self.servicer.set(service, status)
