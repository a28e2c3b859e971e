"""The OpenAI-compatible routes over the whole stack, on the embedded model in float32."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import httpx
import openai
import pytest
import torch

from pagewire.v1 import common_pb2, inference_pb2
from tests.support.smollm2 import load_with_transformers
from tests.support.unharmed import unharmed

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.support.stack import Api, Stack

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

COLOUR: list[Any] = [{"role": "user", "content": "Name one colour."}]
GREEK = [13433, 11345, 16439, 15184]
"""alpha beta gamma delta"""


@pytest.fixture
async def http(stack: Stack) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=f"http://{stack.http_address}", timeout=60) as client:
        yield client


@pytest.fixture
async def client(stack: Stack) -> AsyncIterator[openai.AsyncOpenAI]:
    base_url = f"http://{stack.http_address}/v1"
    async with openai.AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0) as client:
        yield client


def reference_logprobs(ids: list[int]) -> list[float]:
    """Of each id but the first, after those before it."""
    with torch.inference_mode():
        logits = load_with_transformers()(torch.tensor([ids])).logits[0]
    table = torch.log_softmax(logits.double(), -1)
    return [float(table[at, token]) for at, token in enumerate(ids[1:])]


# vllm-project/vllm#6521: scoring a prompt took the engine down.
async def test_a_prompt_is_scored(client: openai.AsyncOpenAI, stack: Stack, api: Api) -> None:
    expected = reference_logprobs(GREEK)
    async with unharmed(api):
        for prompt in ("alpha beta gamma delta", GREEK):
            for max_tokens in (0, 1):
                answer = await client.completions.create(
                    model=stack.model,
                    prompt=prompt,
                    max_tokens=max_tokens,
                    echo=True,
                    logprobs=1,
                    temperature=0,
                )
                (choice,) = answer.choices
                told: Any = choice.logprobs
                assert told.tokens[:4] == ["alpha", " beta", " gamma", " delta"]
                assert told.text_offset[:4] == [0, 5, 10, 16]
                assert told.token_logprobs[0] is None
                assert told.token_logprobs[1:4] == pytest.approx(expected, abs=1e-3)
                assert choice.text.startswith("alpha beta gamma delta")
                assert len(told.tokens) == 4 + max_tokens
                assert "".join(told.tokens) == choice.text
                assert answer.usage is not None
                assert answer.usage.completion_tokens == max_tokens
                assert choice.finish_reason == "length"


# vllm-project/vllm#10234: -inf broke the JSON.
async def test_prompt_logprobs_are_json(http: httpx.AsyncClient, api: Api) -> None:
    body = {
        "prompt": "seven green kettles",
        "echo": True,
        "logprobs": 1,
        "temperature": 1,
        "top_k": 1,
        "max_tokens": 4,
        "return_token_ids": True,
    }

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    async with unharmed(api):
        response = await http.post("/v1/completions", json=body)
        (choice,) = json.loads(response.text, parse_constant=refuse)["choices"]
        ids = choice["prompt_token_ids"] + choice["token_ids"]
        first, *rest = choice["logprobs"]["token_logprobs"]
        assert first is None
        assert rest == pytest.approx(reference_logprobs(ids), abs=1e-3)


# sgl-project/sglang#2088
async def test_chat_alternatives(client: openai.AsyncOpenAI, stack: Stack) -> None:
    answer = await client.chat.completions.create(
        model=stack.model,
        messages=COLOUR,
        temperature=0,
        max_tokens=6,
        logprobs=True,
        top_logprobs=3,
    )
    content: Any = answer.choices[0].logprobs and answer.choices[0].logprobs.content
    assert len(content) == 6
    for position in content:
        values = [other.logprob for other in position.top_logprobs]
        assert values == sorted(values, reverse=True)
        assert position.top_logprobs[0].token == position.token
    assert len({tuple(o.token for o in p.top_logprobs) for p in content}) > 1
    joined = b"".join(bytes(p.bytes) for p in content)
    assert joined.decode() == answer.choices[0].message.content


async def test_both_doors_give_the_same(client: openai.AsyncOpenAI, stack: Stack, api: Api) -> None:
    asked = inference_pb2.GenerateRequest(
        chat=common_pb2.ChatInput(
            messages=[common_pb2.ChatMessage(role="user", content="Name one colour.")]
        ),
        sampling_params=common_pb2.SamplingParams(
            temperature=0.7, top_p=0.9, seed=5, max_tokens=12, n=2, frequency_penalty=0.3
        ),
    )
    expected = await api.inference.Generate(asked)
    fields: Any = {
        "model": stack.model,
        "messages": COLOUR,
        "temperature": 0.7,
        "top_p": 0.9,
        "seed": 5,
        "max_completion_tokens": 12,
        "n": 2,
        "frequency_penalty": 0.3,
    }
    answer = await client.chat.completions.create(**fields)
    assert [c.message.content for c in answer.choices] == [o.text for o in expected.outputs]
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == expected.usage.prompt_tokens
    texts = ["", ""]
    async for chunk in await client.chat.completions.create(**fields, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == [o.text for o in expected.outputs]


async def test_a_schema_is_kept(client: openai.AsyncOpenAI, stack: Stack) -> None:
    schema = {
        "type": "object",
        "properties": {"colour": {"enum": ["red", "blue"]}, "n": {"type": "integer"}},
        "required": ["colour", "n"],
        "additionalProperties": False,
    }
    form: Any = {"type": "json_schema", "json_schema": {"name": "c", "schema": schema}}
    answer = await client.chat.completions.create(
        model=stack.model, messages=COLOUR, response_format=form, temperature=0, max_tokens=64
    )
    made = json.loads(answer.choices[0].message.content or "")
    assert list(made) == ["colour", "n"]
    assert made["colour"] in ("red", "blue")
    # vllm-project/vllm#17248: a schema that is none is refused by the field that held it.
    form["json_schema"]["schema"] = {"type": "objec"}
    with pytest.raises(openai.BadRequestError) as caught:
        await client.chat.completions.create(
            model=stack.model, messages=COLOUR, response_format=form
        )
    assert caught.value.param == "response_format"


async def test_beams(http: httpx.AsyncClient, api: Api) -> None:
    """vLLM's way to ask for what pagewire.v1 calls beam_width."""
    prompt = "Ladder rungs: one, two, three,"
    params = common_pb2.SamplingParams(
        max_tokens=8, n=3, beam_search=common_pb2.BeamSearch(beam_width=3, length_penalty=0.5)
    )
    expected = await api.inference.Generate(
        inference_pb2.GenerateRequest(prompt=prompt, sampling_params=params)
    )
    body = {
        "prompt": prompt,
        "max_tokens": 8,
        "n": 3,
        "use_beam_search": True,
        "length_penalty": 0.5,
    }
    answer = (await http.post("/v1/completions", json=body)).json()
    assert [c["text"] for c in answer["choices"]] == [o.text for o in expected.outputs]


# ROCm/ATOM#1562: a unary caller that hangs up left its request running.
async def test_a_unary_caller_that_hangs_up(stack: Stack, api: Api) -> None:
    host, _, port = stack.http_address.rpartition(":")
    body = json.dumps(
        {"messages": COLOUR, "max_completion_tokens": 4000, "ignore_eos": True}
    ).encode()
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    async with unharmed(api):
        for _ in range(5):
            _, writer = await asyncio.open_connection(host, int(port))
            writer.write(head + b"content-length: %d\r\n\r\n" % len(body) + body)
            await api.eventually(lambda stats: stats.num_requests_running == 1)
            writer.close()
            await api.at_rest(1.0)


async def test_text_to_ids_and_back(http: httpx.AsyncClient) -> None:
    """vllm-project/vllm#16976: what a template writes is not written twice."""
    greek = (await http.post("/tokenize", json={"prompt": "alpha beta gamma delta"})).json()
    assert greek["tokens"] == GREEK
    turns = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    chat = (await http.post("/tokenize", json={"messages": turns})).json()
    assert chat["tokens"][0] == 1
    assert chat["tokens"].count(1) == 3
    text = (await http.post("/detokenize", json={"tokens": chat["tokens"]})).json()["prompt"]
    assert text.startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi")
