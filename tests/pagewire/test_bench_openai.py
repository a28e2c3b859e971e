"""The OpenAI target against a small server of server-sent events."""

from __future__ import annotations

import asyncio
import json
import random
from typing import TYPE_CHECKING, Any

import pytest

from pagewire.bench.load import Load, run
from pagewire.bench.openai_target import OpenAITarget
from pagewire.bench.workload import Ask

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from pagewire.bench.record import Record


def event(text: str, **fields: Any) -> bytes:
    choice = {"index": 0, "text": text, "finish_reason": None, **fields}
    return b"data: %b\n\n" % json.dumps({"id": "c", "choices": [choice], "usage": None}).encode()


USAGE = {"prompt_tokens": 5, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 2}}
LAST = b"data: %b\n\ndata: [DONE]\n\n" % json.dumps({"choices": [], "usage": USAGE}).encode()


class SseServer:
    """Answers each request with the next of `answers`: a status and the parts of a body."""

    def __init__(self) -> None:
        self.answers: list[tuple[int, list[bytes]]] = []
        self.bodies: list[dict[str, Any]] = []
        self.ends_silently = False
        """Whether whatever follows an answer on its connection is lost."""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                assert head.startswith(b"POST /v1/completions HTTP/1.1\r\n")
                lines = [line.lower() for line in head.splitlines()]
                length = next(int(x[15:]) for x in lines if x.startswith(b"content-length:"))
                self.bodies.append(json.loads(await reader.readexactly(length)))
                status, parts = self.answers.pop(0)
                writer.write(b"HTTP/1.1 %d X\r\ntransfer-encoding: chunked\r\n\r\n" % status)
                for part in parts:
                    writer.write(b"%x\r\n%b\r\n" % (len(part), part))
                    await writer.drain()
                    # Another turn of the client, so that the parts come apart.
                    for _ in range(20):
                        await asyncio.sleep(0)
                writer.write(b"0\r\n\r\n")
                if self.ends_silently:
                    await reader.read(1)
                    return
        except asyncio.IncompleteReadError:
            pass
        finally:
            writer.close()


@pytest.fixture
async def server() -> AsyncIterator[SseServer]:
    fake = SseServer()
    listening = await asyncio.start_server(fake.serve, "127.0.0.1", 0)
    fake.url = "http://{}:{}".format(*listening.sockets[0].getsockname())  # type: ignore[attr-defined]
    yield fake
    listening.close()
    await listening.wait_closed()


async def ask(server: SseServer, *asks: Ask, **options: Any) -> list[Record]:
    url: str = server.url  # type: ignore[attr-defined]
    async with OpenAITarget(url, model="m", body=options, timeout=60.0) as target:
        return await run(target, asks, Load(concurrency=1), random.Random(1))


async def test_a_stream_is_counted_by_usage_and_timed_by_event(server: SseServer) -> None:
    # Cut anywhere: TCP knows no events. The empty text is no output.
    whole = event("") + event("a") + b": a comment\n\n" + event("b") + LAST
    server.answers = [(200, [whole[:7], whole[7:150], whole[150:]])]
    (record,) = await ask(server, Ask(3, ids=(7, 8)), temperature=0.0, ignore_eos=True)
    assert record.ok
    assert (record.prompt_tokens, record.output_tokens, record.cached_tokens) == (5, 3, 2)
    assert len(record.chunk_times) == 2
    assert record.token_gaps() is None
    assert record.sent_at < record.chunk_times[0] <= record.chunk_times[1] <= record.ended_at
    (body,) = server.bodies
    assert body == {
        "model": "m",
        "prompt": [7, 8],
        "max_tokens": 3,
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0.0,
        "ignore_eos": True,
    }


async def test_no_request_depends_on_the_connection_of_another(server: SseServer) -> None:
    server.ends_silently = True
    server.answers = [(200, [event("a") + LAST]), (200, [event("b") + LAST])]
    records = await ask(server, Ask(3, ids=(7,)), Ask(3, ids=(8,)))
    assert [record.ok for record in records] == [True, True]


async def test_token_ids_tell_the_tokens_of_an_event(server: SseServer) -> None:
    server.answers = [(200, [event("a", token_ids=[1]), event("b", token_ids=[2, 3]), LAST])]
    (record,) = await ask(server, Ask(3, text="hi"))
    assert record.chunk_tokens == [1, 2]
    gaps = record.token_gaps()
    assert gaps is not None
    assert len(gaps) == 2
    assert server.bodies[0]["prompt"] == "hi"


async def test_failures_have_their_codes_and_the_next_request_goes_on(server: SseServer) -> None:
    error = b'data: {"error": {"message": "out of luck"}}\n\n'
    server.answers = [
        (429, [b'{"error": "busy"}']),
        (500, [b"oops"]),
        (200, [event("a"), error]),
        (200, [event("a")]),
        (200, [event("a"), b"data: [DONE]\n\n"]),
        (200, [b"data: {\n\n"]),
        (200, [event("a"), LAST]),
    ]
    records = await ask(server, *[Ask(3, text="hi")] * 7)
    assert [record.error for record in records] == [
        "HTTP 429",
        "HTTP 500",
        "ERROR_EVENT",
        "BAD_STREAM",
        "BAD_STREAM",
        "BAD_STREAM",
        None,
    ]
    assert [record.rejected for record in records] == [True] + [False] * 6
    assert "busy" in records[0].message
    assert "out of luck" in records[2].message
    assert "[DONE]" in records[3].message
    assert "usage" in records[4].message


async def test_a_server_that_is_not_there_is_an_error(server: SseServer) -> None:
    async with OpenAITarget("http://127.0.0.1:1", model=None, body={}, timeout=5.0) as target:
        (record,) = await run(target, [Ask(1, text="hi")], Load(concurrency=1), random.Random(1))
    assert record.error == "ClientConnectorError"
    assert not record.rejected
