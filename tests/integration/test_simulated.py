"""`pagewire serve --device sim:h200`: the whole stack over a GPU that only takes its time."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from frontend.status import field_violation
from pagewire.v1 import common_pb2, inference_pb2, model_pb2
from tests.support.stack import connect, read_stream, running_stack

pytestmark = pytest.mark.timeout(300)


def request(**sampling: object) -> inference_pb2.GenerateStreamRequest:
    return inference_pb2.GenerateStreamRequest(
        prompt="Hello there", sampling_params=common_pb2.SamplingParams(**sampling)
    )


async def test_text_flows_and_what_is_not_simulated_is_refused() -> None:
    with running_stack("--device=sim:h200", "--kv-cache-memory=1GiB") as stack:
        log = stack.log.read_text()
        assert "SIMULATED: --device sim:h200 computes nothing" in log
        assert "NVIDIA H200" in log
        async with connect(stack) as api:
            (model,) = (await api.models.ListModels(model_pb2.ListModelsRequest())).models
            assert model.device == "sim:h200"
            # The embedded model's tokenizer turns the made-up ids into words.
            calls = [request(max_tokens=60, seed=seed) for seed in (1, 1, 2, 3)]
            one, same, *others = await asyncio.gather(
                *(read_stream(api.inference.GenerateStream(call)) for call in calls)
            )
            assert one.text == same.text
            assert len({one.text, *(other.text for other in others)}) == 3
            assert one.text.replace(" ", "").isalpha()
            assert len(one.text.split()) == one.final.usage.completion_tokens == 60
            assert one.final.outputs[0].finish_reason == common_pb2.FINISH_REASON_LENGTH
            stop = one.text.split()[7]
            stopped = await read_stream(
                api.inference.GenerateStream(request(max_tokens=60, seed=1, stop=[stop]))
            )
            assert stopped.text == one.text[: one.text.index(stop)]
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await read_stream(api.inference.GenerateStream(request(max_tokens=5, logprobs=2)))
            assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert field_violation(refused.value) == "sampling_params.logprobs"
            await api.at_rest()
