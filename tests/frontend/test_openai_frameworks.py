"""langchain-openai and llama-index's OpenAILike as they come.

The second asks for transformers below 5, so it can be in no environment that serves, and is
skipped unless it is found in one of its own:

    python -m venv frameworks
    frameworks/bin/pip install langchain-openai llama-index-llms-openai-like
    PYTHONPATH=$(echo frameworks/lib/python3*/site-packages) \
        .venv/bin/python -m pytest -W default tests/frontend/test_openai_frameworks.py
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import openai
import pytest

from tests.frontend.test_tool_calls import ANSWER, CITY, writes

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.frontend.conftest import Stack

# What the frameworks warn of is theirs.
pytestmark = pytest.mark.filterwarnings("default")


def url_of(stack: Stack) -> str:
    return f"http://{stack.frontend.http_address}/v1"


@pytest.fixture
async def clients() -> AsyncIterator[dict[str, Any]]:
    """What langchain sends by: its own clients are never closed."""
    with openai.DefaultHttpxClient() as blocking:
        async with openai.DefaultAsyncHttpxClient() as other:
            yield {"http_client": blocking, "http_async_client": other}


async def test_langchain(make_stack: Any, clients: dict[str, Any]) -> None:
    langchain_openai = pytest.importorskip("langchain_openai")
    stack = await make_stack(step_s=0.002)
    model = langchain_openai.ChatOpenAI(
        base_url=url_of(stack), api_key="none", model="fake", max_tokens=9, n=1, **clients
    )
    answer = await model.ainvoke("Hi")
    assert answer.content == "the quick"
    assert answer.usage_metadata["output_tokens"] == 9
    assert answer.response_metadata["finish_reason"] == "length"
    chunks = [chunk async for chunk in model.astream("Hi", stream_usage=True)]
    assert "".join(chunk.content for chunk in chunks) == "the quick"
    assert sum((c.usage_metadata or {}).get("output_tokens", 0) for c in chunks) == 9
    completion = langchain_openai.OpenAI(
        base_url=url_of(stack), api_key="none", model="fake", max_tokens=9, **clients
    )
    assert (await completion.agenerate(["a", "b"])).generations[1][0].text == "the quick"


async def test_langchain_tools(make_stack: Any, clients: dict[str, Any]) -> None:
    langchain_openai = pytest.importorskip("langchain_openai")
    stack = await make_stack(next_token=writes(ANSWER))
    model = langchain_openai.ChatOpenAI(
        base_url=url_of(stack), api_key="none", model="fake", **clients
    )
    tools = [
        {"type": "function", "function": {"name": name, "parameters": CITY}}
        for name in ("weather", "now")
    ]
    bound = model.bind_tools(tools)
    answer = await bound.ainvoke("Hi")
    assert [call["name"] for call in answer.tool_calls] == ["weather", "now"]
    whole: Any = None
    async for chunk in bound.astream("Hi"):
        whole = chunk if whole is None else whole + chunk
    assert [(c["name"], c["args"]) for c in whole.tool_calls] == [
        ("weather", {"city": "Oslo 🦜"}),
        ("now", {}),
    ]
    # The answer goes back with the tool's.
    told = {"role": "tool", "content": "4", "tool_call_id": answer.tool_calls[0]["id"]}
    await bound.ainvoke([{"role": "user", "content": "Hi"}, answer, told])
    assert len(stack.tokenizer.chats[-1].messages[1].tool_calls) == 2


async def test_langchain_structured_output(make_stack: Any, clients: dict[str, Any]) -> None:
    langchain_openai = pytest.importorskip("langchain_openai")
    stack = await make_stack(next_token=writes('{"city": "Oslo"}'))
    model = langchain_openai.ChatOpenAI(
        base_url=url_of(stack), api_key="none", model="fake", **clients
    )
    schema = {**CITY, "title": "place", "description": "A place."}
    for method in ("json_schema", "function_calling"):
        asked = model.with_structured_output(schema, method=method)
        assert await asked.ainvoke("Where?") == {"city": "Oslo"}


async def test_llama_index(make_stack: Any) -> None:
    openai_like = pytest.importorskip("llama_index.llms.openai_like")
    llms = pytest.importorskip("llama_index.core.llms")
    stack = await make_stack(step_s=0.002)
    fields = {"api_base": url_of(stack), "api_key": "none", "model": "fake", "max_tokens": 9}
    chat = openai_like.OpenAILike(is_chat_model=True, **fields)
    message = llms.ChatMessage(role="user", content="Hi")
    assert (await chat.achat([message])).message.content == "the quick"
    streamed = [piece.delta async for piece in await chat.astream_chat([message])]
    assert "".join(piece or "" for piece in streamed) == "the quick"
    plain = openai_like.OpenAILike(is_chat_model=False, **fields)
    assert (await plain.acomplete("Hi")).text == "the quick"
    # Its synchronous half uses another client.
    assert (await asyncio.to_thread(chat.chat, [message])).message.content == "the quick"
