"""Adapters as the frontend knows them: loaded on all engines or on none, named by clients,
and there again when an engine takes another's place."""

from __future__ import annotations

import asyncio
import json
import re
from typing import TYPE_CHECKING, Any

import grpc
import httpx
import pytest

from pagewire.api_keys import new_key
from pagewire.v1 import admin_pb2, common_pb2, inference_pb2, model_pb2
from pagewire.wire.messages import Add, LoadAdapter, UnloadAdapter
from tests.frontend.conftest import Failure
from tests.frontend.several_engines import SeveralEngines
from tests.frontend.test_replay import Reader, hashed, prompt, undisturbed
from tests.support.fake_engine import FakeEngine
from tests.support.fake_tokenizer import FakeTokenizer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable
    from pathlib import Path

FILES = {"sql": "content of sql", "chat": "content of chat", "v2": "content of v2"}
LORA: dict[str, Any] = {"max_loras": 2, "adapter_files": FILES}


@pytest.fixture
async def make_several() -> AsyncIterator[Callable[..., Any]]:
    """make_several(one dict of engine options for each, config=...)."""
    stacks: list[SeveralEngines] = []

    async def make(*engines: dict[str, Any], **config: Any) -> SeveralEngines:
        fakes = [FakeEngine(**{"auto": False, "next_token": hashed, **it}) for it in engines]
        stack = SeveralEngines(fakes, FakeTokenizer(), **config)
        stacks.append(stack)
        await stack.start()
        return stack

    yield make
    for stack in stacks:
        await stack.close()


async def load(stack: SeveralEngines, name: str, path: str) -> admin_pb2.Adapter:
    request = admin_pb2.LoadAdapterRequest(name=name, path=path)
    response = await stack.admin.LoadAdapter(request, timeout=10)
    found: admin_pb2.Adapter = response.adapter
    return found


async def unload(stack: SeveralEngines, name: str) -> None:
    await stack.admin.UnloadAdapter(admin_pb2.UnloadAdapterRequest(name=name), timeout=10)


async def failure(call: Awaitable[Any]) -> Failure:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return Failure(caught.value)


def read(stack: SeveralEngines, model: str, number: int, num_tokens: int) -> Reader:
    return Reader(
        stack.inference.GenerateStream(
            inference_pb2.GenerateStreamRequest(
                model=model,
                prompt_token_ids=common_pb2.TokenIds(ids=prompt(number)),
                sampling_params=common_pb2.SamplingParams(
                    max_tokens=num_tokens, seed=7, ignore_eos=True
                ),
                return_token_ids=True,
            ),
            timeout=20,
        )
    )


async def finish(stack: SeveralEngines, *readers: Reader) -> None:
    """Steps until every stream has ended."""
    ended = asyncio.gather(*[reader.done for reader in readers])
    while not ended.done():
        stack.step()
        await asyncio.sleep(0.001)
    await ended


def commands(engine: FakeEngine, *kinds: type) -> list[Any]:
    return [command for command in engine.commands if isinstance(command, kinds)]


def loaded(stack: SeveralEngines) -> list[list[str]]:
    return [[info.name for info in engine.adapters.infos()] for engine in stack.engines]


async def test_loaded_on_every_engine_and_named_by_clients(
    make_several: Callable[..., Awaitable[SeveralEngines]],
) -> None:
    stack = await make_several(LORA, LORA)
    adapter = await load(stack, "sql", "sql")
    assert (adapter.name, adapter.path, adapter.rank, adapter.is_static) == ("sql", "sql", 8, False)
    assert loaded(stack) == [["sql"], ["sql"]]
    listed = await stack.models.ListModels(model_pb2.ListModelsRequest())
    assert [(it.name, it.parent) for it in listed.models] == [("fake", ""), ("sql", "fake")]
    readers = [read(stack, name, i, 6) for i, name in enumerate(["sql", "fake"] * 4)]
    await stack.wait_requests(8)
    survey = await stack.admin.ListAdapters(admin_pb2.ListAdaptersRequest())
    assert survey.max_adapters == 2
    assert [(it.name, it.num_requests_in_flight) for it in survey.adapters] == [("sql", 4)]
    added = [add for engine in stack.engines for add in commands(engine, Add)]
    named = [(add.adapter, add.adapter_digest) for add in added]
    assert sorted(named) == [("", b"")] * 4 + [("sql", b"content of sql")] * 4
    await finish(stack, *readers)
    await unload(stack, "sql")
    assert loaded(stack) == [[], []]
    refused = await failure(
        stack.inference.Generate(inference_pb2.GenerateRequest(prompt="x", model="sql"), timeout=10)
    )
    assert (refused.code, refused.fields) == (grpc.StatusCode.NOT_FOUND, ["model"])


async def test_what_one_engine_refuses_no_engine_has(
    make_several: Callable[..., Awaitable[SeveralEngines]],
) -> None:
    stack = await make_several(LORA, {**LORA, "adapter_files": {}})
    refused = await failure(load(stack, "sql", "sql"))
    assert (refused.code, refused.fields) == (grpc.StatusCode.INVALID_ARGUMENT, ["path"])
    assert refused.message == "sql: no such directory"
    assert loaded(stack) == [[], []]
    other = {**LORA, "adapter_files": {"sql": "another content"}}
    stack = await make_several(LORA, other)
    refused = await failure(load(stack, "sql", "sql"))
    assert refused.code is grpc.StatusCode.FAILED_PRECONDITION
    assert refused.message == "the engines find different adapters at sql"
    assert loaded(stack) == [[], []]


async def test_refusals_name_their_field(
    make_several: Callable[..., Awaitable[SeveralEngines]],
) -> None:
    stack = await make_several(LORA)
    await load(stack, "sql", "sql")
    expected = [
        (load(stack, "", "sql"), "INVALID_ARGUMENT", "name"),
        (load(stack, "a b", "sql"), "INVALID_ARGUMENT", "name"),
        (load(stack, "chat", ""), "INVALID_ARGUMENT", "path"),
        (load(stack, "chat", "../sql"), "INVALID_ARGUMENT", "path"),
        (load(stack, "chat", "/etc"), "INVALID_ARGUMENT", "path"),
        (load(stack, "chat", "a\0b"), "INVALID_ARGUMENT", "path"),
        (load(stack, "sql", "chat"), "ALREADY_EXISTS", "name"),
        (load(stack, "fake", "chat"), "ALREADY_EXISTS", "name"),
        (unload(stack, "chat"), "NOT_FOUND", "name"),
        (unload(stack, ""), "INVALID_ARGUMENT", "name"),
    ]
    for call, code, field in expected:
        refused = await failure(call)
        assert (refused.code.name, refused.fields) == (code, [field]), refused.message
    await load(stack, "chat", "chat")
    refused = await failure(load(stack, "v2", "v2"))
    assert (refused.code, refused.info.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "NO_ROOM")
    assert "--max-loras" in refused.message


async def test_engines_without_adapters_say_so(
    make_several: Callable[..., Awaitable[SeveralEngines]],
) -> None:
    stack = await make_several({})
    refused = await failure(load(stack, "sql", "sql"))
    assert refused.info.reason == "FEATURE_DISABLED"
    assert commands(stack.engines[0], LoadAdapter) == []
    assert (await stack.admin.ListAdapters(admin_pb2.ListAdaptersRequest())).max_adapters == 0


async def test_streams_go_on_with_their_adapter_on_the_next_engine(
    make_several: Callable[..., Awaitable[SeveralEngines]],
) -> None:
    stack = await make_several(LORA)
    await load(stack, "sql", "sql")
    await load(stack, "chat", "chat")
    readers = [read(stack, name, i, 12) for i, name in enumerate(("sql", "chat", "fake"))]
    await stack.wait_requests(3)
    for _ in range(4):
        stack.step()
    for reader in readers:
        await reader.wait_ids(4)
    await stack.restart(0, auto=False, next_token=hashed, **LORA)
    await stack.wait_requests(3)
    # What it has to have comes before what needs it.
    told = commands(stack.engines[0], LoadAdapter, Add)
    assert [type(command) for command in told] == [LoadAdapter] * 2 + [Add] * 3
    assert [it.digest for it in told[:2]] == [b"content of sql", b"content of chat"]
    await finish(stack, *readers)
    for i, reader in enumerate(readers):
        assert reader.ids == undisturbed(prompt(i), 12)
    assert loaded(stack) == [["sql", "chat"]]


async def test_an_adapter_that_has_changed_meanwhile_is_not_taken_for_the_old_one(
    make_several: Callable[..., Awaitable[SeveralEngines]],
) -> None:
    stack = await make_several(LORA)
    await load(stack, "sql", "sql")
    reader, other = read(stack, "sql", 0, 12), read(stack, "fake", 1, 12)
    await stack.wait_requests(2)
    stack.step()
    await reader.wait_ids(1)
    changed = {**LORA, "adapter_files": {"sql": "changed"}}
    await stack.restart(0, auto=False, next_token=hashed, **changed)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await finish(stack, reader)
    assert Failure(caught.value).code is grpc.StatusCode.UNAVAILABLE
    assert "'sql' is gone" in Failure(caught.value).message
    await finish(stack, other)
    assert loaded(stack) == [[]]
    listed = await stack.models.ListModels(model_pb2.ListModelsRequest())
    assert [it.name for it in listed.models] == ["fake"]


async def test_an_engine_that_joins_gets_what_the_others_have(
    make_several: Callable[..., Awaitable[SeveralEngines]],
) -> None:
    stack = await make_several(LORA, LORA)
    await load(stack, "sql", "sql")
    await stack.lose(1)
    await load(stack, "chat", "chat")
    await stack.restart(1, auto=False, next_token=hashed, **LORA)
    await stack.until(lambda: loaded(stack) == [["sql", "chat"]] * 2)


async def test_a_request_goes_where_its_adapter_is(
    make_several: Callable[..., Awaitable[SeveralEngines]],
) -> None:
    stack = await make_several(LORA, {**LORA, "adapters": ("sql",)})
    readers = [read(stack, "sql", i, 3) for i in range(8)]
    spread = await stack.wait_requests(8)
    assert [len(requests) for requests in spread] == [0, 8]
    await finish(stack, *readers)
    # What an engine loads by itself is not spread.
    assert loaded(stack) == [[], ["sql"]]
    static = await stack.admin.ListAdapters(admin_pb2.ListAdaptersRequest())
    assert [it.is_static for it in static.adapters] == [True]


async def test_unloaded_between_the_check_and_the_engine(
    make_several: Callable[..., Awaitable[SeveralEngines]],
) -> None:
    stack = await make_several(LORA)
    await load(stack, "sql", "sql")
    stack.engines[0].adapters.unload("sql")  # and nobody is told
    call = stack.inference.Generate(
        inference_pb2.GenerateRequest(prompt="x", model="sql"), timeout=10
    )
    refused = await failure(call)
    assert (refused.code, refused.fields) == (grpc.StatusCode.NOT_FOUND, ["model"])
    assert refused.message == "model 'sql' does not exist"


async def test_the_http_routes_are_for_admins_keys(
    make_several: Callable[..., Awaitable[SeveralEngines]], tmp_path: Path
) -> None:
    """vLLM's names; without --api-keys anybody could call them."""
    keys = {}
    lines = []
    for name, role in (("ops", "admin"), ("app", "inference")):
        key, entry = new_key(name, "*", roles=(role,))
        keys[name] = {"authorization": f"Bearer {key}"}
        lines.append(entry.line())
    (tmp_path / "keys").write_text("\n".join(lines))
    stack = await make_several(LORA, api_keys=str(tmp_path / "keys"))
    address = stack.frontend.http_address
    async with httpx.AsyncClient(base_url=f"http://{address}", timeout=20) as http:

        async def post(who: str, verb: str, body: Any) -> httpx.Response:
            return await http.post(f"/v1/{verb}_lora_adapter", json=body, headers=keys[who])

        body = {"lora_name": "sql", "lora_path": "sql"}
        assert (await post("app", "load", body)).status_code == 403
        assert (await http.post("/v1/load_lora_adapter", json=body)).status_code == 401
        done = await post("ops", "load", body)
        assert (done.status_code, done.json()) == (200, {"name": "sql", "path": "sql", "rank": 8})
        again = await post("ops", "load", body)
        assert (again.status_code, again.json()["error"]["param"]) == (409, "lora_name")
        wrong = await post("ops", "load", {"lora_name": "chat", "lora_path": "/etc"})
        assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "lora_path")
        missing = await post("ops", "load", {"lora_name": "chat"})
        assert (missing.status_code, missing.json()["error"]["param"]) == (400, "lora_path")
        assert (await post("app", "unload", {"lora_name": "sql"})).status_code == 403
        assert (await post("ops", "unload", {"lora_name": "sql"})).json() == {"name": "sql"}
        assert (await post("ops", "unload", {"lora_name": "sql"})).status_code == 404
    assert loaded(stack) == [[]]
    assert len(commands(stack.engines[0], UnloadAdapter)) == 2


async def test_the_http_routes_are_off_without_keys(
    make_several: Callable[..., Awaitable[SeveralEngines]],
) -> None:
    stack = await make_several(LORA)
    async with httpx.AsyncClient(base_url=f"http://{stack.frontend.http_address}") as http:
        body = json.dumps({"lora_name": "sql", "lora_path": "sql"})
        headers = {"content-type": "application/json"}
        refused = await http.post("/v1/load_lora_adapter", content=body, headers=headers)
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "feature_disabled")
    assert loaded(stack) == [[]]


async def test_vllms_metric_tells_who_runs_and_who_waits(
    make_several: Callable[..., Awaitable[SeveralEngines]],
) -> None:
    stack = await make_several(LORA)
    await load(stack, "sql", "sql")
    await load(stack, "chat", "chat")

    def told() -> list[tuple[str, ...]]:
        page = stack.frontend.metrics.exposition().decode()
        lines = [line for line in page.splitlines() if line.startswith("vllm:lora_requests_info{")]
        return [tuple(re.findall(r'="([^"]*)"', line)) for line in lines]

    assert told() == [("2", "", "")]
    readers = [read(stack, "sql", 0, 3)]
    await stack.wait_requests(1)
    stack.step()
    await readers[0].wait_ids(1)
    readers += [read(stack, "chat", 1, 3), read(stack, "fake", 2, 3)]
    await stack.wait_requests(3)
    assert told() == [("2", "sql", "chat")]
    await finish(stack, *readers)
    assert told() == [("2", "", "")]
    await stack.engines[0].kill()
    await stack.until(lambda: stack.links[0].ready is None)
    assert told() == []


async def test_what_was_loaded_while_the_engine_was_out_of_reach_is_known_afterwards(
    make_several: Callable[..., Awaitable[SeveralEngines]],
) -> None:
    """Through another frontend: its AdapterList was lost with the connection."""
    stack = await make_several(LORA)
    stack.engines[0].adapters.load("sql", "sql")  # and nobody is told
    client = stack.links[0].client
    client._lost, client._last_hello = True, 0.0
    await stack.until(lambda: not client.lost)
    assert list(stack.links[0].adapters) == ["sql"]
    reader = read(stack, "sql", 0, 3)
    await finish(stack, reader)
    assert reader.ids == undisturbed(prompt(0), 3)
