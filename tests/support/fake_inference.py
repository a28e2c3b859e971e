"""A real gRPC server on a free port whose model repeats the last words it is given."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import grpc
from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from pagewire.v1 import inference_pb2, inference_pb2_grpc, model_pb2, model_pb2_grpc

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

Request = inference_pb2.GenerateRequest | inference_pb2.GenerateStreamRequest


class FakeInference(
    inference_pb2_grpc.InferenceServiceServicer, model_pb2_grpc.ModelServiceServicer
):
    """Records what it is asked. A prompt that begins with "!" fails; a stream of one that
    ends with "?" fails in the middle."""

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self.endless = False
        """Stream for ever, until the client cancels."""
        self.cancelled = threading.Event()

    def Generate(self, request: Any, context: Any) -> Any:
        text = self._text(request, context)
        return inference_pb2.GenerateResponse(
            request_id="r1",
            model="fake",
            outputs=[inference_pb2.GeneratedSequence(text=text)],
            seed=(1 << 63) + 1,
        )

    def GenerateStream(self, request: Any, context: Any) -> Iterator[Any]:
        text = self._text(request, context)
        context.add_callback(self.cancelled.set)
        for word in text.split(" "):
            yield _delta(word + " ")
            if text.endswith("?"):
                context.abort(grpc.StatusCode.INTERNAL, "lost it")
        while self.endless and context.is_active():
            yield _delta("more ")
        final = inference_pb2.Final(request_id="r1", model="fake")
        final.usage.prompt_tokens, final.usage.completion_tokens = 4, 3
        final.usage.cached_tokens = 2
        final.timings.decode.FromMilliseconds(500)
        yield inference_pb2.GenerateStreamResponse(final=final)

    def ListModels(self, request: Any, context: Any) -> Any:
        model = model_pb2.Model(
            name="fake", architecture="llama", max_model_len=99, dtype="float32", device="cpu"
        )
        return model_pb2.ListModelsResponse(models=[model])

    def _text(self, request: Request, context: Any) -> str:
        self.requests.append(request)
        prompt = request.prompt if request.HasField("prompt") else _transcript(request)
        if prompt.startswith("!"):
            detail = any_pb2.Any()
            violation = error_details_pb2.BadRequest.FieldViolation(field="prompt")
            detail.Pack(error_details_pb2.BadRequest(field_violations=[violation]))
            status = status_pb2.Status(code=3, message="is of no use\nat all", details=[detail])
            context.abort_with_status(rpc_status.to_status(status))
        return f"echo {prompt}"


def start_fake_inference() -> tuple[FakeInference, str, Callable[[], None]]:
    """The servicer, its address, and what stops it."""
    servicer = FakeInference()
    server = grpc.server(ThreadPoolExecutor(max_workers=4))
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(servicer, server)
    model_pb2_grpc.add_ModelServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    return servicer, f"127.0.0.1:{port}", lambda: server.stop(None).wait(10)


def _transcript(request: Request) -> str:
    return "|".join(f"{message.role}:{message.content}" for message in request.chat.messages)


def _delta(text: str) -> Any:
    return inference_pb2.GenerateStreamResponse(delta=inference_pb2.Delta(text=text))
