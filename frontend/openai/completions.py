"""POST /v1/completions: how it words its answers."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from msgspec import UNSET

from frontend.openai.logprobs import LogprobWriter, Offsets, joined
from frontend.openai.responses import Completion, CompletionChoice, encode
from frontend.openai.usage import UsageSum, finish_reason, stop_reason

if TYPE_CHECKING:
    from collections.abc import Sequence

    from msgspec import UnsetType

    from frontend.openai.requests import CompletionBody
    from frontend.openai.responses import CompletionLogprobs, Usage
    from frontend.openai.token_texts import TokenTexts
    from frontend.stream import Delta, Finish
    from pagewire.wire.messages import PositionLogprobs


class CompletionAnswer:
    """Choices are numbered through: those of the first prompt, then those of the second."""

    def __init__(
        self, body: CompletionBody, model: str, request_id: str, texts: TokenTexts
    ) -> None:
        self._id = f"cmpl-{request_id}"
        self._created = int(time.time())
        self._model = model
        self._n = 1 if body.n is None else body.n
        self._wants_logprobs = body.logprobs is not None
        self._echo = bool(body.echo)
        self._wants_prompt_logprobs = body.prompt_logprobs is not None
        self._wants_ids = bool(body.return_token_ids)
        self._writer = LogprobWriter(texts, as_token_ids=bool(body.return_tokens_as_token_ids))
        self._usage = UsageSum(body.stream_options)
        self._prompt_ids: dict[int, list[int]] = {}
        self._prompt_logprobs: dict[int, Sequence[PositionLogprobs]] = {}
        self._offsets: dict[int, Offsets] = {}
        """By choice: those that have begun."""
        self._choices: dict[int, list[CompletionChoice]] = {}

    def begin(self, place: int, prompt_ids: Sequence[int]) -> None:
        self._prompt_ids[place] = list(prompt_ids)
        self._usage.begin(len(prompt_ids))

    async def whole(self, place: int, outputs: Sequence[Delta], finish: Finish) -> None:
        self._usage.add(finish.usage)
        prompt = outputs[0].prompt_logprobs
        self._prompt_logprobs[place] = prompt
        choices = self._choices[place] = []
        for rank, (output, end) in enumerate(zip(outputs, finish.outputs, strict=True)):
            choice = CompletionChoice(
                index=place * self._n + rank,
                text=output.text,
                logprobs=await self._logprobs(place, Offsets(), output, begins=True),
                finish_reason=finish_reason(end),
                stop_reason=stop_reason(end),
            )
            if self._wants_ids:
                choice.token_ids = output.token_ids
                choice.prompt_token_ids = self._prompt_ids[place]
            if self._wants_prompt_logprobs:
                choice.prompt_logprobs = await self._writer.prompt(prompt)
            choices.append(choice)

    def encode(self) -> bytes:
        choices = [choice for place in sorted(self._choices) for choice in self._choices[place]]
        return encode(self._completion(choices, self._usage.total()))

    async def chunk(self, place: int, delta: Delta) -> bytes:
        index = place * self._n + delta.index
        begins = index not in self._offsets
        offsets = self._offsets.setdefault(index, Offsets())
        if delta.prompt_logprobs:
            self._prompt_logprobs[place] = delta.prompt_logprobs
        choice = CompletionChoice(index, delta.text)
        if self._wants_logprobs:
            choice.logprobs = await self._logprobs(place, offsets, delta, begins=begins)
        if self._wants_ids:
            choice.token_ids = delta.token_ids
            if begins:
                choice.prompt_token_ids = self._prompt_ids[place]
        return encode(self._completion([choice], self._usage.so_far(delta)))

    def ends(self, place: int, finish: Finish) -> list[bytes]:
        self._usage.add(finish.usage)
        return [
            encode(
                self._completion(
                    [
                        CompletionChoice(
                            index=place * self._n + rank,
                            text="",
                            finish_reason=finish_reason(end),
                            stop_reason=stop_reason(end),
                        )
                    ],
                    self._usage.so_far(),
                )
            )
            for rank, end in enumerate(finish.outputs)
        ]

    def usage_chunk(self) -> bytes | None:
        if not self._usage.wanted:
            return None
        return encode(self._completion([], self._usage.total()))

    async def _logprobs(
        self, place: int, offsets: Offsets, delta: Delta, *, begins: bool
    ) -> CompletionLogprobs | None:
        if not self._wants_logprobs:
            return None
        prompt = self._prompt_logprobs.get(place, ())
        if not (begins and self._echo and prompt):
            if not delta.logprobs:
                return None
            return await self._writer.completion(delta.logprobs, offsets)
        echoed = await self._writer.echoed(self._prompt_ids[place], prompt, offsets)
        output = await self._writer.completion(delta.logprobs, offsets)
        return joined(echoed, output)

    def _completion(
        self, choices: list[CompletionChoice], usage: Usage | UnsetType | None = UNSET
    ) -> Completion:
        return Completion(self._id, self._created, self._model, choices, usage=usage)
