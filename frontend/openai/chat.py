"""POST /v1/chat/completions: how it words its answers."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from frontend.openai.logprobs import LogprobWriter
from frontend.openai.responses import (
    AnswerMessage,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    Function,
    ToolCall,
    encode,
)
from frontend.openai.usage import UsageSum, finish_reason, stop_reason

if TYPE_CHECKING:
    from collections.abc import Sequence

    from frontend.openai.requests import ChatBody
    from frontend.openai.responses import PromptLogprobs
    from frontend.openai.token_texts import TokenTexts
    from frontend.request import ChatMessage
    from frontend.stream import Delta, Finish
    from pagewire.tools import ToolCall as MadeCall

ROLE = "assistant"


class ChatAnswer:
    """Of one conversation. The role comes in the first chunk of each choice, with its text."""

    def __init__(
        self,
        body: ChatBody,
        last: ChatMessage | None,
        model: str,
        request_id: str,
        texts: TokenTexts,
    ) -> None:
        self._id = f"chatcmpl-{request_id}"
        self._created = int(time.time())
        self._model = model
        self._wants_logprobs = bool(body.logprobs)
        self._wants_prompt_logprobs = body.prompt_logprobs is not None
        self._wants_ids = bool(body.return_token_ids)
        self._one_call = body.parallel_tool_calls is False
        # vLLM's echo: the message that is continued, not the whole prompt.
        self._echo = last.content if body.echo and last and last.role == ROLE else ""
        self._writer = LogprobWriter(texts, as_token_ids=bool(body.return_tokens_as_token_ids))
        self._usage = UsageSum(body.stream_options)
        self._prompt_ids: list[int] = []
        self._prompt_logprobs: PromptLogprobs = []
        self._num_calls: dict[int, int] = {}
        """By choice: those that have begun."""
        self._choices: list[ChatChoice] = []
        self._ids_told = False

    def begin(self, place: int, prompt_ids: Sequence[int]) -> None:
        self._prompt_ids = list(prompt_ids)
        self._usage.begin(len(prompt_ids))

    async def whole(self, place: int, outputs: Sequence[Delta], finish: Finish) -> None:
        self._usage.add(finish.usage)
        if self._wants_prompt_logprobs:
            self._prompt_logprobs = await self._writer.prompt(outputs[0].prompt_logprobs)
        for index, (output, end) in enumerate(zip(outputs, finish.outputs, strict=True)):
            calls = [ToolCall(c.id, c.function) for c in self._tool_calls(output.tool_calls, 0)]
            text = self._echo + output.text
            message = AnswerMessage(content=text if text or not calls else None)
            if calls:
                message.tool_calls = calls
            choice = ChatChoice(index, message, None, finish_reason(end), stop_reason(end))
            if self._wants_logprobs:
                choice.logprobs = await self._writer.chat(output.logprobs)
            if self._wants_ids:
                choice.token_ids = output.token_ids
            self._choices.append(choice)

    def encode(self) -> bytes:
        answer = ChatCompletion(
            self._id, self._created, self._model, self._choices, self._usage.total()
        )
        if self._wants_prompt_logprobs:
            answer.prompt_logprobs = self._prompt_logprobs
        if self._wants_ids:
            answer.prompt_token_ids = self._prompt_ids
        return encode(answer)

    async def chunk(self, place: int, delta: Delta) -> bytes:
        index = delta.index
        told = self._delta(index, delta.text)
        if delta.tool_calls:
            calls = self._tool_calls(delta.tool_calls, self._num_calls[index])
            self._num_calls[index] += len(calls)
            if calls:
                told.tool_calls = calls
        choice = ChatChunkChoice(index, told)
        if self._wants_logprobs and delta.logprobs:
            choice.logprobs = await self._writer.chat(delta.logprobs)
        if self._wants_ids:
            choice.token_ids = delta.token_ids
        return encode(self._chunk([choice], delta))

    def ends(self, place: int, finish: Finish) -> list[bytes]:
        self._usage.add(finish.usage)
        return [
            encode(
                self._chunk(
                    [
                        ChatChunkChoice(
                            index,
                            ChatDelta() if index in self._num_calls else self._delta(index, ""),
                            finish_reason=finish_reason(end),
                            stop_reason=stop_reason(end),
                        )
                    ]
                )
            )
            for index, end in enumerate(finish.outputs)
        ]

    def usage_chunk(self) -> bytes | None:
        if not self._usage.wanted:
            return None
        chunk = ChatChunk(self._id, self._created, self._model, [], usage=self._usage.total())
        return encode(chunk)

    def _delta(self, index: int, text: str) -> ChatDelta:
        if index in self._num_calls:
            return ChatDelta(content=text)
        self._num_calls[index] = 0
        return ChatDelta(role="assistant", content=self._echo + text)

    def _chunk(self, choices: list[ChatChunkChoice], delta: Delta | None = None) -> ChatChunk:
        chunk = ChatChunk(
            self._id, self._created, self._model, choices, usage=self._usage.so_far(delta)
        )
        if self._wants_ids and not self._ids_told:
            self._ids_told = True
            chunk.prompt_token_ids = self._prompt_ids
        return chunk

    def _tool_calls(self, calls: Sequence[MadeCall], begin: int) -> list[ToolCall]:
        """Numbered from `begin`, since deltas name the call they are about."""
        made = [
            ToolCall(call.id, Function(call.name, call.arguments), index=number)
            for number, call in enumerate(calls, begin)
        ]
        return made[: max(0, 1 - begin)] if self._one_call else made
