"""AdminService, for operators on its own port."""

from __future__ import annotations

from typing import TYPE_CHECKING

from frontend.adapters import load_adapter, survey, unload_adapter
from frontend.convert import answers, calls
from frontend.engine_drain import drain_engine, reset_prefix_caches
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
        timeout = calls.drain_timeout(request)
        limit_s = self._drain_timeout if timeout is None else timeout
        engine = calls.drain_engine(request)
        if engine is not None:
            left = await drain_engine(self._dispatcher.engine_side, engine, limit_s)
            return answers.drain_response(left)
        self._dispatcher.drain()
        unfinished = await self._dispatcher.wait_idle(limit_s)
        return answers.drain_response(unfinished)

    async def ResetPrefixCache(
        self, request: admin_pb2.ResetPrefixCacheRequest, context: Context
    ) -> admin_pb2.ResetPrefixCacheResponse:
        freed = await reset_prefix_caches(self._dispatcher.engine_side)
        return answers.reset_prefix_cache_response(freed)

    async def GetStats(
        self, request: admin_pb2.GetStatsRequest, context: Context
    ) -> admin_pb2.GetStatsResponse:
        return answers.stats_response(self._dispatcher.stats())

    async def LoadAdapter(
        self, request: admin_pb2.LoadAdapterRequest, context: Context
    ) -> admin_pb2.LoadAdapterResponse:
        side = self._dispatcher.engine_side
        await load_adapter(side, request.name, request.path)
        return answers.load_adapter_response(request.name, survey(side))

    async def UnloadAdapter(
        self, request: admin_pb2.UnloadAdapterRequest, context: Context
    ) -> admin_pb2.UnloadAdapterResponse:
        await unload_adapter(self._dispatcher.engine_side, request.name)
        return answers.unload_adapter_response()

    async def ListAdapters(
        self, request: admin_pb2.ListAdaptersRequest, context: Context
    ) -> admin_pb2.ListAdaptersResponse:
        return answers.list_adapters_response(survey(self._dispatcher.engine_side))
