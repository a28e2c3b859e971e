"""OpenAI's own client against the HTTP routes, over real sockets and a fake engine."""

from __future__ import annotations

import asyncio
import json
import re
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import openai
import pytest

from tests.frontend.test_tool_calls import ANSWER, CITY, writes

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.frontend.conftest import Stack

HI: list[Any] = [{"role": "user", "content": "Hi"}]
WEATHER: Any = {
    "type": "function",
    "function": {"name": "weather", "description": "Tells it.", "parameters": CITY},
}
NOW: Any = {"type": "function", "function": {"name": "now"}}


@asynccontextmanager
async def client_of(stack: Stack) -> AsyncIterator[openai.AsyncOpenAI]:
    base_url = f"http://{stack.frontend.http_address}/v1"
    async with openai.AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
async def client(stack: Stack) -> AsyncIterator[openai.AsyncOpenAI]:
    async with client_of(stack) as client:
        yield client


async def test_models(client: openai.AsyncOpenAI) -> None:
    (model,) = (await client.models.list()).data
    assert model.id == "fake"
    assert (await client.models.retrieve("fake")).id == "fake"
    with pytest.raises(openai.NotFoundError):
        await client.models.retrieve("other")


async def test_the_synchronous_client(stack: Stack) -> None:
    def ask() -> tuple[str | None, str]:
        base_url = f"http://{stack.frontend.http_address}/v1"
        with openai.OpenAI(base_url=base_url, api_key="none") as client:
            answer = client.chat.completions.create(model="fake", messages=HI, max_tokens=9)
            stream = client.chat.completions.create(
                model="fake", messages=HI, max_tokens=9, stream=True
            )
            return answer.choices[0].message.content, "".join(
                chunk.choices[0].delta.content or "" for chunk in stream
            )

    assert await asyncio.to_thread(ask) == ("the quick", "the quick")


async def test_completion(client: openai.AsyncOpenAI) -> None:
    answer = await client.completions.create(model="fake", prompt="hello", max_tokens=9)
    (choice,) = answer.choices
    assert (choice.text, choice.finish_reason, choice.logprobs) == ("the quick", "length", None)
    assert answer.object == "text_completion"
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (5, 9)
    assert answer.usage.total_tokens == 14
    # As OpenAI and vLLM have it, a completion that says nothing of its length has 16 tokens.
    default = await client.completions.create(model="fake", prompt="hello")
    assert len(default.choices[0].text) == 16


@pytest.mark.parametrize("prompt", [["he", "llo!"], [[1, 2], [3, 4, 5, 6]]])
async def test_several_prompts(client: openai.AsyncOpenAI, prompt: Any) -> None:
    """Numbered through, n to a prompt; the usage is the sum, and comes once."""
    answer = await client.completions.create(model="fake", prompt=prompt, max_tokens=4, n=2)
    assert [(c.index, c.text) for c in answer.choices] == [(i, "the ") for i in range(4)]
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (6, 16)
    stream = await client.completions.create(
        model="fake",
        prompt=prompt,
        max_tokens=4,
        n=2,
        stream=True,
        stream_options={"include_usage": True},
    )
    texts, ends, usages = [""] * 4, [], []
    async for chunk in stream:
        for choice in chunk.choices:
            assert choice.index not in ends
            texts[choice.index] += choice.text
            if choice.finish_reason is not None:
                ends.append(choice.index)
        if chunk.usage is not None:
            assert not chunk.choices
            usages.append(chunk.usage)
    assert texts == ["the "] * 4
    assert sorted(ends) == [0, 1, 2, 3]
    assert usages == [answer.usage]


async def test_one_finish_for_each_sequence(client: openai.AsyncOpenAI) -> None:
    """sgl-project/sglang#8417."""
    stream = await client.chat.completions.create(
        model="fake",
        messages=HI,
        n=3,
        max_tokens=4,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = [chunk async for chunk in stream]
    *others, last = chunks
    assert last.usage is not None
    assert last.usage.completion_tokens == 12
    assert all(chunk.usage is None for chunk in others)
    for index in range(3):
        own = [c for chunk in others for c in chunk.choices if c.index == index]
        assert "".join(c.delta.content or "" for c in own) == "the "
        assert [c.finish_reason for c in own] == [None] * (len(own) - 1) + ["length"]
        # The role is told once, with text.
        assert [c.delta.role for c in own] == ["assistant"] + [None] * (len(own) - 1)
        assert own[0].delta.content


async def test_chat_logprobs(client: openai.AsyncOpenAI) -> None:
    """sgl-project/sglang#2088: each position has its own, and 0 is not off."""
    answer = await client.chat.completions.create(
        model="fake", messages=HI, max_tokens=3, logprobs=True, top_logprobs=2
    )
    told = answer.choices[0].logprobs
    assert told is not None
    assert told.content is not None
    assert [(t.token, t.logprob, t.bytes) for t in told.content] == [
        ("t", -1 / 8, [116]),
        ("h", -2 / 8, [104]),
        ("e", -3 / 8, [101]),
    ]
    tops = [[(o.token, o.logprob) for o in t.top_logprobs] for t in told.content]
    assert tops == [[(chr(i), -1 / 8), (chr(i + 1), -1 / 8)] for i in range(3)]
    none = await client.chat.completions.create(
        model="fake", messages=HI, max_tokens=3, logprobs=True, top_logprobs=0, stream=True
    )
    streamed = [
        t async for c in none if c.choices[0].logprobs for t in c.choices[0].logprobs.content or []
    ]
    assert [(t.token, t.top_logprobs) for t in streamed] == [("t", []), ("h", []), ("e", [])]
    with pytest.raises(openai.BadRequestError) as caught:
        await client.chat.completions.create(
            model="fake", messages=HI, logprobs=True, top_logprobs=21
        )
    assert caught.value.param == "top_logprobs"


async def test_echo_and_logprobs(client: openai.AsyncOpenAI) -> None:
    """vllm-project/vllm#6521: a prompt is scored, with and without output."""
    scored = await client.completions.create(
        model="fake", prompt="añb", max_tokens=0, echo=True, logprobs=1
    )
    (choice,) = scored.choices
    assert (choice.text, choice.finish_reason) == ("añb", "length")
    assert scored.usage is not None
    assert scored.usage.completion_tokens == 0
    told = choice.logprobs
    assert told is not None
    # The tokens are bytes here: halves of a character are spelled as OpenAI spells them.
    assert told.tokens == ["a", "bytes:\\xc3", "bytes:\\xb1", "b"]
    assert told.token_logprobs == [None, -2 / 8, -3 / 8, -4 / 8]
    assert told.text_offset == [0, 1, 1, 2]
    assert told.top_logprobs is not None
    assert told.top_logprobs[0] is None
    assert told.top_logprobs[3] == {"b": -4 / 8, "\x03": -1 / 8}
    stream = await client.completions.create(
        model="fake", prompt="añb", max_tokens=2, echo=True, logprobs=0, n=2, stream=True
    )
    offsets: dict[int, list[int]] = {0: [], 1: []}
    texts = {0: "", 1: ""}
    async for chunk in stream:
        (part,) = chunk.choices
        texts[part.index] += part.text
        if part.logprobs is not None:
            offsets[part.index] += part.logprobs.text_offset or []
    assert texts == {0: "añbth", 1: "añbth"}
    assert offsets == {0: [0, 1, 1, 2, 3, 4], 1: [0, 1, 1, 2, 3, 4]}


async def test_tools(make_stack: Any) -> None:
    stack = await make_stack(next_token=writes(ANSWER))
    async with client_of(stack) as client:
        asked: Any = {"model": "fake", "messages": HI, "tools": [WEATHER, NOW]}
        answer = await client.chat.completions.create(**asked)
        (choice,) = answer.choices
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content == "I look."
        calls: Any = choice.message.tool_calls
        expected = [("weather", {"city": "Oslo 🦜"}), ("now", {})]
        assert [(c.function.name, json.loads(c.function.arguments)) for c in calls] == expected
        # OpenAI's helper puts the deltas together as its users' code does.
        async with client.chat.completions.stream(**asked) as stream:
            whole = (await stream.get_final_completion()).choices[0]
        assert whole.finish_reason == "tool_calls"
        assert whole.message.content == "I look."
        streamed: Any = whole.message.tool_calls
        assert [(c.function.name, json.loads(c.function.arguments)) for c in streamed] == expected
        # A message of ours can be sent back as it came.
        told = {"role": "tool", "content": "4", "tool_call_id": calls[0].id}
        again = [*HI, choice.message, told]
        await client.chat.completions.create(model="fake", messages=again, tools=[WEATHER, NOW])
        rendered = stack.tokenizer.chats[-1].messages
        assert [c.name for c in rendered[1].tool_calls] == ["weather", "now"]
        assert rendered[2].tool_call_id == calls[0].id
        one = await client.chat.completions.create(**asked, parallel_tool_calls=False)
        assert [c.function.name for c in one.choices[0].message.tool_calls or []] == ["weather"]


async def test_json_schema(make_stack: Any) -> None:
    stack = await make_stack(next_token=writes('{"city": "Oslo"}'))
    form: Any = {"type": "json_schema", "json_schema": {"name": "c", "schema": CITY}}
    async with client_of(stack) as client:
        answer = await client.chat.completions.create(
            model="fake", messages=HI, response_format=form
        )
        await client.chat.completions.create(
            model="fake", messages=HI, response_format={"type": "json_object"}
        )
        await client.chat.completions.create(
            model="fake", messages=HI, extra_body={"structured_outputs": {"choice": ["a", "b"]}}
        )
    assert json.loads(answer.choices[0].message.content or "") == {"city": "Oslo"}
    wanted = [c.sampling.structured_output for c in stack.engine.commands if hasattr(c, "sampling")]
    assert [w.kind for w in wanted] == ["json_schema", "json_object", "choice"]
    assert json.loads(wanted[0].text) == CITY


@pytest.mark.parametrize("num_steps", [0, 3])
async def test_an_engine_error_is_never_a_lone_done(manual: Stack, num_steps: int) -> None:
    """vllm-project/vllm#40986."""
    async with client_of(manual) as client:
        stream = await client.chat.completions.create(model="fake", messages=HI, stream=True)
        (request,) = await manual.engine.wait_running()
        for _ in range(num_steps):
            manual.engine.step()
        manual.engine.emit(errors={request.id: "boom"})
        texts = []
        with pytest.raises(openai.APIError) as caught:
            async for chunk in stream:
                texts.append(chunk.choices[0].delta.content)  # noqa: PERF401
        assert "".join(texts) == "the"[:num_steps]
        assert caught.value.type == "server_error"
        assert re.fullmatch(r"boom \(error id [0-9a-f]{16}\)", caught.value.message)


async def test_a_dead_engine_is_told(impatient: Stack) -> None:
    """vllm-project/vllm#19881."""
    async with client_of(impatient) as client:
        stream = await client.completions.create(model="fake", prompt="a", stream=True)
        await impatient.engine.wait_running()
        impatient.engine.step()
        await anext(stream)
        impatient.engine.die()
        with pytest.raises(openai.APIError) as caught:
            async for _ in stream:
                pass
        assert caught.value.code == "engine_dead"
        with pytest.raises(openai.InternalServerError) as refused:
            await client.completions.create(model="fake", prompt="a")
        assert refused.value.status_code == 503
        assert int(refused.value.response.headers["retry-after"]) >= 1
