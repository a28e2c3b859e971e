"""vllm.grpc.engine.VllmEngine: the protocol in which gateways drive vLLM.

It is token ids in and token ids out, with the gateway's own tokenizer before and behind;
requests take the path of InferenceService. What the protocol has and this server has not
ends with UNIMPLEMENTED, by which gateways know to do without.
"""

from __future__ import annotations

import contextlib
import time
from datetime import UTC, datetime
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from smg_grpc_proto import vllm_engine_pb2_grpc

from frontend.engine_drain import reset_prefix_caches
from frontend.generation import Generation
from frontend.interceptors import current_call, send
from frontend.stream import Queued
from frontend.validate import validate
from frontend.vllm_engine import convert
from pagewire.errors import InvalidRequest, NotFound, Unimplemented

if TYPE_CHECKING:
    from collections.abc import Iterator

    from smg_grpc_proto import vllm_engine_pb2
    from smg_grpc_proto.generated import common_pb2

    from frontend.dispatcher import Dispatcher
    from frontend.health import HealthBoard
    from frontend.interceptors import Context
    from frontend.request import Job
    from frontend.resume import Resumables


class VllmEngineServicer(vllm_engine_pb2_grpc.VllmEngineServicer):  # type: ignore[misc]
    def __init__(self, dispatcher: Dispatcher, resumables: Resumables, health: HealthBoard) -> None:
        self._dispatcher = dispatcher
        self._resumables = resumables
        self._health = health
        self._started = time.monotonic()
        self._last_received = 0.0

    async def Generate(self, request: vllm_engine_pb2.GenerateRequest, context: Context) -> None:
        self._last_received = time.time()
        with _own_field_names():
            job = self._job(request)
            async with Generation(self._dispatcher, job, current_call().deadline) as generation:
                if convert.wants_stream(request):
                    await self._stream(generation, context)
                    return
                outputs, finish = await generation.whole()
                prompt_ids = generation.prompt_ids
        await send(context.send_initial_metadata(current_call().metadata))
        for response in convert.completions(finish, outputs, prompt_ids):
            await send(context.write(response))

    async def _stream(self, generation: Generation, context: Context) -> None:
        await send(context.send_initial_metadata(current_call().metadata))
        async for item in generation:
            assert not isinstance(item, Queued), "nobody asked for places in the queue"
            response = convert.chunk(item, generation.prompt_ids, generation.num_cached_tokens)
            if response is not None:
                await send(context.write(response))
        assert generation.finish is not None
        for response in convert.completions(generation.finish, None, generation.prompt_ids):
            await send(context.write(response))

    def _job(self, request: vllm_engine_pb2.GenerateRequest) -> Job:
        limits = self._dispatcher.limits()
        default_id = self._dispatcher.free_request_id(current_call().request_id)
        return validate(convert.generate_call(request), limits, default_id, current_call().tenant)

    async def Abort(
        self, request: vllm_engine_pb2.AbortRequest, context: Context
    ) -> vllm_engine_pb2.AbortResponse:
        for request_id in convert.abort_ids(request):
            # It may have ended by itself meanwhile.
            with contextlib.suppress(NotFound):
                self._resumables.cancel(request_id)
        return convert.abort_response()

    async def HealthCheck(
        self, request: vllm_engine_pb2.HealthCheckRequest, context: Context
    ) -> vllm_engine_pb2.HealthCheckResponse:
        return convert.health_response(healthy=self._health.serving)

    async def GetModelInfo(
        self, request: vllm_engine_pb2.GetModelInfoRequest, context: Context
    ) -> vllm_engine_pb2.GetModelInfoResponse:
        limits = self._dispatcher.limits()
        return convert.model_info(limits, self._dispatcher.engine_side.served())

    async def GetServerInfo(
        self, request: vllm_engine_pb2.GetServerInfoRequest, context: Context
    ) -> vllm_engine_pb2.GetServerInfoResponse:
        return convert.server_info(
            self._dispatcher.stats(),
            uptime_s=time.monotonic() - self._started,
            last_received=self._last_received,
        )

    async def GetLoads(
        self, request: vllm_engine_pb2.GetLoadsRequest, context: Context
    ) -> vllm_engine_pb2.GetLoadsResponse:
        return convert.loads(
            request,
            self._dispatcher.stats(),
            num_queued_tokens=self._dispatcher.admission.queued_tokens,
            version=version("pagewire"),
            now=datetime.now(UTC),
        )

    async def FlushCache(
        self, request: common_pb2.FlushCacheRequest, context: Context
    ) -> common_pb2.FlushCacheResponse:
        # Also beside running requests, which keep what they hold: nothing to wait for.
        return convert.flush_response(await reset_prefix_caches(self._dispatcher.engine_side))

    async def Embed(self, request: Any, context: Context) -> None:
        raise Unimplemented("this server makes no embeddings")

    async def StartProfile(self, request: Any, context: Context) -> None:
        raise Unimplemented("this server has no profiler")

    async def StopProfile(self, request: Any, context: Context) -> None:
        raise Unimplemented("this server has no profiler")

    async def GetTokenizer(self, request: Any, context: Context) -> None:
        raise Unimplemented("the tokenizer's files are not to be had from here")

    async def SubscribeKvEvents(self, request: Any, context: Context) -> None:
        raise Unimplemented("this server publishes no KV cache events")


@contextlib.contextmanager
def _own_field_names() -> Iterator[None]:
    try:
        yield
    except InvalidRequest as error:
        raise InvalidRequest(convert.field_name(error.field), error.message) from None
