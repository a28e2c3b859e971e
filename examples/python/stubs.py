"""The generated stubs by themselves, as other languages use theirs."""

from __future__ import annotations

import os
from pathlib import Path

import grpc
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from pagewire.v1 import common_pb2, inference_pb2, inference_pb2_grpc

ADDRESS = os.environ.get("PAGEWIRE_ADDRESS", "127.0.0.1:50051")
# What is refused because the server is full, or not there yet, is tried again.
POLICY = (Path(__file__).parents[2] / "deploy/service_config.json").read_text()


def main() -> None:
    options = [("grpc.service_config", POLICY)]
    with grpc.insecure_channel(ADDRESS, options) as channel:
        inference = inference_pb2_grpc.InferenceServiceStub(channel)
        request = inference_pb2.GenerateStreamRequest(
            chat=common_pb2.ChatInput(
                messages=[common_pb2.ChatMessage(role="user", content="Name three colours.")]
            ),
            sampling_params=common_pb2.SamplingParams(temperature=0, max_tokens=32),
        )
        for response in inference.GenerateStream(request, timeout=60):
            if response.WhichOneof("frame") == "delta":
                print(response.delta.text, end="", flush=True)
            else:
                finish = response.final.outputs[0].finish_reason
                print(f"\n{common_pb2.FinishReason.Name(finish)}")

        request.sampling_params.temperature = -1
        try:
            for _ in inference.GenerateStream(request, timeout=60):
                pass
        except grpc.RpcError as error:
            # Each status carries google.rpc details.
            for detail in rpc_status.from_call(error).details:
                info = error_details_pb2.ErrorInfo()
                if detail.Unpack(info):
                    print(f"{error.code().name}, reason {info.reason}: {error.details()}")


if __name__ == "__main__":
    main()
