"""AdminService, for operators on its own port."""

from __future__ import annotations

from typing import TYPE_CHECKING

from frontend import convert
from pagewire.v1 import admin_pb2_grpc

if TYPE_CHECKING:
    from frontend.dispatcher import Dispatcher
    from frontend.interceptors import Context
    from pagewire.v1 import admin_pb2


class AdminServicer(admin_pb2_grpc.AdminServiceServicer):
    def __init__(self, dispatcher: Dispatcher, drain_timeout: float) -> None:
        self._dispatcher = dispatcher
        self._drain_timeout = drain_timeout

    async def Drain(
        self, request: admin_pb2.DrainRequest, context: Context
    ) -> admin_pb2.DrainResponse:
        timeout = convert.drain_timeout(request)
        self._dispatcher.drain()
        unfinished = await self._dispatcher.wait_idle(
            self._drain_timeout if timeout is None else timeout
        )
        return convert.drain_response(unfinished)

    async def ResetPrefixCache(
        self, request: admin_pb2.ResetPrefixCacheRequest, context: Context
    ) -> admin_pb2.ResetPrefixCacheResponse:
        freed = await self._dispatcher.engine.reset_prefix_cache()
        return convert.reset_prefix_cache_response(freed)

    async def GetStats(
        self, request: admin_pb2.GetStatsRequest, context: Context
    ) -> admin_pb2.GetStatsResponse:
        return convert.stats_response(self._dispatcher.stats())
