"""Log probabilities in the shapes of OpenAI's two APIs, and vLLM's for prompts."""

from __future__ import annotations

import codecs
from typing import TYPE_CHECKING

from frontend.openai.responses import (
    ChatLogprobs,
    ChatTokenLogprob,
    CompletionLogprobs,
    PromptLogprob,
    PromptLogprobs,
    TokenLogprob,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from frontend.openai.token_texts import TokenTexts
    from pagewire.wire.messages import PositionLogprobs


class LogprobWriter:
    """Spells tokens: as their text, or by number for `return_tokens_as_token_ids`."""

    def __init__(self, texts: TokenTexts, *, as_token_ids: bool) -> None:
        self._texts = texts
        self._as_token_ids = as_token_ids

    async def chat(self, positions: Sequence[PositionLogprobs]) -> ChatLogprobs:
        await self._texts.load(positions)
        content = []
        for position in positions:
            token = self._chat_token(position.token_id, position.logprob)
            top = map(self._chat_token, position.top_ids, position.top_logprobs)
            content.append(ChatTokenLogprob(token.token, token.logprob, token.bytes, list(top)))
        return ChatLogprobs(content)

    def _chat_token(self, token_id: int, logprob: float) -> TokenLogprob:
        data = self._texts.bytes_of(token_id)
        text = f"token_id:{token_id}" if self._as_token_ids else data.decode(errors="replace")
        return TokenLogprob(text, logprob, list(data))

    async def completion(
        self, positions: Sequence[PositionLogprobs], offsets: Offsets
    ) -> CompletionLogprobs:
        """`offsets` goes on where the choice's last positions ended."""
        await self._texts.load(positions)
        answer = CompletionLogprobs([], [], [], [])
        for position in positions:
            token_id = position.token_id
            answer.tokens.append(self._completion_token(token_id))
            answer.text_offset.append(offsets.take(self._texts.bytes_of(token_id)))
            answer.token_logprobs.append(position.logprob)
            top = {self._completion_token(token_id): position.logprob}
            for other, logprob in zip(position.top_ids, position.top_logprobs, strict=True):
                # Different tokens may look the same: the likeliest is meant.
                top.setdefault(self._completion_token(other), logprob)
            answer.top_logprobs.append(top)
        return answer

    async def echoed(
        self, prompt_ids: Sequence[int], positions: Sequence[PositionLogprobs], offsets: Offsets
    ) -> CompletionLogprobs:
        """The prompt's, before those of the output. Nothing precedes its first token."""
        first = positions[0].__class__(prompt_ids[0], 0.0, 0)
        answer = await self.completion([first, *positions[1:]], offsets)
        answer.token_logprobs[0] = answer.top_logprobs[0] = None
        return answer

    def _completion_token(self, token_id: int) -> str:
        if self._as_token_ids:
            return f"token_id:{token_id}"
        data = self._texts.bytes_of(token_id)
        try:
            return data.decode()
        except UnicodeDecodeError:
            # OpenAI's spelling of a token that is part of a character.
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    async def prompt(self, positions: Sequence[PositionLogprobs]) -> PromptLogprobs:
        await self._texts.load(positions)
        return [self._prompt_position(p) if p.token_id >= 0 else None for p in positions]

    def _prompt_position(self, position: PositionLogprobs) -> dict[int, PromptLogprob]:
        def entry(token_id: int, logprob: float, rank: int) -> PromptLogprob:
            text = self._texts.bytes_of(token_id).decode(errors="replace")
            return PromptLogprob(logprob, rank, text)

        entries = {position.token_id: entry(position.token_id, position.logprob, position.rank)}
        rank, last = 0, None
        pairs = zip(position.top_ids, position.top_logprobs, strict=True)
        for place, (token_id, logprob) in enumerate(pairs, 1):
            if logprob != last:  # equally likely tokens share a rank
                rank, last = place, logprob
            entries.setdefault(token_id, entry(token_id, logprob, rank))
        return entries


class Offsets:
    """Where each token of a choice begins in its text, in characters."""

    def __init__(self) -> None:
        self._num_chars = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def take(self, token: bytes) -> int:
        """Of the next token."""
        begin = self._num_chars
        self._num_chars += len(self._decoder.decode(token))
        return begin


def joined(first: CompletionLogprobs, second: CompletionLogprobs | None) -> CompletionLogprobs:
    if second is None:
        return first
    return CompletionLogprobs(
        first.tokens + second.tokens,
        first.token_logprobs + second.token_logprobs,
        first.top_logprobs + second.top_logprobs,
        first.text_offset + second.text_offset,
    )
