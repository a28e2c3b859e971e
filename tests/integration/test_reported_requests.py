"""Public bug reports on prompts, limits and numbers, over the whole stack on the embedded
model."""

from __future__ import annotations

import asyncio
import math
from typing import TYPE_CHECKING, Any

import grpc.aio
import numpy as np
import pytest

from pagewire.v1 import common_pb2, inference_pb2, inference_pb2_grpc
from tests.integration.test_cancel_and_bad_input import violated_fields
from tests.integration.test_reported_sampling import ask, ask_stream, ids_of
from tests.support.stack import read_stream
from tests.support.unharmed import unharmed

if TYPE_CHECKING:
    from tests.support.stack import Api, Stack

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

LAMP = "A lamp stood on"
FRANCE = "What is the capital of France?"
SMALLEST = float(np.finfo(np.float32).smallest_subnormal)
NAN, INF = math.nan, math.inf


async def refused(call: Any) -> tuple[grpc.aio.AioRpcError, list[str]]:
    """How a call ended with INVALID_ARGUMENT, and the fields it blames."""
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await call
    assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT, raised.value
    return raised.value, violated_fields(raised.value)


# vllm-project/vllm#33418: the error named a limit of its own making.
async def test_the_context_is_named_with_its_true_size(api: Api) -> None:
    async with unharmed(api):
        error, fields = await refused(ask(api, FRANCE, max_tokens=8186))
        assert fields == ["sampling_params.max_tokens"]
        for figure in ("8192", "7", "8186"):
            assert figure in str(error.details()).replace(",", " ").split()
        call = ask_stream(api, FRANCE, max_tokens=8185, stop=["a", "e", "i"], min_tokens=1)
        assert (await call).final.usage.prompt_tokens == 7
        # The prompt alone may be too long, by one token or by many.
        for num_ids in (8192, 8193, 30_000):
            error, fields = await refused(ask(api, [504] * num_ids, max_tokens=1))
            assert fields == ["prompt_token_ids"]
            assert str(num_ids) in str(error.details())
            assert "8192" in str(error.details())


# vllm-project/vllm#7632, #7283; vllm-project/vllm#9634
@pytest.mark.parametrize(
    ("prompt", "field", "bad"),
    [
        ("", "prompt", ""),
        ("\x04", "prompt", ""),  # this tokenizer has no token for it
        ([], "prompt_token_ids", ""),
        ([19556, 49152], "prompt_token_ids", "49152"),
        ([19556, -1], "prompt_token_ids", "-1"),
        ([-(2**31)], "prompt_token_ids", str(-(2**31))),
        ([2**31 - 1], "prompt_token_ids", str(2**31 - 1)),
    ],
)
async def test_a_prompt_that_no_model_can_read(
    api: Api, prompt: str | list[int], field: str, bad: str
) -> None:
    async with unharmed(api):
        for call in (ask(api, prompt, max_tokens=2), ask_stream(api, prompt, max_tokens=2)):
            error, fields = await refused(call)
            assert fields == [field]
            assert bad in str(error.details())


async def test_the_last_id_of_the_vocabulary_is_served(api: Api) -> None:
    response = await ask(api, [49151], max_tokens=1, ignore_eos=True)
    assert (response.usage.prompt_tokens, response.usage.completion_tokens) == (1, 1)


# NVIDIA/TensorRT-LLM#17158: "too low or too high" is false for NaN.
async def test_no_number_is_nan_or_infinite(api: Api) -> None:
    seeded: dict[str, Any] = {"temperature": 1, "seed": 5, "max_tokens": 24, "ignore_eos": True}
    usual = ids_of(await ask(api, LAMP, **seeded))
    async with unharmed(api):
        neighbour = asyncio.create_task(ask(api, LAMP, **seeded))
        await api.eventually(lambda stats: stats.num_requests_running == 1)
        wrong = [
            {name: value}
            for name in (
                "temperature",
                "top_p",
                "min_p",
                "repetition_penalty",
                "presence_penalty",
                "frequency_penalty",
            )
            for value in (NAN, INF, -INF)
        ]
        wrong += [{"logit_bias": {5: value}} for value in (NAN, INF, -INF)]
        for sampling in wrong:
            (name,) = sampling
            for call in (ask(api, LAMP, **sampling), ask_stream(api, LAMP, **sampling)):
                _, (field,) = await refused(call)
                assert field.startswith(f"sampling_params.{name}"), sampling
        assert ids_of(await neighbour) == usual


# vllm-project/vllm#17553, #17773
async def test_top_k_0_keeps_all(api: Api) -> None:
    asked: dict[str, Any] = {"temperature": 1, "seed": 11, "max_tokens": 12, "ignore_eos": True}
    unset, *same, one, greedy = await asyncio.gather(
        ask(api, LAMP, **asked),
        *(ask(api, LAMP, **asked, top_k=k) for k in (0, -1, 49152, 60000, 2**31 - 1)),
        ask(api, LAMP, **asked, top_k=1),
        ask(api, LAMP, **(asked | {"temperature": 0})),
    )
    assert [ids_of(response) for response in same] == [ids_of(unset)] * 5
    assert ids_of(one) == ids_of(greedy) != ids_of(unset)


# vllm-project/vllm#2937, NVIDIA/TensorRT-LLM#16222
async def test_a_tiny_temperature_is_greedy(api: Api) -> None:
    asked: dict[str, Any] = {"seed": 1, "max_tokens": 16, "ignore_eos": True, "logprobs": 2}
    greedy, *tiny = await asyncio.gather(
        ask(api, LAMP, **asked, temperature=0),
        *(ask(api, LAMP, **asked, temperature=t) for t in (1e-4, 9e-6, 1e-12, 1e-38, SMALLEST)),
        # The other way to leave one token.
        ask(api, LAMP, **asked, temperature=1, top_p=SMALLEST),
        ask(api, LAMP, **asked, temperature=1, min_p=1),
    )
    assert greedy.outputs[0].text
    for response in tiny:
        assert ids_of(response) == ids_of(greedy)
        for position in response.outputs[0].logprobs:
            assert math.isfinite(position.token.logprob)
            assert all(math.isfinite(top.logprob) for top in position.top)
    # Nor does a huge one leave nothing to draw from.
    hot = await ask(api, LAMP, **asked, temperature=float(np.finfo(np.float32).max))
    assert len(ids_of(hot)) == 16


# vllm-project/vllm#51226
async def test_a_seed_holds_beside_neighbours_without_one(api: Api) -> None:
    async def seeded() -> list[int]:
        response = await ask(api, LAMP, temperature=0.8, seed=42, max_tokens=16, ignore_eos=True)
        return ids_of(response)

    def others(count: int) -> list[Any]:
        return [
            ask(api, "A boat came from", temperature=0.8, max_tokens=16, ignore_eos=True)
            for _ in range(count)
        ]

    alone = await seeded()
    for count in (1, 1, 7):
        drawn, *rest = await asyncio.gather(seeded(), *others(count))
        assert drawn == alone
    # The unseeded ones have seeds of their own, and tell them.
    assert len({response.seed for response in rest}) == 7
    assert len({tuple(ids_of(response)) for response in rest}) > 1


# vllm-project/vllm#3239, #3193, #9972
@pytest.mark.parametrize(("num_ids", "cached"), [(16, 0), (32, 16), (48, 32)])
async def test_a_prompt_cached_in_full(api: Api, num_ids: int, cached: int) -> None:
    prompt = [*range(100 + num_ids, 100 + 2 * num_ids)]
    cold, *warm = [await ask(api, prompt, max_tokens=8, ignore_eos=True) for _ in range(3)]
    assert cold.usage.cached_tokens == 0
    for response in warm:
        assert ids_of(response) == ids_of(cold)
        assert response.usage.cached_tokens == cached
    await api.at_rest()


# vllm-project/vllm#17045, #44701
async def test_salts_keep_tenants_apart(api: Api, stack: Stack) -> None:
    cached, drawn = [], []
    # None and "" both mean no salt; the model's own name is a salt like any other.
    for salt in ("tenant-a", "tenant-b", "tenant-a", None, stack.model, "", "tenant-b"):
        response = await api.inference.Generate(
            inference_pb2.GenerateRequest(
                prompt_token_ids=common_pb2.TokenIds(ids=range(100, 164)),
                sampling_params=common_pb2.SamplingParams(temperature=0, max_tokens=4),
                cache_salt=salt,
                return_token_ids=True,
            )
        )
        cached.append(response.usage.cached_tokens)
        drawn.append(ids_of(response))
    assert cached == [0, 0, 48, 0, 0, 48, 48]
    assert drawn == [drawn[0]] * 7


# vllm-project/vllm#8268, #3251
async def test_prompt_logprobs_of_a_cached_prefix(api: Api) -> None:
    first, again = [
        await ask(api, [*range(100, 133)], max_tokens=1, prompt_logprobs=1) for _ in range(2)
    ]
    positions = [list(response.prompt_logprobs.positions) for response in (first, again)]
    assert len(positions[0]) == 33
    assert not positions[0][0].HasField("token")
    assert positions[0][0].top == []
    assert all(math.isfinite(position.token.logprob) for position in positions[0][1:])
    assert positions[0] == positions[1]


# sgl-project/sglang#2088
async def test_alternatives_of_a_chat_are_each_positions_own(api: Api) -> None:
    def chat(**sampling: Any) -> Any:
        return api.inference.Generate(
            inference_pb2.GenerateRequest(
                chat=common_pb2.ChatInput(
                    messages=[common_pb2.ChatMessage(role="user", content="Name one colour.")]
                ),
                sampling_params=common_pb2.SamplingParams(
                    temperature=0, max_tokens=6, ignore_eos=True, **sampling
                ),
                return_token_ids=True,
            )
        )

    three = (await chat(logprobs=3)).outputs[0]
    assert [position.token.token_id for position in three.logprobs] == list(three.token_ids)
    assert len(three.logprobs) == 6
    for position in three.logprobs:
        assert len(position.top) == 3
        assert position.top[0] == position.token
        values = [top.logprob for top in position.top]
        assert values == sorted(values, reverse=True)
    assert len({tuple(top.token_id for top in p.top) for p in three.logprobs}) > 3
    none = (await chat(logprobs=0)).outputs[0]
    assert [position.token.token_id for position in none.logprobs] == list(three.token_ids)
    assert not any(position.top for position in none.logprobs)
    assert not (await chat()).outputs[0].logprobs
    async with unharmed(api):
        error, fields = await refused(chat(logprobs=21))
        assert fields == ["sampling_params.logprobs"]
        assert "20" in str(error.details())


# vllm-project/vllm#9547, #16976, #27486, #2012
@pytest.mark.parametrize(
    ("messages", "continues", "num_tokens"),
    [
        ((("user", "Name one colour."), ("assistant", "The colour is ")), True, 38),
        ((("user", "Count."), ("assistant", "1\n")), True, 34),
        # One BOS a message, and none around them.
        ((("system", "Be brief."), ("user", "Hi")), False, 18),
    ],
)
async def test_a_chat_has_the_tokens_of_its_template(
    api: Api, messages: tuple[tuple[str, str], ...], continues: bool, num_tokens: int
) -> None:
    chat = common_pb2.ChatInput(
        messages=[common_pb2.ChatMessage(role=role, content=text) for role, text in messages]
    )
    if continues:
        chat.continue_final_message, chat.add_generation_prompt = True, False
    request = inference_pb2.GenerateRequest(
        chat=chat, sampling_params=common_pb2.SamplingParams(temperature=0, max_tokens=1)
    )
    assert (await api.inference.Generate(request)).usage.prompt_tokens == num_tokens


# SeldonIO/MLServer#290
async def test_messages_over_4_mib(api: Api, stack: Stack) -> None:
    mib = 1 << 20
    options = [("grpc.max_send_message_length", 128 * mib)]
    short = common_pb2.SamplingParams(max_tokens=40, ignore_eos=True)
    async with unharmed(api), grpc.aio.insecure_channel(stack.address, options) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        other = asyncio.create_task(
            read_stream(
                stub.GenerateStream(
                    inference_pb2.GenerateStreamRequest(prompt=LAMP, sampling_params=short)
                )
            )
        )
        # Too long by its characters; and by its tokens alone.
        for text in ("a b " * (6 * mib // 4), "a b " * (2 * mib // 4)):
            error, fields = await refused(stub.Generate(inference_pb2.GenerateRequest(prompt=text)))
            assert fields == ["prompt"]
            assert "8192" in str(error.details())
        large = inference_pb2.GenerateRequest(prompt="a b " * (65 * mib // 4))
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await stub.Generate(large)
        assert raised.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert str(large.ByteSize()) in str(raised.value.details())
        assert str(64 * mib) in str(raised.value.details())
        assert (await other).final.usage.completion_tokens == 40
