"""pagewire.client, synchronous and not, against a whole frontend over real sockets."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pagewire.client import (
    AlreadyExists,
    Ask,
    AsyncClient,
    CallFailed,
    Cancelled,
    Client,
    DeadlineExceeded,
    InvalidArgument,
    NotFound,
    QueueFull,
    QuotaExceeded,
    RetryPolicy,
    Unreachable,
)
from pagewire.errors import ConfigError
from tests.frontend.test_resuming_client import Network
from tests.frontend.test_retry_policy import num_adds, num_rejections
from tests.frontend.test_tool_calls import ANSWER, CITY, writes
from tests.support.fake_engine import TEXT

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from tests.frontend.conftest import Stack

DEPLOYED = Path(__file__).parents[2] / "deploy" / "service_config.json"
BIRDS = "🦜 says: grüß Gott, 世界. " * 12


def test_the_policy_is_the_deployed_one() -> None:
    assert json.loads(RetryPolicy().service_config()) == json.loads(DEPLOYED.read_text())
    other = json.loads(RetryPolicy(max_attempts=2, initial_backoff=1e-3).service_config())
    retry = other["methodConfig"][0]["retryPolicy"]
    assert (retry["maxAttempts"], retry["initialBackoff"]) == (2, "0.001s")


@pytest.mark.parametrize(
    ("field", "value"),
    [("max_attempts", 6), ("max_attempts", 1), ("max_backoff", 0.0), ("initial_backoff", -1.0)],
)
def test_a_policy_that_grpc_would_bend_is_refused(field: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=field):
        RetryPolicy(**{field: value})


async def test_both_clients_say_the_same(stack: Stack) -> None:
    ask = Ask(prompt="a", sampling={"max_tokens": 30, "seed": 1})

    def use() -> list[Any]:
        with Client(stack.frontend.address, timeout=60) as client:
            return [
                client.generate(ask)["outputs"],
                "".join(client.stream(ask)),
                client.models(),
                client.chat([("user", "Hi")], max_tokens=9),
            ]

    there = await asyncio.to_thread(use)
    async with AsyncClient(stack.frontend.address, timeout=60) as client:
        async with client.stream(ask) as stream:
            text = "".join([piece async for piece in stream])
            assert stream.final is not None
            assert stream.final["usage"]["completion_tokens"] == 30
        turn = await client.chat([{"role": "user", "content": "Hi"}], max_tokens=9)
        here = [(await client.generate(ask))["outputs"], text, await client.models(), turn]
    assert here == there
    assert text == TEXT[:30]
    assert turn == {"role": "assistant", "content": TEXT[:9]}


async def test_a_conversation_with_tools_goes_on(make_stack: Callable[..., Any]) -> None:
    stack = await make_stack(next_token=writes(ANSWER))
    tools = [{"name": name, "parameters": CITY} for name in ("weather", "now")]
    messages: list[Any] = [("user", "Hi")]
    async with AsyncClient(stack.frontend.address, timeout=60) as client:
        turn = await client.chat(messages, tools=tools)
        assert [call["name"] for call in turn["tool_calls"]] == ["weather", "now"]
        answer = {"role": "tool", "content": "4", "tool_call_id": turn["tool_calls"][0]["id"]}
        await client.chat([*messages, turn, answer], tools=tools)
        async with client.stream(Ask(messages=messages, tools=tools)) as stream:
            text = "".join([piece async for piece in stream])
        assert [call["name"] for call in stream.tool_calls] == ["weather", "now"]
        assert text == turn["content"]
    told = stack.tokenizer.chats[-2].messages
    assert [len(message.tool_calls) for message in told] == [0, 2, 0]


# What is refused, and by whom.


@pytest.mark.parametrize(
    ("ask", "field"),
    [
        (Ask(prompt="a", sampling={"temprature": 1}), "sampling_params.temprature"),
        (Ask(prompt="a", sampling={"max_tokens": "many"}), "sampling_params.max_tokens"),
        (Ask(prompt="a", sampling={"n": 2}), "sampling_params.n"),
        (Ask(prompt="a", options={"prioritee": 1}), "prioritee"),
        (Ask(prompt="a", options={"priority": "high"}), "priority"),
        (Ask(prompt="a", prompt_token_ids=[1]), "input"),
        (Ask(prompt_token_ids=["x"]), "prompt_token_ids"),  # type: ignore[list-item]
        (Ask(messages=[{"roll": "user"}]), "chat"),
    ],
)
def test_what_cannot_be_sent_names_its_field(ask: Ask, field: str) -> None:
    with (
        Client("127.0.0.1:1") as client,
        pytest.raises(InvalidArgument) as raised,
    ):
        client.stream(ask)
    assert (raised.value.field, raised.value.reached) == (field, False)


@pytest.mark.parametrize("name", ["logprobs", "prompt_logprobs"])
def test_a_resumable_stream_is_of_text(name: str) -> None:
    with Client("127.0.0.1:1") as client, pytest.raises(InvalidArgument) as raised:
        client.resumable_stream(Ask(prompt="a", sampling={name: 1}))
    assert raised.value.field == f"sampling_params.{name}"
    with pytest.raises(InvalidArgument, match="text alone"):
        client.resumable_stream(Ask(prompt="a", options={"return_token_ids": True}))


async def test_failures_have_types_and_details(make_stack: Callable[..., Any]) -> None:
    stack = await make_stack(auto=False, config={"max_requests": 1})
    async with AsyncClient(stack.frontend.address, timeout=60, retry=None) as client:
        with pytest.raises(InvalidArgument) as bad:
            await client.generate(Ask(prompt="a", sampling={"top_p": 7}))
        assert (bad.value.field, bad.value.reason) == ("sampling_params.top_p", "INVALID_REQUEST")
        with pytest.raises(NotFound) as missing:
            await client.generate(Ask(prompt="a", model="other"))
        assert missing.value.field == "model"
        running = client.stream(Ask(prompt="a", options={"request_id": "r-1"}))
        await stack.engine.wait_running()
        with pytest.raises(QueueFull) as full:
            await client.generate("b")
        assert (full.value.queue_depth, full.value.queued_tokens) == (1, 1)
        assert full.value.retry_after is not None
        assert full.value.retry_after > 0
        await client.cancel("r-1")
        with pytest.raises(Cancelled):
            await anext(running)
        with pytest.raises(NotFound):
            await client.cancel("r-1")


async def test_the_same_id_twice(manual: Stack) -> None:
    async with AsyncClient(manual.frontend.address, timeout=60, retry=None) as client:
        ask = Ask(prompt="a", options={"request_id": "r-1"})
        async with client.stream(ask):
            await manual.engine.wait_running()
            with pytest.raises(AlreadyExists) as raised:
                await client.generate(ask)
            assert raised.value.field == "request_id"


async def test_a_quota_says_which(make_stack: Callable[..., Any], tmp_path: Path) -> None:
    limits = tmp_path / "limits.toml"
    limits.write_text("[default]\nmax_requests = 1\n")
    stack = await make_stack(auto=False, config={"tenant_limits": str(limits)})
    address = stack.frontend.address
    async with AsyncClient(address, timeout=60, retry=None) as client, client.stream("a"):
        await stack.engine.wait_running()
        with pytest.raises(QuotaExceeded) as raised:
            await client.generate("b")
    assert raised.value.quota == "max_requests"


# Retries.


async def test_a_full_server_is_asked_again(make_stack: Callable[..., Any]) -> None:
    stack = await make_stack(auto=False, config={"max_requests": 1})
    async with AsyncClient(stack.frontend.address, timeout=60) as client:
        first = client.stream("a")
        await stack.engine.wait_running()
        second = asyncio.ensure_future(client.generate(Ask(prompt="b", sampling={"max_tokens": 3})))
        while not await num_rejections(stack):
            pass
        first.cancel()
        await stack.engine.wait_for(lambda: num_adds(stack) == 2)
        for _ in range(3):
            stack.engine.step()
        assert (await second)["outputs"][0]["text"] == TEXT[:3]


async def test_a_server_that_drains_is_left(make_stack: Callable[..., Any]) -> None:
    draining, other = await make_stack(step_s=0.001), await make_stack(step_s=0.001)
    draining.frontend.dispatcher.drain()
    address = f"ipv4:{draining.frontend.address},{other.frontend.address}"

    def use() -> list[str]:
        with Client(address, timeout=60) as client:
            asks = [Ask(prompt="x", sampling={"max_tokens": count}) for count in range(1, 5)]
            return ["".join(client.stream(ask)) for ask in asks]

    assert await asyncio.to_thread(use) == [TEXT[:count] for count in range(1, 5)]
    assert (num_adds(draining), num_adds(other)) == (0, 4)


async def test_nobody_there(unused_tcp_port: int) -> None:
    async with AsyncClient(f"127.0.0.1:{unused_tcp_port}", retry=None) as client:
        with pytest.raises(Unreachable) as raised:
            await client.models(5)
    assert raised.value.lost


# Ends.


async def test_a_deadline(manual: Stack) -> None:
    def use() -> None:
        with (
            Client(manual.frontend.address, timeout=0.3) as client,
            pytest.raises(DeadlineExceeded),
        ):
            list(client.stream("a"))

    await asyncio.to_thread(use)
    async with AsyncClient(manual.frontend.address) as client:
        with pytest.raises(DeadlineExceeded):
            await client.generate("a", timeout=0.3)
    await at_rest(manual)


async def test_to_leave_the_loop_ends_the_call(manual: Stack) -> None:
    def use(client: Client) -> str:
        for piece in client.stream("a"):
            return piece
        raise AssertionError("no text")

    with Client(manual.frontend.address, timeout=60) as client:
        reading = asyncio.ensure_future(asyncio.to_thread(use, client))
        await manual.engine.wait_running()
        manual.engine.step()
        assert await reading == TEXT[0]
        # The channel is still open: it is the call that ended.
        await at_rest(manual)


async def test_a_cancelled_task_ends_its_call(manual: Stack) -> None:
    async def read(client: AsyncClient) -> None:
        async for _ in client.stream("a"):
            pass

    async with AsyncClient(manual.frontend.address, timeout=60) as client:
        for use in (read(client), client.generate("a")):
            task = asyncio.ensure_future(use)
            await manual.engine.wait_running()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await at_rest(manual)


async def at_rest(stack: Stack) -> None:
    await stack.until(lambda: stack.frontend.dispatcher.admission.requests == 0)
    await stack.engine.wait_for(lambda: not stack.engine.running and not stack.engine.waiting)


# A network that breaks.


@pytest.fixture
async def broken(make_stack: Callable[..., Any]) -> AsyncIterator[tuple[Stack, Network]]:
    stack = await make_stack(step_s=0.004, next_token=writes(BIRDS), config={"resume_ttl": 30.0})
    network = Network(stack.frontend.address)
    await network.start()
    yield stack, network
    await network.close()


async def test_a_text_over_three_connections(broken: tuple[Stack, Network]) -> None:
    stack, network = broken
    cuts = [30, 150]
    text = ""
    async with AsyncClient(network.address, timeout=60) as client:
        async with client.resumable_stream("x") as stream:
            async for piece in stream:
                text += piece
                if cuts and len(text) > cuts[0]:
                    cuts.pop(0)
                    network.cut()
        assert stream.final is not None
        assert stream.final["usage"]["completion_tokens"] == len(BIRDS.encode()) + 1
    assert text == BIRDS
    assert network.num_connections >= 3
    assert num_adds(stack) == 1
    await at_rest(stack)


async def test_without_resumption_a_break_is_an_error(broken: tuple[Stack, Network]) -> None:
    _, network = broken
    async with AsyncClient(network.address, timeout=60) as client:
        with pytest.raises(CallFailed) as raised:
            async for _ in client.stream("x"):
                network.cut()
    assert raised.value.lost


async def test_a_connection_that_breaks_before_the_first_token(
    make_stack: Callable[..., Any],
) -> None:
    stack = await make_stack(auto=False, config={"resume_ttl": 30.0})
    network = Network(stack.frontend.address)
    await network.start()
    async with AsyncClient(network.address, timeout=60) as client:
        stream = client.resumable_stream(Ask(prompt="x", sampling={"max_tokens": 3}))
        reading = asyncio.ensure_future(anext(stream))
        await stack.engine.wait_running()
        network.cut()
        await stack.until(lambda: network.num_connections >= 2)
        for _ in range(3):
            stack.engine.step()
        text = await reading + "".join([piece async for piece in stream])
    await network.close()
    assert text == TEXT[:3]
    assert num_adds(stack) == 1


async def test_to_leave_a_resumable_stream_ends_its_request(
    make_stack: Callable[..., Any],
) -> None:
    stack = await make_stack(auto=False, config={"resume_ttl": 600.0})

    async def read(client: AsyncClient) -> None:
        async for _ in client.resumable_stream("a"):
            pass

    async with AsyncClient(stack.frontend.address, timeout=60) as client:
        task = asyncio.ensure_future(read(client))
        await stack.engine.wait_running()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    await at_rest(stack)
    assert not stack.frontend.resumables._held

    def leave(client: Client) -> str:
        with client.resumable_stream("a") as stream:
            return next(iter(stream))

    with Client(stack.frontend.address, timeout=60) as blocking:
        reading = asyncio.ensure_future(asyncio.to_thread(leave, blocking))
        await stack.engine.wait_running()
        stack.engine.step()
        assert await reading == TEXT[0]
    await at_rest(stack)
    assert not stack.frontend.resumables._held
