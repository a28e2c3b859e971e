"""OpenAI-compatible servers: /v1/completions, streamed as server-sent events."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Self

import aiohttp
import msgspec

from pagewire.bench.load import RequestFailed, clock

if TYPE_CHECKING:
    import ssl
    from collections.abc import Mapping

    from pagewire.bench.record import Record
    from pagewire.bench.workload import Ask

_MAX_LINE_BYTES = 1 << 20
_DATA, _DONE = b"data:", b"[DONE]"


class _Choice(msgspec.Struct):
    text: str | None = None
    token_ids: list[int] | None = None
    """Of servers that send them, if extra_body asks for them."""


class _CachedDetails(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int | None = None
    prompt_tokens_details: _CachedDetails | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


_decode_event = msgspec.json.Decoder(_Event).decode


class OpenAITarget:
    """A connection for each request, as llama.cpp's server ends them after a stream without a word,
    and a pool that takes one for alive loses the next request. Over TLS a pool as large as the load
    needs: handshakes are not what is measured. An asynchronous context manager."""

    def __init__(
        self,
        url: str,
        *,
        model: str | None,
        body: Mapping[str, Any],
        timeout: float | None,
        headers: Mapping[str, str] | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """`url` is the server's, without /v1; `body` is merged into every request. `tls` is for
        https; None takes the system's CAs and shows no certificate."""
        self._headers = headers
        self._tls = tls
        self._url = f"{url.rstrip('/')}/v1/completions"
        self._body = {
            **({} if model is None else {"model": model}),
            "stream": True,
            "stream_options": {"include_usage": True},
            **body,
        }
        self._timeout = aiohttp.ClientTimeout(total=timeout)

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(
            timeout=self._timeout,
            headers=self._headers,
            connector=aiohttp.TCPConnector(
                limit=0,
                force_close=not self._url.startswith("https:"),
                ssl=True if self._tls is None else self._tls,
            ),
            auto_decompress=False,
        )
        return self

    async def __aexit__(self, *_exc: object) -> None:
        await self._session.close()

    async def send(self, ask: Ask, record: Record) -> None:
        prompt = ask.text if ask.text is not None else list(ask.ids)
        body = self._body | {"prompt": prompt, "max_tokens": ask.max_tokens}
        data = json.dumps(body).encode()
        headers = {"content-type": "application/json", "accept": "text/event-stream"}
        async with self._session.post(self._url, data=data, headers=headers) as response:
            if response.status != 200:
                text = (await response.content.read(2000)).decode(errors="replace")
                raise RequestFailed(f"HTTP {response.status}", text)
            await self._read(response.content, record)

    async def _read(self, stream: aiohttp.StreamReader, record: Record) -> None:
        """By chunk as it arrives: one clock reading for all events that came together."""
        rest = b""
        has_usage = done = False
        while part := await stream.readany():
            now = clock()
            *lines, rest = (rest + part).split(b"\n")
            if len(rest) > _MAX_LINE_BYTES:
                raise RequestFailed("BAD_STREAM", "an event without an end")
            for line in lines:
                if not line.startswith(_DATA):
                    continue
                data = line[len(_DATA) :].strip()
                if data == _DONE:
                    done = True
                else:
                    has_usage |= self._take(data, now, record)
        if not done:
            raise RequestFailed("BAD_STREAM", "the stream ended without [DONE]")
        if not has_usage:
            raise RequestFailed("BAD_STREAM", "the server sent no usage to count tokens by")

    def _take(self, data: bytes, now: float, record: Record) -> bool:
        """One event; whether it had the usage."""
        try:
            event = _decode_event(data)
        except msgspec.MsgspecError as error:
            raise RequestFailed("BAD_STREAM", f"an event that is none: {error}") from None
        if event.error is not None:
            raise RequestFailed("ERROR_EVENT", str(event.error)[:300])
        for choice in event.choices:
            if choice.text or choice.token_ids:
                record.chunk_times.append(now)
                if choice.token_ids is not None:
                    record.chunk_tokens.append(len(choice.token_ids))
        usage = event.usage
        if usage is None or usage.completion_tokens is None:
            return False
        record.prompt_tokens = usage.prompt_tokens
        record.output_tokens = usage.completion_tokens
        if usage.prompt_tokens_details is not None:
            record.cached_tokens = usage.prompt_tokens_details.cached_tokens
        return True
