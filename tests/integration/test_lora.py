"""Adapters over the whole stack: each is a model of its own to clients, with PEFT's tokens."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

import grpc
import httpx
import psutil
import pytest
import torch

from pagewire.v1 import admin_pb2, common_pb2, inference_pb2, model_pb2
from tests.support.adapters import Adapted, save_adapter
from tests.support.stack import Api, Stack, Streamed, connect, read_stream, running_stack
from tests.support.tiny_model import TinySpec, write_hf

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from pathlib import Path

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

SPEC = TinySpec(max_positions=512)
PROMPT = "what is the weather like, and why?"
IDS = [2 + (7 * at) % 250 for at in range(40)]
NUM_TOKENS = 8
FLAGS = (
    *("--dtype=float32", "--device=cpu", "--cpu-threads=1", "--kv-cache-memory=64MiB"),
    "--enable-lora",
)


@dataclass
class Tiny:
    model: Path
    adapters: dict[str, Path]
    directory: Path
    truth: Adapted

    def modules(self, *names: str) -> str:
        return ",".join(f"{name}={self.adapters[name]}" for name in names)


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """transformers beside a server, on shared cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    import transformers

    directory = tmp_path_factory.mktemp("lora")
    model_path = write_hf(directory / "tiny", SPEC)
    model = transformers.AutoModelForCausalLM.from_pretrained(model_path).float().eval()
    adapters = {
        name: save_adapter(model, directory / "adapters" / name, seed=seed)
        for seed, name in enumerate(("sql", "chat", "late"))
    }
    return Tiny(model_path, adapters, directory / "adapters", Adapted(model, adapters))


@pytest.fixture(scope="module")
def lora_stack(tiny: Tiny) -> Iterator[Stack]:
    flags = (f"--lora-modules={tiny.modules('sql', 'chat')}", f"--lora-dir={tiny.directory}")
    with running_stack(f"--model={tiny.model}", *FLAGS, *flags, "--max-loras=3") as stack:
        yield stack


@pytest.fixture
async def lora_api(lora_stack: Stack) -> AsyncIterator[Api]:
    async with connect(lora_stack) as api:
        yield api


def http_client(stack: Stack) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=f"http://{stack.http_address}", timeout=60)


async def ask(api: Api, ids: list[int], model: str | None, **fields: object) -> list[int]:
    response = await api.inference.Generate(
        inference_pb2.GenerateRequest(
            prompt_token_ids=common_pb2.TokenIds(ids=ids),
            model=model,
            sampling_params=common_pb2.SamplingParams(
                temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True
            ),
            return_token_ids=True,
            **fields,
        )
    )
    assert response.model == (model or "tiny")
    return list(response.outputs[0].token_ids)


def stream(api: Api, model: str, num_tokens: int, started: asyncio.Event) -> asyncio.Task[Streamed]:
    call = api.inference.GenerateStream(
        inference_pb2.GenerateStreamRequest(
            prompt_token_ids=common_pb2.TokenIds(ids=IDS),
            model=model,
            sampling_params=common_pb2.SamplingParams(
                temperature=0, max_tokens=num_tokens, ignore_eos=True
            ),
        )
    )
    return asyncio.create_task(read_stream(call, started))


async def load(api: Api, name: str, path: str) -> None:
    await api.admin.LoadAdapter(admin_pb2.LoadAdapterRequest(name=name, path=path))


async def unload(api: Api, name: str) -> None:
    await api.admin.UnloadAdapter(admin_pb2.UnloadAdapterRequest(name=name))


async def test_each_name_has_its_own_tokens(lora_api: Api, tiny: Tiny) -> None:
    for _ in range(2):  # the second time from the prefix cache
        for name in ("tiny", "sql", "chat"):
            expected = tiny.truth.greedy(name.replace("tiny", ""), IDS, NUM_TOKENS)
            assert await ask(lora_api, IDS, name) == expected
    base = tiny.truth.greedy("", IDS, NUM_TOKENS)
    assert await ask(lora_api, IDS, None) == base
    assert base != tiny.truth.greedy("sql", IDS, NUM_TOKENS)


async def test_adapters_are_listed_with_what_they_adapt(lora_api: Api, lora_stack: Stack) -> None:
    listed = await lora_api.models.ListModels(model_pb2.ListModelsRequest())
    parents = {it.name: it.parent if it.HasField("parent") else None for it in listed.models}
    assert parents == {"tiny": None, "sql": "tiny", "chat": "tiny"}
    found = await lora_api.models.GetModel(model_pb2.GetModelRequest(name="sql"))
    assert found.model.parent == "tiny" and found.model.max_model_len == SPEC.max_positions
    async with http_client(lora_stack) as http:
        models = (await http.get("/v1/models")).json()["data"]
        assert [(it["id"], it["root"], it["parent"]) for it in models] == [
            ("tiny", "tiny", None),
            ("sql", "tiny", "tiny"),
            ("chat", "tiny", "tiny"),
        ]
        assert (await http.get("/v1/models/chat")).json() == models[2]
        assert (await http.get("/v1/models/none")).status_code == 404


async def test_a_name_that_is_not_there(lora_api: Api) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await ask(lora_api, IDS, "late")
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    assert caught.value.details() == "model 'late' does not exist"


async def test_the_openai_routes_take_the_name_as_the_model(lora_stack: Stack, tiny: Tiny) -> None:
    async with http_client(lora_stack) as http:
        body = {"prompt": IDS, "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True}
        for name in ("sql", "tiny"):
            answer = await http.post(
                "/v1/completions", json={**body, "model": name, "return_token_ids": True}
            )
            assert answer.json()["model"] == name
            expected = tiny.truth.greedy(name.replace("tiny", ""), IDS, NUM_TOKENS)
            assert answer.json()["choices"][0]["token_ids"] == expected
        chat = await http.post(
            "/v1/chat/completions",
            json={"model": "chat", "messages": [{"role": "user", "content": PROMPT}]},
        )
        assert chat.json()["model"] == "chat"
        refused = await http.post("/v1/completions", json={**body, "model": "late"})
        assert refused.status_code == 404
        assert refused.json()["error"]["param"] == "model"


async def test_loaded_and_unloaded_while_it_runs(lora_api: Api, tiny: Tiny) -> None:
    for _ in range(2):
        await load(lora_api, "late", "late")
        assert await ask(lora_api, IDS, "late") == tiny.truth.greedy("late", IDS, NUM_TOKENS)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await load(lora_api, "more", "late")
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        await unload(lora_api, "late")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await ask(lora_api, IDS, "late")
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    # The name with another content: not the old KV, and not the old weights.
    await load(lora_api, "late", "chat")
    assert await ask(lora_api, IDS, "late") == tiny.truth.greedy("chat", IDS, NUM_TOKENS)
    await unload(lora_api, "late")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await load(lora_api, "late", "../tiny")
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_stream_goes_on_when_its_adapter_is_unloaded(lora_api: Api) -> None:
    await load(lora_api, "late", "late")
    whole = await stream(lora_api, "late", 300, asyncio.Event())
    started = asyncio.Event()
    task = stream(lora_api, "late", 300, started)
    await asyncio.wait_for(started.wait(), 60)
    await unload(lora_api, "late")
    assert not task.done()
    listed = await lora_api.admin.ListAdapters(admin_pb2.ListAdaptersRequest())
    assert [it.name for it in listed.adapters] == ["sql", "chat"]
    assert (await task).text == whole.text
    await lora_api.at_rest()
    await load(lora_api, "late", "late")  # there is a slot again
    await unload(lora_api, "late")


async def test_streams_outlive_the_engine_with_the_adapters_that_they_had(lora_api: Api) -> None:
    """One of --lora-modules, which the engine loads again, and one loaded at run time."""
    await load(lora_api, "late", "late")
    names = ("late", "sql", "tiny")
    whole = [await stream(lora_api, name, 400, asyncio.Event()) for name in names]
    assert len({streamed.text for streamed in whole}) == len(names)
    started = [asyncio.Event() for _ in names]
    tasks = [stream(lora_api, name, 400, event) for name, event in zip(names, started, strict=True)]
    await asyncio.gather(*(asyncio.wait_for(event.wait(), 60) for event in started))
    before = await lora_api.stats()
    psutil.Process(before.engine_pid).kill()
    assert not any(task.done() for task in tasks)
    finished = await asyncio.wait_for(asyncio.gather(*tasks), 120)
    assert [streamed.text for streamed in finished] == [streamed.text for streamed in whole]
    after = await lora_api.at_rest()
    assert after.engine_epoch != before.engine_epoch
    listed = await lora_api.admin.ListAdapters(admin_pb2.ListAdaptersRequest())
    assert [(it.name, it.is_static) for it in listed.adapters] == [
        ("sql", True),
        ("chat", True),
        ("late", False),
    ]
    await unload(lora_api, "late")
