"""inference.GRPCInferenceService: KServe's and Triton's clients, with text in and text out.

Requests take the path of InferenceService.
"""

from __future__ import annotations

import asyncio
import contextlib
from importlib.metadata import version
from typing import TYPE_CHECKING

from frontend.generation import Generation
from frontend.interceptors import current_call, send, status_of
from frontend.kserve import convert
from frontend.kserve.convert import Output
from frontend.stream import Queued
from frontend.validate import check_model, validate
from pagewire.errors import InvalidRequest, NotFound
from pagewire.kserve import inference_pb2_grpc

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from frontend.dispatcher import Dispatcher
    from frontend.health import HealthBoard
    from frontend.interceptors import Context
    from frontend.kserve.convert import InferCall
    from frontend.request import Job
    from pagewire.kserve import inference_pb2

MAX_STREAM_REQUESTS = 256
"""Requests of one stream that are worked on at the same time; further ones are not read."""


class InferenceServicer(inference_pb2_grpc.GRPCInferenceServiceServicer):
    def __init__(self, dispatcher: Dispatcher, health: HealthBoard) -> None:
        self._dispatcher = dispatcher
        self._health = health

    async def ServerLive(
        self, request: inference_pb2.ServerLiveRequest, context: Context
    ) -> inference_pb2.ServerLiveResponse:
        return convert.server_live()

    async def ServerReady(
        self, request: inference_pb2.ServerReadyRequest, context: Context
    ) -> inference_pb2.ServerReadyResponse:
        return convert.server_ready(ready=self._health.serving)

    async def ModelReady(
        self, request: inference_pb2.ModelReadyRequest, context: Context
    ) -> inference_pb2.ModelReadyResponse:
        ready = False
        if self._health.serving:
            with contextlib.suppress(NotFound):
                check_model(convert.model_name(request), self._dispatcher.limits(), field="name")
                ready = True
        return convert.model_ready(ready=ready)

    async def ServerMetadata(
        self, request: inference_pb2.ServerMetadataRequest, context: Context
    ) -> inference_pb2.ServerMetadataResponse:
        return convert.server_metadata(version("pagewire"))

    async def ModelMetadata(
        self, request: inference_pb2.ModelMetadataRequest, context: Context
    ) -> inference_pb2.ModelMetadataResponse:
        limits = self._dispatcher.limits()
        name = convert.model_name(request)
        check_model(name, limits, field="name")
        return convert.model_metadata(name)

    async def ModelInfer(
        self, request: inference_pb2.ModelInferRequest, context: Context
    ) -> inference_pb2.ModelInferResponse:
        call = convert.infer_call(request)
        if call.generate.streams:
            raise InvalidRequest("stream", "ModelInfer cannot stream; ModelStreamInfer can")
        with _own_field_names(call):
            job = self._job(call)
            async with Generation(self._dispatcher, job, current_call().deadline) as generation:
                response = await _whole(generation, job, call, final=None)
        await send(context.send_initial_metadata(current_call().metadata))
        return response

    async def ModelStreamInfer(
        self, requests: AsyncIterator[inference_pb2.ModelInferRequest], context: Context
    ) -> None:
        await send(context.send_initial_metadata(current_call().metadata))
        writer = _Writer(context)
        room = asyncio.Semaphore(MAX_STREAM_REQUESTS)
        try:
            async with asyncio.TaskGroup() as tasks:
                async for request in requests:
                    await room.acquire()
                    task = tasks.create_task(self._answer(request, writer))
                    task.add_done_callback(lambda _: room.release())
        except ExceptionGroup as group:
            raise group.exceptions[0] from None

    async def _answer(self, request: inference_pb2.ModelInferRequest, writer: _Writer) -> None:
        """One request of a stream. Raises Cancelled if the client is gone."""
        try:
            call = convert.infer_call(request)
            with _own_field_names(call):
                job = self._job(call)
                async with Generation(self._dispatcher, job, current_call().deadline) as generation:
                    if call.generate.streams:
                        await _stream(generation, job, call, writer)
                    else:
                        await writer.write(await _whole(generation, job, call, final=True))
        except Exception as error:
            status = status_of(error)
            await writer.fail(convert.request_id(request), f"{status.code.name}: {status.message}")

    def _job(self, call: InferCall) -> Job:
        limits = self._dispatcher.limits()
        check_model(call.generate.model, limits, field="model_name")
        default_id = self._dispatcher.free_request_id(current_call().request_id)
        return validate(call.generate, limits, default_id, current_call().tenant)


class _Writer:
    """What the requests of one ModelStreamInfer share: gRPC takes one message at a time."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._free = asyncio.Lock()

    async def write(self, response: inference_pb2.ModelInferResponse) -> None:
        async with self._free:
            await send(self._context.write(convert.stream_response(response)))

    async def fail(self, request_id: str, message: str) -> None:
        async with self._free:
            await send(self._context.write(convert.stream_failure(request_id, message)))


async def _whole(
    generation: Generation, job: Job, call: InferCall, *, final: bool | None
) -> inference_pb2.ModelInferResponse:
    outputs, finish = await generation.whole()
    output = Output(
        texts=[output.text for output in outputs],
        num_tokens=[end.num_tokens for end in finish.outputs],
        ends=finish.outputs,
        final=final,
    )
    return convert.infer_response(call, job.model, output, len(generation.prompt_ids))


async def _stream(generation: Generation, job: Job, call: InferCall, writer: _Writer) -> None:
    num_input_tokens = len(generation.prompt_ids)
    async for item in generation:
        assert not isinstance(item, Queued), "nobody asked for places in the queue"
        texts, num_tokens = [""] * job.n, [0] * job.n
        texts[item.index], num_tokens[item.index] = item.text, len(item.token_ids)
        output = Output(texts, num_tokens, final=False)
        await writer.write(convert.infer_response(call, job.model, output, num_input_tokens))
    assert generation.finish is not None
    output = Output([""] * job.n, [0] * job.n, generation.finish.outputs, final=True)
    await writer.write(convert.infer_response(call, job.model, output, num_input_tokens))


@contextlib.contextmanager
def _own_field_names(call: InferCall) -> Iterator[None]:
    try:
        yield
    except InvalidRequest as error:
        raise InvalidRequest(call.name_field(error.field), error.message) from None
