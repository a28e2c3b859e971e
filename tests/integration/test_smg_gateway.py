"""The smg gateway, as it comes, in front of two whole servers that speak vLLM's protocol."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import httpx
import openai
import psutil
import pytest

from tests.support.stack import connect, running_stack
from tests.support.tiny_model import TinySpec, write_hf

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
pytest.importorskip("smg", reason="the gateway is not installed: pip install smg")

FLAGS = (
    "--device=cpu",
    "--dtype=float32",
    "--kv-cache-memory=64MiB",
    "--cpu-threads=1",
    "--served-model-name=tiny",
    "--vllm-protocol",
)
WAIT_S = 60.0


def free_port() -> int:
    """The gateway takes no port 0."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextlib.contextmanager
def running_gateway(log: Path, tokenizer: Path, *addresses: str) -> Iterator[str]:
    """The base URL of a gateway over these gRPC workers, not yet ready."""
    port = free_port()
    command = [
        *(sys.executable, "-m", "smg", "launch", "--host=127.0.0.1", f"--port={port}"),
        *("--worker-urls", *(f"grpc://{address}" for address in addresses)),
        *("--backend=vllm", "--policy=round_robin", f"--tokenizer-path={tokenizer}"),
        *("--prometheus-host=127.0.0.1", f"--prometheus-port={free_port()}"),
    ]
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env={**os.environ})
    try:
        yield f"http://127.0.0.1:{port}"
    except BaseException:
        print(log.read_text(), file=sys.stderr)
        raise
    finally:
        process.terminate()
        try:
            process.wait(WAIT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


async def ready_workers(url: str, count: int) -> None:
    async with httpx.AsyncClient(base_url=url) as client, asyncio.timeout(WAIT_S):
        while True:
            with contextlib.suppress(httpx.TransportError):
                answer = await client.get("/workers")
                workers = answer.json()["workers"] if answer.is_success else []
                if sum(worker["is_healthy"] for worker in workers) == count:
                    return
            await asyncio.sleep(0.1)


async def chat(client: openai.AsyncOpenAI) -> Any:
    return await client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "hello"}],
        max_tokens=12,
        temperature=0,
    )


async def num_served(stack: Any) -> int:
    """Requests that this server has ended well, from its own metrics."""
    async with httpx.AsyncClient() as client:
        text = (await client.get(f"http://{stack.http_address}/metrics")).text
    head = 'pagewire_rpcs_handled_total{code="OK",method="/vllm.grpc.engine.VllmEngine/Generate"} '
    found = [line.removeprefix(head) for line in text.splitlines() if line.startswith(head)]
    return int(float(found[0])) if found else 0


async def test_two_servers_behind_a_gateway_and_one_that_dies(tmp_path: Path) -> None:
    model = write_hf(tmp_path / "model", TinySpec(max_positions=4096))
    with contextlib.ExitStack() as life:
        starting = [
            asyncio.to_thread(life.enter_context, running_stack(f"--model={model}", *FLAGS))
            for _ in range(2)
        ]
        one, two = await asyncio.gather(*starting)
        url = life.enter_context(
            running_gateway(tmp_path / "gateway.log", model, one.address, two.address)
        )
        await ready_workers(url, 2)
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as client:
            answers = [await chat(client) for _ in range(4)]
            assert [await num_served(stack) for stack in (one, two)] == [2, 2]
            texts = {answer.choices[0].message.content for answer in answers}
            assert len(texts) == 1, "greedy, the same model"
            assert [answer.usage.completion_tokens for answer in answers] == [12] * 4

            # What the server itself says to the same chat: the gateway's template,
            # tokenizer and detokenizer are its own.
            async with openai.AsyncOpenAI(
                base_url=f"http://{one.http_address}/v1", api_key="none"
            ) as direct:
                own = await chat(direct)
            assert own.choices[0].message.content in texts
            assert own.usage.prompt_tokens == answers[0].usage.prompt_tokens

            stream = await client.chat.completions.create(
                model="tiny",
                messages=[{"role": "user", "content": "hello"}],
                max_tokens=12,
                temperature=0,
                stream=True,
                stream_options={"include_usage": True},
            )
            chunks = [chunk async for chunk in stream]
            pieces = [c.choices[0].delta.content or "" for c in chunks if c.choices]
            assert "".join(pieces) in texts
            assert chunks[-1].usage.completion_tokens == 12

            for pid in (one.process.pid, *one.pids.values()):
                with contextlib.suppress(psutil.NoSuchProcess):
                    psutil.Process(pid).kill()
            one.process.wait(WAIT_S)
            before = await num_served(two)
            after = [await chat(client) for _ in range(6)]
            assert {answer.choices[0].message.content for answer in after} == texts
            assert await num_served(two) == before + 6
        async with connect(two) as api:
            await api.at_rest()
