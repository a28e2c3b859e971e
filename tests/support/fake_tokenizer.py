"""A tokenizer_svc whose tokens are the UTF-8 bytes of the text, over real gRPC.

Incremental decoding, hold-back of stop strings, replay and errors are as the
protocol in detokenizer.proto wants them. The text ZERO has no tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import codecs
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import grpc
from google.protobuf.any_pb2 import Any as AnyMessage
from google.rpc import error_details_pb2, status_pb2

from pagewire.v1 import (
    detokenizer_pb2,
    detokenizer_pb2_grpc,
    tokenizer_pb2,
    tokenizer_pb2_grpc,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

ZERO = "\u2060"
NUM_BYTES = 256


@dataclass
class Sequence:
    open: Any
    decoder: Any = field(
        default_factory=lambda: codecs.getincrementaldecoder("utf-8")(errors="replace")
    )
    text: str = ""
    emitted: int = 0
    num_tokens: int = 0
    stopped: bool = False

    def feed(self, ids: list[int], finished: bool) -> tuple[str, tuple[int, int] | None]:
        """New text, and (stop index, tokens) where a stop string was completed."""
        for token in ids:
            if self.stopped:
                break
            self.num_tokens += 1
            if token < NUM_BYTES:
                self.text += self.decoder.decode(bytes([token]))
            hit = self._stop()
            if hit is not None:
                return hit
        if finished:
            self.text += self.decoder.decode(b"", final=True)
            hit = self._stop()
            if hit is not None:
                return hit
        end = len(self.text) if finished else len(self.text) - self._held_back()
        return self._emit(end), None

    def _stop(self) -> tuple[str, tuple[int, int]] | None:
        found = [(self.text.find(s), i) for i, s in enumerate(self.open.stop) if s in self.text]
        if not found:
            return None
        at, index = min(found)
        self.stopped = True
        keep = len(self.open.stop[index]) if self.open.include_stop_str_in_output else 0
        return self._emit(at + keep), (index, self.num_tokens)

    def _held_back(self) -> int:
        longest = 0
        for stop in self.open.stop:
            for size in range(1, len(stop)):
                if self.text.endswith(stop[:size]):
                    longest = max(longest, size)
        return longest

    def _emit(self, end: int) -> str:
        begin, self.emitted = self.emitted, max(self.emitted, end)
        return self.text[begin:end]


class FakeTokenizer(
    tokenizer_pb2_grpc.TokenizerServiceServicer, detokenizer_pb2_grpc.DetokenizerServiceServicer
):
    def __init__(
        self,
        *,
        address: str = "127.0.0.1:0",
        has_chat_template: bool = True,
        template_has_tools: bool = True,
        tool_call_format: str = "hermes",
        tool_call_special_tokens: tuple[str, ...] = (),
    ) -> None:
        self._bind = address
        self._has_chat_template = has_chat_template
        self._tools: dict[str, Any] = {
            "chat_template_has_tools": template_has_tools,
            "tool_call_format": tool_call_format,
            "tool_call_special_tokens": tool_call_special_tokens,
        }
        self.chats: list[Any] = []
        """ChatInputs that were rendered."""
        self.messages: list[Any] = []
        """Requests of the detokenize stream."""
        self.gate: asyncio.Event | None = None
        """While set and not is_set(), Tokenize waits."""
        self.reply_gate: asyncio.Event | None = None
        """The same for answers on the detokenize stream."""
        self.num_tokenizing = 0
        self.metadata: list[dict[str, Any]] = []
        """Of the calls of Tokenize."""
        self.lose: set[int] = set()
        """Sequences to answer with an error, once each."""
        self.sequences: dict[int, Sequence] = {}
        self._changed = asyncio.Event()

    async def start(self) -> None:
        self._server = grpc.aio.server(
            options=[
                ("grpc.max_receive_message_length", -1),
                ("grpc.max_send_message_length", -1),
                ("grpc.so_reuseport", 0),
            ]
        )
        tokenizer_pb2_grpc.add_TokenizerServiceServicer_to_server(self, self._server)
        detokenizer_pb2_grpc.add_DetokenizerServiceServicer_to_server(self, self._server)
        port = self._server.add_insecure_port(self._bind)
        self.address = f"127.0.0.1:{port}"
        await self._server.start()

    async def close(self) -> None:
        await self._server.stop(None)

    async def wait_for(self, condition: Callable[[], bool], limit_s: float = 60.0) -> None:
        async with asyncio.timeout(limit_s):
            while not condition():
                self._changed.clear()
                await self._changed.wait()

    # TokenizerService

    async def Tokenize(self, request: Any, context: Any) -> Any:
        self.metadata.append(dict(context.invocation_metadata() or ()))
        self.num_tokenizing += 1
        self._changed.set()
        try:
            if self.gate is not None:
                await self.gate.wait()
        finally:
            self.num_tokenizing -= 1
            self._changed.set()
        return tokenizer_pb2.TokenizeResponse(token_ids=_encode(request.text))

    async def Detokenize(self, request: Any, context: Any) -> Any:
        for token in request.token_ids:
            if not 0 <= token < NUM_BYTES:
                await _reject(context, "token_ids", f"token id {token} is unknown")
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        final = not request.complete_characters_only
        text = decoder.decode(bytes(request.token_ids), final=final)
        return tokenizer_pb2.DetokenizeResponse(text=text)

    async def ApplyChatTemplate(self, request: Any, context: Any) -> Any:
        self.chats.append(request.chat)
        for index, message in enumerate(request.chat.messages):
            if message.role not in ("system", "user", "assistant", "tool"):
                await _reject(context, f"chat.messages[{index}].role", "unknown role")
        if not request.chat.messages:
            await _reject(context, "chat", "no messages")
        text = "".join(f"<{m.role}>{m.content}\n" for m in request.chat.messages)
        if not request.chat.continue_final_message:
            text += "<assistant>"
        return tokenizer_pb2.ApplyChatTemplateResponse(text=text, token_ids=_encode(text))

    # DetokenizerService

    async def GetTokenizerInfo(self, request: Any, context: Any) -> Any:
        return detokenizer_pb2.GetTokenizerInfoResponse(
            has_chat_template=self._has_chat_template,
            vocab_size=NUM_BYTES,
            num_workers=1,
            **self._tools,
        )

    async def GetTokenBytes(self, request: Any, context: Any) -> Any:
        return detokenizer_pb2.GetTokenBytesResponse(
            tokens=[bytes([t]) if 0 <= t < NUM_BYTES else b"" for t in request.token_ids]
        )

    async def DetokenizeStream(
        self, request_iterator: AsyncIterator[Any], context: Any
    ) -> AsyncIterator[Any]:
        self.sequences = {}
        async for request in request_iterator:
            self.messages.append(request)
            self._changed.set()
            if self.reply_gate is not None:
                await self.reply_gate.wait()
            yield self._answer(request)

    def _answer(self, request: Any) -> Any:
        response = detokenizer_pb2.DetokenizeStreamResponse(step=request.step)
        for opened in request.opens:
            sequence = Sequence(opened)
            sequence.feed(list(opened.replay_token_ids), False)
            sequence.emitted = opened.replay_emitted_chars
            self.sequences[opened.sequence] = sequence
        at = 0
        for internal_id, count, finished in zip(
            request.sequences, request.counts, request.finished, strict=True
        ):
            ids = list(request.token_ids[at : at + count])
            at += count
            self._row(response, internal_id, ids, finished)
        assert at == len(request.token_ids)
        for internal_id in request.closes:
            self.sequences.pop(internal_id, None)
        return response

    def _row(self, response: Any, internal_id: int, ids: list[int], finished: bool) -> None:
        if internal_id in self.lose:
            self.lose.discard(internal_id)
            self.sequences.pop(internal_id, None)
        sequence = self.sequences.get(internal_id)
        if sequence is None:
            response.errors.add(sequence=internal_id, message="unknown sequence")
            return
        text, stop = sequence.feed(ids, finished)
        if text or stop is not None or finished:
            response.sequences.append(internal_id)
            response.texts.append(text)
        if stop is not None:
            response.stops.add(
                row=len(response.sequences) - 1, stop_index=stop[0], num_tokens=stop[1]
            )
        if finished or stop is not None:
            del self.sequences[internal_id]


def _encode(text: str) -> list[int]:
    return list(text.replace(ZERO, "").encode())


async def _reject(context: Any, field_path: str, message: str) -> None:
    violation = error_details_pb2.BadRequest.FieldViolation(field=field_path, description=message)
    packed = AnyMessage()
    packed.Pack(error_details_pb2.BadRequest(field_violations=[violation]))
    code = grpc.StatusCode.INVALID_ARGUMENT
    status = status_pb2.Status(code=code.value[0], message=message, details=[packed])
    await context.abort(code, message, (("grpc-status-details-bin", status.SerializeToString()),))


async def _main(address: str) -> None:
    tokenizer = FakeTokenizer(address=address)
    tokenizer.messages = _Nothing()
    await tokenizer.start()
    await asyncio.Event().wait()


class _Nothing(list[Any]):
    """Keeps no record, so that a long run stays small."""

    def append(self, item: Any) -> None:
        pass


if __name__ == "__main__":
    import uvloop

    parser = argparse.ArgumentParser()
    parser.add_argument("--address", default="127.0.0.1:50061")
    uvloop.run(_main(parser.parse_args().address))
