"""The HTTP routes as raw requests: what is refused, how it is told, and how it ends."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from google.protobuf import json_format

from frontend.openai.errors import STATUS
from frontend.openai.requests import ChatBody, CompletionBody
from frontend.status import STATUS as GRPC_STATUS
from pagewire.wire.messages import Abort, Add
from tests.support.fake_engine import EOS

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.frontend.conftest import Stack

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HI = {"messages": [{"role": "user", "content": "Hi"}]}


def http_of(stack: Stack) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=f"http://{stack.frontend.http_address}", timeout=60)


@pytest.fixture
async def http(stack: Stack) -> AsyncIterator[httpx.AsyncClient]:
    async with http_of(stack) as client:
        yield client


def events(text: str) -> list[Any]:
    """The data of each event; the stream must be nothing but such events."""
    blocks = text.split("\n\n")
    assert blocks.pop() == ""
    assert all(block.startswith("data: ") and "\n" not in block for block in blocks)
    data = [block.removeprefix("data: ") for block in blocks]
    return [entry if entry == "[DONE]" else json.loads(entry) for entry in data]


def call(name: str, arguments: str) -> dict[str, Any]:
    made = {"id": "a", "type": "function", "function": {"name": name, "arguments": arguments}}
    return {"role": "assistant", "tool_calls": [made]}


BAD_COMPLETIONS: dict[str, tuple[dict[str, Any], str]] = {
    "unknown field": ({"prompt": "a", "tempreature": 1}, "tempreature"),
    "unknown below": ({"prompt": "a", "stream_options": {"usage": True}}, "stream_options.usage"),
    "type": ({"prompt": "a", "max_tokens": "5"}, "max_tokens"),
    "over int32": ({"prompt": "a", "top_k": 2**31}, "top_k"),
    "a suffix": ({"prompt": "a", "suffix": "b"}, "suffix"),
    "no prompt": ({}, "prompt"),
    "empty prompt": ({"prompt": ""}, "prompt"),
    "empty list": ({"prompt": []}, "prompt"),
    "empty text in a list": ({"prompt": [""]}, "prompt[0]"),
    "empty ids in a list": ({"prompt": [[1], []]}, "prompt[1]"),
    "mixed": ({"prompt": ["a", [1]]}, "prompt[1]"),
    "ids and texts": ({"prompt": [1, "a"]}, "prompt[0]"),
    "a bool": ({"prompt": [True]}, "prompt[0]"),
    "past the vocabulary": ({"prompt": [19, 300]}, "prompt"),
    "negative id": ({"prompt": [[1], [19, -1]]}, "prompt[1]"),
    "too many prompts": ({"prompt": ["a"] * 257}, "prompt"),
    "n": ({"prompt": "a", "n": 65}, "n"),
    "best_of": ({"prompt": "a", "n": 2, "best_of": 1}, "best_of"),
    "best_of in a stream": ({"prompt": "a", "best_of": 2, "stream": True}, "best_of"),
    "logprobs": ({"prompt": "a", "logprobs": 21}, "logprobs"),
    "max_tokens 0": ({"prompt": "a", "max_tokens": 0}, "max_tokens"),
    "no room": ({"prompt": "a", "max_tokens": 4096}, "max_tokens"),
    "temperature": ({"prompt": "a", "temperature": -1}, "temperature"),
    "over float32": ({"prompt": "a", "temperature": 1e39}, "temperature"),
    "seed": ({"prompt": "a", "seed": 2**64}, "seed"),
    "stop ids": ({"prompt": "a", "stop_token_ids": [300], "min_tokens": 1}, "stop_token_ids"),
    "bias key": ({"prompt": "a", "logit_bias": {"x": 1}}, "logit_bias"),
    "bias": ({"prompt": "a", "logit_bias": {"5": 101}}, "logit_bias"),
    "stop": ({"prompt": "a", "stop": ["a", ""]}, "stop[1]"),
    "truncation": ({"prompt": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    "usage of no stream": ({"prompt": "a", "stream_options": {}}, "stream_options"),
    "prompt_logprobs": ({"prompt": "a", "prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    "choice": ({"prompt": "a", "structured_outputs": {"choice": []}}, "structured_outputs.choice"),
    "no constraint": ({"prompt": "a", "structured_outputs": {}}, "structured_outputs"),
    "two constraints": (
        {"prompt": "a", "structured_outputs": {"regex": "a", "json": {}}},
        "structured_outputs",
    ),
    "two forms": (
        {
            "prompt": "a",
            "structured_outputs": {"regex": "a"},
            "response_format": {"type": "json_object"},
        },
        "structured_outputs",
    ),
    "wide beam": ({"prompt": "a", "use_beam_search": True, "n": 17}, "n"),
    "beam_width": ({"prompt": "a", "use_beam_search": True, "n": 1, "best_of": 17}, "best_of"),
    "drawn beams": ({"prompt": "a", "use_beam_search": True, "temperature": 1}, "temperature"),
    "length_penalty": ({"prompt": "a", "length_penalty": 2}, "length_penalty"),
    "search penalty": (
        {"prompt": "a", "use_beam_search": True, "length_penalty": 11},
        "length_penalty",
    ),
    "request_id": ({"prompt": "a", "request_id": "a b"}, "request_id"),
}


def nested(depth: int) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for _ in range(depth - 1):
        value = {"a": value}
    return value


TOOL = {"type": "function", "function": {"name": "f"}}
BAD_CHATS: dict[str, tuple[dict[str, Any], str]] = {
    "no messages": ({}, "messages"),
    "empty": ({"messages": []}, "messages"),
    "no role": ({"messages": [{"content": "a"}]}, "messages[0].role"),
    "empty role": ({"messages": [{"role": ""}]}, "messages[0].role"),
    "a role the template refuses": ({"messages": [{"role": "king"}]}, "messages[0].role"),
    "an image": (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        "messages[0].content[0].type",
    ),
    "a refusal": ({"messages": [{"role": "user", "refusal": "no"}]}, "messages[0].refusal"),
    "arguments": (
        {"messages": [call("f", "{")]},
        "messages[0].tool_calls[0].function.arguments",
    ),
    "a tool's name": (
        {**HI, "tools": [{"type": "function", "function": {"name": ""}}]},
        "tools[0].function.name",
    ),
    "a tool's schema": (
        {**HI, "tools": [{"function": {"name": "f", "parameters": {"type": "array"}}}]},
        "tools[0].function.parameters.type",
    ),
    "a deep schema": (
        {**HI, "tools": [{"function": {"name": "f", "parameters": nested(31)}}]},
        "tools[0].function.parameters",
    ),
    "deep kwargs": ({**HI, "chat_template_kwargs": nested(500)}, "chat_template_kwargs"),
    "a large number": ({**HI, "chat_template_kwargs": {"a": 10**400}}, "chat_template_kwargs"),
    "a choice of no tools": ({**HI, "tool_choice": "required"}, "tool_choice"),
    "an unknown choice": (
        {**HI, "tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}},
        "tool_choice.name",
    ),
    "top_logprobs alone": ({**HI, "top_logprobs": 2}, "top_logprobs"),
    "top_logprobs": ({**HI, "logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    "logprobs": ({**HI, "logprobs": 5}, "logprobs"),
    "two limits": ({**HI, "max_tokens": 1, "max_completion_tokens": 1}, "max_completion_tokens"),
    "the newer limit": ({**HI, "max_completion_tokens": 4097}, "max_completion_tokens"),
    "both ends": (
        {**HI, "add_generation_prompt": True, "continue_final_message": True},
        "continue_final_message",
    ),
    "functions": ({**HI, "functions": []}, "functions"),
    "no schema": (
        {**HI, "response_format": {"type": "json_schema"}},
        "response_format.json_schema",
    ),
    "audio": ({**HI, "modalities": ["audio"]}, "modalities[0]"),
}


async def test_what_is_wrong_is_named(http: httpx.AsyncClient, stack: Stack) -> None:
    asked = [(COMPLETIONS, *bad) for bad in BAD_COMPLETIONS.values()]
    asked += [(CHAT, *bad) for bad in BAD_CHATS.values()]
    for path, body, field in asked:
        response = await http.post(path, json=body)
        assert response.status_code == 400, (body, response.text)
        error = response.json()["error"]
        assert error.keys() == {"message", "type", "param", "code"}
        assert error["param"] == field, error
        assert error["type"] == "invalid_request_error"
        assert error["code"] == "invalid_request"
        assert error["message"]
        assert "sampling_params" not in error["message"]
    assert not [c for c in stack.engine.commands if isinstance(c, Add)]
    assert stack.frontend.dispatcher.admission.requests == 0
    ok = await http.post(COMPLETIONS, json={"prompt": "a", "max_tokens": 1})
    assert ok.status_code == 200


NO_REQUESTS = [
    b"",
    b"{",
    b"[]",
    b'"a"',
    b'{"prompt": NaN}',
    b"\xff",
    b'{"prompt": "\\ud800"}',
    b"[" * 10_000,
    b'{"metadata": ' + b"[" * 10_000,
    b'{"temperature": 1e999, "prompt": "a"}',
]


async def test_a_body_that_is_no_request(http: httpx.AsyncClient) -> None:
    for body in NO_REQUESTS:
        headers = {"content-type": "application/json"}
        response = await http.post(COMPLETIONS, content=body, headers=headers)
        assert response.status_code == 400, body
        assert response.json()["error"]["type"] == "invalid_request_error"


async def test_a_page_of_another_origin_cannot_ask(http: httpx.AsyncClient, stack: Stack) -> None:
    for headers in ({"content-type": "text/plain"}, {}):
        response = await http.post(COMPLETIONS, content=b'{"prompt": "a"}', headers=headers)
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "content-type"
    assert not [c for c in stack.engine.commands if isinstance(c, Add)]


async def test_ways_that_are_none(http: httpx.AsyncClient) -> None:
    for method, path, status in (
        ("GET", "/v1/nothing", 404),
        ("GET", COMPLETIONS, 405),
        ("POST", "/v1/models", 405),
    ):
        response = await http.request(method, path)
        assert response.status_code == status
        assert response.json()["error"].keys() == {"message", "type", "param", "code"}


async def test_what_means_nothing_here_is_accepted(http: httpx.AsyncClient) -> None:
    body: dict[str, Any] = {
        "user": "me",
        "metadata": {"a": "b"},
        "store": False,
        "service_tier": "auto",
        "safety_identifier": "x",
        "prompt_cache_key": "y",
        "prompt_cache_retention": "24h",
        "max_tokens": 1,
    }
    completion = await http.post(COMPLETIONS, json={"prompt": "a", "suffix": None, **body})
    assert completion.status_code == 200
    more = {
        "reasoning_effort": "low",
        "verbosity": "low",
        "modalities": ["text"],
        "functions": None,
    }
    assert (await http.post(CHAT, json={**HI, **body, **more})).status_code == 200


async def test_what_the_template_is_told(http: httpx.AsyncClient, stack: Stack) -> None:
    deepest = {"name": "f", "parameters": {"properties": nested(29)}}
    body = {**HI, "tools": [{"function": deepest}], "chat_template_kwargs": nested(30)}
    response = await http.post(CHAT, json={**body, "max_tokens": 1, "tool_choice": "none"})
    assert response.status_code == 200, response.text
    told = stack.tokenizer.chats[-1]
    assert json_format.MessageToDict(told.template_kwargs) == nested(30)
    assert json_format.MessageToDict(told.tools[0].parameters) == deepest["parameters"]


async def test_nulls_are_defaults(http: httpx.AsyncClient) -> None:
    """Clients in other languages write out what is not set."""
    for kind, path, given in (
        (CompletionBody, COMPLETIONS, {"prompt": "a"}),
        (ChatBody, CHAT, HI),
    ):
        nulls = dict.fromkeys(kind.__struct_fields__) | {"max_tokens": 3} | given
        response = await http.post(path, json=nulls)
        assert response.status_code == 200, response.text


async def test_everything_reaches_the_engine(stack: Stack, http: httpx.AsyncClient) -> None:
    body = {
        "model": "fake",
        "prompt": "abc",
        "max_tokens": 7,
        "temperature": 0.5,
        "top_p": 0.75,
        "top_k": 5,
        "min_p": 0.25,
        "seed": -1,
        "stop": "zz",
        "stop_token_ids": [7],
        "min_tokens": 2,
        "repetition_penalty": 1.5,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "logit_bias": {"65": 2, "66": -0.1},
        "bad_words": ["x"],
        "allowed_token_ids": [100, 101],
        "logprobs": 1,
        "prompt_logprobs": 2,
        "truncate_prompt_tokens": 2,
        "cache_salt": "salt",
        "priority": 3,
        "ignore_eos": True,
    }
    tenant = {"x-tenant-id": "acme"}
    assert (await http.post(COMPLETIONS, json=body, headers=tenant)).status_code == 200
    (add,) = [c for c in stack.engine.commands if isinstance(c, Add)]
    sampling = add.sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p) == (7, 0.5, 0.75)
    assert (sampling.top_k, sampling.min_p, sampling.seed) == (5, 0.25, 2**64 - 1)
    assert (sampling.stop_token_ids, sampling.min_tokens) == ((7,), 2)
    assert (sampling.repetition_penalty, sampling.presence_penalty) == (1.5, 0.5)
    assert sampling.frequency_penalty == -0.5
    # Numbers are float32, as they come over gRPC.
    assert sampling.logit_bias == ((65, 2.0), (66, -0.10000000149011612))
    assert sampling.bad_words
    assert sampling.allowed_token_ids == (100, 101)
    assert (sampling.logprobs, sampling.prompt_logprobs, sampling.ignore_eos) == (1, 2, True)
    assert (add.cache_salt, add.priority, add.tenant) == ("salt", 3, "acme")
    assert len(add.token_ids) == 2 * 4


async def test_what_vllm_adds_to_answers(http: httpx.AsyncClient) -> None:
    body = {
        "prompt": "ab",
        "max_tokens": 4,
        "stop": ["e "],
        "prompt_logprobs": 1,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
        "logprobs": 0,
    }
    (choice,) = (await http.post(COMPLETIONS, json=body)).json()["choices"]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("th", "stop", "e ")
    assert choice["prompt_token_ids"] == [97, 98]
    assert choice["token_ids"] == list(b"the ")
    assert choice["logprobs"]["tokens"] == [f"token_id:{i}" for i in b"the "]
    first, second = choice["prompt_logprobs"]
    assert first is None
    assert second == {
        "98": {"logprob": -0.25, "rank": 2, "decoded_token": "b"},
        "1": {"logprob": -0.125, "rank": 1, "decoded_token": "\x01"},
    }
    by_token = await http.post(COMPLETIONS, json={"prompt": "a", "stop_token_ids": [ord("e")]})
    assert by_token.json()["choices"][0]["stop_reason"] == ord("e")
    streamed = await http.post(
        CHAT,
        json={
            **HI,
            "max_tokens": 3,
            "stream": True,
            "return_token_ids": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        },
    )
    *chunks, last, done = events(streamed.text)
    assert done == "[DONE]"
    assert [i for c in chunks for i in c["choices"][0].get("token_ids", ())] == list(b"the")
    assert [c["usage"]["completion_tokens"] for c in chunks] == [1, 2, 3, 3]
    assert last["usage"]["completion_tokens"] == 3
    prompts = [c["prompt_token_ids"] for c in chunks if "prompt_token_ids" in c]
    assert prompts == [list(b"<user>Hi\n<assistant>")]


async def test_chat_echo_is_the_message_that_goes_on(http: httpx.AsyncClient) -> None:
    turns = [*HI["messages"], {"role": "assistant", "content": "Well, "}]
    body = {
        "messages": turns,
        "max_tokens": 3,
        "echo": True,
        "continue_final_message": True,
        "add_generation_prompt": False,
    }
    answer = (await http.post(CHAT, json=body)).json()
    assert answer["choices"][0]["message"]["content"] == "Well, the"
    streamed = events((await http.post(CHAT, json={**body, "stream": True})).text)
    deltas = [c["choices"][0]["delta"].get("content", "") for c in streamed[:-1]]
    assert "".join(deltas) == "Well, the"
    ids = (
        await http.post("/tokenize", json={"messages": turns, "continue_final_message": True})
    ).json()
    assert ids["count"] == answer["usage"]["prompt_tokens"]


async def test_an_end_without_text(make_stack: Any) -> None:
    stack = await make_stack(next_token=lambda request: EOS)
    async with http_of(stack) as http:
        streamed = events((await http.post(CHAT, json={**HI, "stream": True})).text)
        assert [c["choices"][0]["finish_reason"] for c in streamed[:-1]] == ["stop"]
        assert streamed[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        answer = (await http.post(CHAT, json=HI)).json()
        assert answer["choices"][0]["message"]["content"] == ""
        assert answer["choices"][0]["stop_reason"] is None


async def test_tokenize_and_back(http: httpx.AsyncClient) -> None:
    told = (await http.post("/tokenize", json={"prompt": "añ", "model": "fake"})).json()
    assert told == {"count": 3, "max_model_len": 4096, "tokens": [97, 195, 177]}
    back = await http.post("/detokenize", json={"tokens": told["tokens"]})
    assert back.json() == {"prompt": "añ"}
    for path, body, field in (
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", **HI}, "prompt"),
        ("/tokenize", {"prompt": "a", "return_token_strs": True}, "return_token_strs"),
        ("/detokenize", {"tokens": [300]}, "tokens"),
        ("/detokenize", {}, "tokens"),
    ):
        refused = await http.post(path, json=body)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, field)
    assert (await http.post("/tokenize", json={"prompt": "a", "model": "b"})).status_code == 404


async def test_ids_go_in_and_out(manual: Stack) -> None:
    async with http_of(manual) as http:
        body = {"prompt": "a", "max_tokens": 1}
        first = asyncio.ensure_future(
            http.post(COMPLETIONS, json=body, headers={"x-request-id": "r-1"})
        )
        await manual.engine.wait_running()
        assert manual.frontend.dispatcher.is_in_flight("r-1")
        # The same x-request-id covers another call, but a request's own id is its own.
        second = asyncio.ensure_future(
            http.post(COMPLETIONS, json=body, headers={"x-request-id": "r-1"})
        )
        await manual.engine.wait_running(2)
        taken = await http.post(COMPLETIONS, json={**body, "request_id": "r-1"})
        assert taken.status_code == 409
        assert taken.json()["error"]["param"] == "request_id"
        manual.engine.step()
        for response in (await first, await second):
            assert response.headers["x-request-id"] == "r-1"
            assert response.json()["id"] == "cmpl-r-1"


async def aborted(stack: Stack, count: int) -> None:
    await stack.engine.wait_for(lambda: len(stack.engine.aborted) == count)
    await stack.until(lambda: stack.frontend.dispatcher.admission.requests == 0)
    assert not stack.engine.running
    assert not stack.engine.waiting


@pytest.mark.parametrize("stream", [False, True])
async def test_hanging_up_ends_the_request(manual: Stack, stream: bool) -> None:
    """ROCm/ATOM#1562: also of a caller that waits for one answer."""
    host, _, port = manual.frontend.http_address.rpartition(":")
    body = json.dumps({"prompt": ["a", "b"], "max_tokens": 1000, "stream": stream}).encode()
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(head.encode() + b"content-length: %d\r\n\r\n" % len(body) + body)
    await manual.engine.wait_running(2)
    manual.engine.step()
    if stream:
        await reader.readuntil(b"\n\n")
    writer.close()
    await aborted(manual, 2)
    assert len([c for c in manual.engine.commands if isinstance(c, Abort)]) in (1, 2)
    samples = manual.frontend.metrics.exposition().decode()
    assert f'pagewire_rpcs_handled_total{{code="CANCELLED",method="{COMPLETIONS}"}} 1.0' in samples


async def test_a_deadline(manual: Stack) -> None:
    async with http_of(manual) as http:
        late = {"x-request-timeout": "1.5"}
        for stream in (False, True):
            body = {"prompt": "a", "stream": stream}
            response = await http.post(COMPLETIONS, json=body, headers=late)
            if stream:
                assert response.status_code == 200
                (told,) = events(response.text)
            else:
                assert response.status_code == 504
                told = response.json()
            assert told["error"]["code"] == "deadline_exceeded"
        await aborted(manual, 2)
        for value in ("soon", "-1", "nan"):
            headers = {"x-request-timeout": value}
            bad = await http.post(COMPLETIONS, json={"prompt": "a"}, headers=headers)
            assert (bad.status_code, bad.json()["error"]["param"]) == (400, "x-request-timeout")


async def test_a_full_house_says_when_to_come_back(make_stack: Any) -> None:
    stack = await make_stack(auto=False, config={"max_requests": 2})
    async with http_of(stack) as http:
        body = {"prompt": ["a", "b", "c"], "max_tokens": 1}
        # All of a request's prompts are admitted, or none.
        refused = await http.post(COMPLETIONS, json=body)
        assert refused.status_code == 429
        assert refused.json()["error"]["type"] == "rate_limit_error"
        assert int(refused.headers["retry-after"]) >= 1
        assert int(refused.headers["retry-after-ms"]) >= 1
        await stack.until(lambda: stack.frontend.dispatcher.admission.requests == 0)
        two = asyncio.ensure_future(http.post(COMPLETIONS, json={**body, "prompt": ["a", "b"]}))
        await stack.engine.wait_for(lambda: len(stack.engine.running) == 2)
        stack.engine.step()
        assert (await two).status_code == 200


async def test_a_body_that_is_too_large(make_stack: Any) -> None:
    stack = await make_stack(config={"max_message_mib": 1})
    async with http_of(stack) as http:
        refused = await http.post(COMPLETIONS, json={"prompt": "a" * 2**20})
        assert refused.status_code == 413
        assert refused.json()["error"]["code"] == "message_too_large"
        assert (await http.post(COMPLETIONS, json={"prompt": "a"})).status_code == 200


async def test_while_there_is_no_engine(make_stack: Any) -> None:
    stack = await make_stack(serving=False)
    await stack.engine.kill()
    async with http_of(stack) as http:
        await stack.until(lambda: not stack.frontend.health.serving)
        for method, path, body in (
            ("GET", "/health", None),
            ("GET", "/v1/models", None),
            ("POST", COMPLETIONS, {"prompt": "a", "stream": True}),
        ):
            response = await http.request(method, path, json=body)
            assert response.status_code == 503, path
            assert response.json()["error"]["type"] == "server_error"


async def test_a_bug_of_ours_is_an_id_in_the_log(
    stack: Stack, http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    def explode(*_: object) -> None:
        raise ZeroDivisionError("secret")

    monkeypatch.setattr(stack.frontend.dispatcher, "launch", explode)
    response = await http.post(COMPLETIONS, json={"prompt": "a"})
    assert response.status_code == 500
    message = response.json()["error"]["message"]
    assert "secret" not in message
    assert message.removeprefix("internal error (error id ").removesuffix(")") in caplog.text


def test_every_error_has_a_status() -> None:
    assert STATUS.keys() == GRPC_STATUS.keys()
