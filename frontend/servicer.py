"""InferenceService: validate -> submit -> pour -> convert."""

from __future__ import annotations

from typing import TYPE_CHECKING

from frontend.convert import answers, calls
from frontend.convert.frames import stream_frame
from frontend.frame_writer import FrameWriter
from frontend.generation import Generation
from frontend.interceptors import Context, current_call, send
from frontend.validate import check_request_id, validate
from pagewire.v1 import inference_pb2_grpc

if TYPE_CHECKING:
    from frontend.dispatcher import Dispatcher
    from frontend.request import Job
    from frontend.resume import Resumables
    from pagewire.v1 import inference_pb2


class InferenceServicer(inference_pb2_grpc.InferenceServiceServicer):
    def __init__(self, dispatcher: Dispatcher, resumables: Resumables) -> None:
        self._dispatcher = dispatcher
        self._resumables = resumables

    async def Generate(
        self, request: inference_pb2.GenerateRequest, context: Context
    ) -> inference_pb2.GenerateResponse:
        job = self._job(request)
        async with Generation(self._dispatcher, job, current_call().deadline) as generation:
            outputs, finish = await generation.whole()
        # Only now: until there is an answer, a failure stays Trailers-Only and retryable.
        await send(context.send_initial_metadata(current_call().metadata))
        return answers.generate_response(outputs, finish)

    # A coroutine that writes, rather than a generator: a cancel then arrives here at
    # the await, also in the middle of a write, and the request ends in that same turn.
    async def GenerateStream(
        self, request: inference_pb2.GenerateStreamRequest, context: Context
    ) -> None:
        async with self._generation(request) as generation:
            await send(context.send_initial_metadata(current_call().metadata))
            finish = await generation.pour(FrameWriter(context.write, stream_frame))
            await send(context.write(answers.final_frame(finish)))

    async def Cancel(
        self, request: inference_pb2.CancelRequest, context: Context
    ) -> inference_pb2.CancelResponse:
        request_id = calls.cancel_id(request)
        check_request_id(request_id)
        self._resumables.cancel(request_id)
        return answers.cancel_response()

    def _generation(self, request: inference_pb2.GenerateStreamRequest) -> Generation:
        resume = calls.resume_call(request)
        if resume is not None:
            return self._resumables.resume(resume)
        job, deadline = self._job(request), current_call().deadline
        if job.resumable is not None:
            return self._resumables.start(job, deadline)
        return Generation(self._dispatcher, job, deadline)

    def _job(
        self, request: inference_pb2.GenerateRequest | inference_pb2.GenerateStreamRequest
    ) -> Job:
        limits = self._dispatcher.limits()
        default_id = self._dispatcher.free_request_id(current_call().request_id)
        call = calls.generate_call(request)
        return validate(call, limits, default_id, current_call().tenant)
