from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import urllib.request

import pytest

from pagewire.v1 import common_pb2, inference_pb2, model_pb2
from tests.support.stack import Api, Stack, read_stream

pytestmark = pytest.mark.timeout(300)

GREEDY_16 = common_pb2.SamplingParams(temperature=0, max_tokens=16)


async def test_a_chat_streams_what_unary_answers(api: Api, stack: Stack) -> None:
    chat = common_pb2.ChatInput(
        messages=[common_pb2.ChatMessage(role="user", content="Name three colours.")]
    )
    streamed = await read_stream(
        api.inference.GenerateStream(
            inference_pb2.GenerateStreamRequest(chat=chat, sampling_params=GREEDY_16)
        )
    )
    unary = await api.inference.Generate(
        inference_pb2.GenerateRequest(chat=chat, sampling_params=GREEDY_16, return_token_ids=True)
    )
    assert streamed.num_deltas > 1
    assert streamed.text == unary.outputs[0].text != ""
    assert streamed.final.usage.prompt_tokens == unary.usage.prompt_tokens > 0
    assert streamed.final.usage.completion_tokens == len(unary.outputs[0].token_ids) <= 16
    assert streamed.final.model == unary.model == stack.model
    assert streamed.final.timings.decode.ToNanoseconds() > 0
    assert streamed.final.seed != unary.seed


async def test_greedy_text_of_the_embedded_model(api: Api) -> None:
    response = await api.inference.Generate(
        inference_pb2.GenerateRequest(prompt="The capital of France is", sampling_params=GREEDY_16)
    )
    assert response.outputs[0].text.startswith(" Paris.")
    assert response.outputs[0].finish_reason == common_pb2.FINISH_REASON_LENGTH
    assert response.usage.completion_tokens == 16


async def test_one_seed_draws_one_text(api: Api) -> None:
    sampling = common_pb2.SamplingParams(temperature=1, max_tokens=12, seed=7)
    request = inference_pb2.GenerateRequest(prompt="Once upon", sampling_params=sampling)
    first, second = await asyncio.gather(
        api.inference.Generate(request), api.inference.Generate(request)
    )
    assert first.outputs[0].text == second.outputs[0].text
    assert first.seed == second.seed == 7


@pytest.mark.slow
async def test_200_streams_at_once_all_finish(api: Api) -> None:
    requests = [
        inference_pb2.GenerateStreamRequest(
            prompt=f"Story number {i} is about",
            sampling_params=common_pb2.SamplingParams(max_tokens=8, seed=i, ignore_eos=True),
        )
        for i in range(200)
    ]
    streams = await asyncio.gather(
        *(read_stream(api.inference.GenerateStream(request)) for request in requests)
    )
    assert [stream.final.usage.completion_tokens for stream in streams] == [8] * 200
    assert len({stream.final.request_id for stream in streams}) == 200
    assert sum(stream.text != "" for stream in streams) > 190
    await api.at_rest()


async def test_a_repeated_prompt_is_cached_and_answers_the_same(api: Api) -> None:
    request = inference_pb2.GenerateRequest(
        prompt="A prefix of several blocks. " * 20, sampling_params=GREEDY_16
    )
    first = await api.inference.Generate(request)
    again = await api.inference.Generate(request)
    assert again.usage.cached_tokens > first.usage.prompt_tokens // 2
    assert again.outputs[0].text == first.outputs[0].text


async def test_the_model_is_listed(api: Api, stack: Stack) -> None:
    (model,) = (await api.models.ListModels(model_pb2.ListModelsRequest())).models
    assert (model.name, model.dtype, model.device) == (stack.model, "float32", "cpu")
    assert model.has_chat_template
    assert model.max_model_len == 8192


def test_the_command_line_prints_the_text_only(stack: Stack) -> None:
    command = [sys.executable, "-P", "-m", "pagewire.cli", "generate", "The capital of France is"]
    options = ["--temperature=0", "--max-tokens=4", f"--address={stack.address}"]
    result = subprocess.run(
        [*command, *options], capture_output=True, text=True, timeout=120, check=True
    )
    assert result.stdout.startswith(" Paris.")
    assert result.stderr == ""
    result = subprocess.run(
        [*command, *options, "--json"], capture_output=True, text=True, timeout=120, check=True
    )
    assert json.loads(result.stdout)["usage"]["completion_tokens"] == 4


@pytest.mark.parametrize("path", ["healthz", "readyz"])
def test_http_health(stack: Stack, path: str) -> None:
    with urllib.request.urlopen(f"http://{stack.http_address}/{path}", timeout=30) as response:
        assert response.status == 200


def test_metrics_have_the_names_that_dashboards_know(stack: Stack) -> None:
    with urllib.request.urlopen(f"http://{stack.http_address}/metrics", timeout=30) as response:
        text = response.read().decode()
    for name in (
        "vllm:num_requests_running",
        "vllm:num_requests_waiting",
        "vllm:kv_cache_usage_perc",
        "vllm:time_to_first_token_seconds",
        "vllm:e2e_request_latency_seconds",
        "vllm:prompt_tokens_total",
        "vllm:generation_tokens_total",
    ):
        assert name in text
