"""Unary calls to tokenizer_svc, with its failures as our errors.

The long-lived stream for output text is in detokenize_stream.py.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any, TypeVar

import grpc

from frontend.call_trace import current_trace
from frontend.convert import tokenizer
from frontend.request import ChatPrompt, TextPrompt
from frontend.status import field_violation
from pagewire.errors import (
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    MessageTooLarge,
    PagewireError,
    Unavailable,
)
from pagewire.obs.traces import TRACEPARENT
from pagewire.v1 import detokenizer_pb2_grpc, tokenizer_pb2_grpc

if TYPE_CHECKING:
    from collections.abc import Awaitable

    from frontend.convert.tokenizer import TokenizerInfo
    from frontend.request import Job

logger = logging.getLogger(__name__)

T = TypeVar("T")
RETRY_AFTER_S = 1.0
INFO_TIMEOUT_S = 2.0


class TokenizerClient:
    """One channel to tokenizer_svc, shared by everything that needs text."""

    def __init__(self, address: str, *, max_message_bytes: int) -> None:
        self._channel = grpc.aio.insecure_channel(
            address,
            options=[
                ("grpc.max_receive_message_length", max_message_bytes),
                ("grpc.max_send_message_length", max_message_bytes),
                ("grpc.enable_http_proxy", 0),
                ("grpc.initial_reconnect_backoff_ms", 100),
                ("grpc.min_reconnect_backoff_ms", 100),
                ("grpc.max_reconnect_backoff_ms", 1000),
                # No keepalive pings: a peer that vanished without a FIN is found by the
                # detokenize stream's reply timeout, and a server may punish pings.
            ],
        )
        # Generated stubs are untyped.
        self._tokenizer: Any = tokenizer_pb2_grpc.TokenizerServiceStub(self._channel)
        self.detokenizer: Any = detokenizer_pb2_grpc.DetokenizerServiceStub(self._channel)
        self.num_tokenizing = 0
        """Calls in flight."""

    async def close(self) -> None:
        await self._channel.close(None)

    async def info(self) -> TokenizerInfo:
        """Waits for the service. Raises grpc.RpcError after INFO_TIMEOUT_S."""
        return tokenizer.tokenizer_info(
            await self.detokenizer.GetTokenizerInfo(
                tokenizer.tokenizer_info_request(), timeout=INFO_TIMEOUT_S, wait_for_ready=True
            )
        )

    async def tokenize(self, prompt: TextPrompt | ChatPrompt) -> tuple[list[int], str]:
        """The prompt's ids and its text. Raises InvalidRequest with the API's field, or
        Unavailable."""
        if isinstance(prompt, TextPrompt):
            call = self._tokenizer.Tokenize(tokenizer.tokenize_request(prompt), metadata=_context())
            return tokenizer.token_ids(await self._finish(call, prompt.field)), prompt.text
        call = self._tokenizer.ApplyChatTemplate(
            tokenizer.chat_template_request(prompt), metadata=_context()
        )
        response = await self._finish(call, prompt.field)
        return tokenizer.token_ids(response), tokenizer.rendered_text(response)

    async def detokenize(self, token_ids: list[int], job: Job) -> str:
        """The text of ids of the job's prompt, up to a character that they only begin."""
        call = self._tokenizer.Detokenize(
            tokenizer.detokenize_prompt_request(token_ids, job), metadata=_context()
        )
        return tokenizer.detokenized_text(await self._finish(call, job.prompt.field))

    async def detokenize_text(self, token_ids: list[int], field: str) -> str:
        """The text of ids, special tokens included. Errors name `field`."""
        call = self._tokenizer.Detokenize(tokenizer.detokenize_text_request(token_ids))
        return tokenizer.detokenized_text(await self._finish(call, field))

    async def token_bytes(self, token_ids: list[int]) -> list[bytes]:
        """What each token stands for; b"" for one that only the model has."""
        call = self.detokenizer.GetTokenBytes(tokenizer.token_bytes_request(token_ids))
        return tokenizer.token_bytes(await self._finish(call, None))

    async def tokenize_text(self, text: str, field: str) -> list[int]:
        """The ids of a piece of text, with nothing added around them. Errors name `field`."""
        call = self._tokenizer.Tokenize(tokenizer.piece_request(text), metadata=_context())
        return tokenizer.token_ids(await self._finish(call, field))

    async def proxy(self, method: str, request: object) -> Any:
        """Passes a TokenizerService call of a client on; `model` is already checked."""
        call = getattr(self._tokenizer, method)(
            tokenizer.without_model(request), metadata=_context()
        )
        return await self._finish(call, None)

    async def _finish(self, call: Awaitable[T], field: str | None) -> T:
        """`field` is where the caller put what is tokenized; None if it knows better."""
        self.num_tokenizing += 1
        try:
            return await call
        except grpc.aio.AioRpcError as error:
            raise _translate(error, field) from None
        except asyncio.CancelledError:
            call.cancel()  # type: ignore[attr-defined]
            raise
        finally:
            self.num_tokenizing -= 1


def _context() -> tuple[tuple[str, str], ...] | None:
    """The trace that the call belongs to, for the other side's logs."""
    trace = current_trace()
    return None if trace is None else ((TRACEPARENT, trace.traceparent),)


def _translate(error: grpc.aio.AioRpcError, asked: str | None) -> PagewireError:
    code, message = error.code(), error.details() or ""
    if code is grpc.StatusCode.INVALID_ARGUMENT:
        field = field_violation(error)
        if asked is not None and not field.startswith(f"{asked}."):
            field = asked
        return InvalidRequest(field, message)
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
        return MessageTooLarge(message)
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return DeadlineExceeded("the deadline passed while the prompt was tokenized")
    if code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED):
        return Unavailable(
            "tokenizer_dead", "the tokenizer is unavailable", retry_after=RETRY_AFTER_S
        )
    logger.error("tokenizer_svc answered %s: %s", code, message)
    return InternalError("the tokenizer failed")
