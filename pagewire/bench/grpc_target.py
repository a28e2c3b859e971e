"""Our own API: InferenceService/GenerateStream."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

import grpc

from pagewire.bench.load import RequestFailed, clock
from pagewire.v1 import common_pb2, inference_pb2, inference_pb2_grpc, model_pb2, model_pb2_grpc

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pagewire.bench.record import Record
    from pagewire.bench.workload import Ask
    from pagewire.connection import Connection


class GrpcTarget:
    """One channel; an asynchronous context manager."""

    def __init__(
        self,
        connection: Connection,
        *,
        model: str | None,
        sampling: Mapping[str, Any],
        timeout: float | None,
    ) -> None:
        """`sampling` has fields of SamplingParams; max_tokens is each request's own."""
        self._model = model
        self._sampling = dict(sampling)
        self._timeout = timeout
        self._metadata = connection.metadata
        self._channel = connection.aio_channel(
            [("grpc.max_receive_message_length", -1), ("grpc.enable_http_proxy", 0)],
        )
        self._stream = inference_pb2_grpc.InferenceServiceStub(self._channel).GenerateStream
        self._models = model_pb2_grpc.ModelServiceStub(self._channel)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_exc: object) -> None:
        await self._channel.close(None)

    async def vocab_size(self) -> int:
        """Of the model that requests get. Raises RequestFailed."""
        try:
            listed = await self._models.ListModels(
                model_pb2.ListModelsRequest(), timeout=10.0, metadata=self._metadata
            )
        except grpc.aio.AioRpcError as error:
            raise RequestFailed(error.code().name, error.details() or "") from None
        for model in listed.models:
            if self._model in (None, model.name):
                return int(model.vocab_size)
        raise RequestFailed("NOT_FOUND", f"the server does not serve {self._model!r}")

    async def send(self, ask: Ask, record: Record) -> None:
        request = inference_pb2.GenerateStreamRequest(
            model=self._model,
            # So that each message tells how many tokens it has.
            return_token_ids=True,
            sampling_params=common_pb2.SamplingParams(max_tokens=ask.max_tokens, **self._sampling),
        )
        if ask.text is not None:
            request.prompt = ask.text
        else:
            request.prompt_token_ids.ids.extend(ask.ids)
        times, tokens = record.chunk_times, record.chunk_tokens
        call = self._stream(request, timeout=self._timeout, metadata=self._metadata)
        try:
            while (frame := await call.read()) is not grpc.aio.EOF:  # type: ignore[attr-defined]
                now = clock()
                if frame.HasField("delta"):
                    times.append(now)
                    tokens.append(len(frame.delta.token_ids))
                elif frame.HasField("final"):
                    usage = frame.final.usage
                    record.prompt_tokens = usage.prompt_tokens
                    record.output_tokens = usage.completion_tokens
                    record.cached_tokens = usage.cached_tokens
        except grpc.aio.AioRpcError as error:
            raise RequestFailed(error.code().name, error.details() or "") from None
        finally:
            call.cancel()
