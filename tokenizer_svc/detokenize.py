"""Incremental detokenization: ids in, complete characters out.

Two decoders with one contract:

- ByteDecoder, for byte-level and SentencePiece-style vocabularies: the bytes of
  each id and an incremental UTF-8 decoder. O(1) for an id, whatever came before.
- StreamDecoder, for every other decoder: tokenizers' DecodeStream.

The contract. The deltas of an output, with the flush at its end, are the text that
the output adds to the text of the prompt. A delta holds complete characters only;
bytes that can no longer become a character yield U+FFFD, one for each maximal
invalid part (Unicode 16, section 3.9, as str.decode does), and bytes still
incomplete at the end yield one on flush. A character begun by the prompt belongs
to the output if the output completes it: it is emitted whole. If the output breaks
it instead, its replacement character belongs to the prompt and is not emitted. Ids
outside the vocabulary add nothing, since a model's vocabulary may be padded past
the tokenizer's.
"""

from __future__ import annotations

from codecs import utf_8_decode
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from tokenizers.decoders import DecodeStream

from tokenizer_svc.spelled_tokens import SpelledTokenDecoder
from tokenizer_svc.token_bytes import token_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tokenizers import Tokenizer

    from tokenizer_svc.token_bytes import TokenBytes

_REPLACEMENT = "\ufffd"
_MAX_SILENT_IDS = 16
"""Ids without text after which StreamDecoder starts a new window; a character is at
most four byte tokens, so what is silent for longer is invalid or special."""
_CONTEXT_IDS = 8
_MAX_CHARACTER_IDS = 3
"""Byte tokens that an incomplete character can have."""
_MAX_ID = (1 << 32) - 1


class Decoder(Protocol):
    def feed(self, ids: Sequence[int]) -> str:
        """The text that these ids complete, maybe ""."""

    def flush(self) -> str:
        """What is still pending, at the end of the output."""


class Detokenizer:
    """Makes decoders over one tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._bytes = token_bytes(tokenizer)
        self._special = {
            index: token.content
            for index, token in tokenizer.get_added_tokens_decoder().items()
            if token.special
        }
        self._keeping: dict[tuple[str, ...], TokenBytes] = {}
        """By kept tokens: a frontend always asks for the same."""

    def decoder(
        self,
        prompt_tail: Sequence[int],
        *,
        skip_special_tokens: bool,
        spaces_between_special_tokens: bool = True,
        kept_special_tokens: Sequence[str] = (),
    ) -> Decoder:
        """A decoder for an output that follows a prompt ending in `prompt_tail`.

        kept_special_tokens stay in the text where the others are skipped.
        """
        kept = tuple(kept_special_tokens) if skip_special_tokens else ()
        if self._bytes is not None:
            # A joining of bytes: it puts no spaces.
            return ByteDecoder(self._tables(self._bytes, kept), prompt_tail, skip_special_tokens)
        spelled: Mapping[int, str] = {}
        if kept:
            spelled = {i: text for i, text in self._special.items() if text in kept}
        elif not (skip_special_tokens or spaces_between_special_tokens):
            spelled = self._special
        if not spelled:
            return StreamDecoder(self._tokenizer, prompt_tail, skip_special_tokens)
        return SpelledTokenDecoder(
            lambda tail: StreamDecoder(self._tokenizer, tail, skip_special_tokens),
            prompt_tail,
            spelled,
            anywhere=bool(kept),
        )

    def decode(
        self,
        ids: Sequence[int],
        *,
        skip_special_tokens: bool,
        spaces_between_special_tokens: bool = True,
        complete_characters_only: bool = False,
    ) -> str:
        """The text of all ids, which must be in the vocabulary.

        complete_characters_only leaves out a character that the last ids only begin.
        """
        if spaces_between_special_tokens and not complete_characters_only:
            return self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
        decoder = self.decoder(
            [],
            skip_special_tokens=skip_special_tokens,
            spaces_between_special_tokens=spaces_between_special_tokens,
        )
        text = decoder.feed(ids)
        return text if complete_characters_only else text + decoder.flush()

    def spell(self, token_id: int) -> bytes:
        """What a token stands for by itself; b"" for an id outside the vocabulary."""
        if self._bytes is not None:
            return self._bytes.all_tokens.get(token_id, b"")
        if not 0 <= token_id <= _MAX_ID:
            return b""
        return self._tokenizer.decode([token_id], skip_special_tokens=False).encode()

    def _tables(self, tables: TokenBytes, kept: tuple[str, ...]) -> TokenBytes:
        if not kept:
            return tables
        if kept not in self._keeping:
            back = {i: text.encode() for i, text in self._special.items() if text in kept}
            self._keeping[kept] = replace(tables, no_special=tables.no_special | back)
        return self._keeping[kept]


class ByteDecoder:
    """Decodes by a table of bytes."""

    __slots__ = ("_get", "_pending", "_pending_of_prompt", "_strip_space")

    def __init__(
        self, tables: TokenBytes, prompt_tail: Sequence[int], skip_special_tokens: bool
    ) -> None:
        table = tables.no_special if skip_special_tokens else tables.all_tokens
        self._get = table.get
        before = self._join(prompt_tail)
        _, complete = utf_8_decode(before, "replace", False)
        self._pending = before[complete:]
        self._pending_of_prompt = len(self._pending)
        self._strip_space = tables.strips_first_space and not before

    def feed(self, ids: Sequence[int]) -> str:
        if len(ids) == 1:
            data = self._get(ids[0], b"")
            if self._pending:
                data = self._pending + data
        else:
            data = self._pending + self._join(ids)
        return self._decode(data, final=False)

    def flush(self) -> str:
        # Only the prompt's own half character is pending: nothing of the output is lost.
        if len(self._pending) == self._pending_of_prompt:
            return ""
        return self._decode(self._pending, final=True)

    def _decode(self, data: bytes, *, final: bool) -> str:
        text, complete = utf_8_decode(data, "replace", final)
        self._pending = data[complete:]
        if text:
            if self._pending_of_prompt:
                text = self._without_prompt_part(data, text)
            if self._strip_space:
                self._strip_space = False
                text = text.removeprefix(" ")
        return text

    def _without_prompt_part(self, data: bytes, text: str) -> str:
        """Drops the replacement character of a character that the prompt began, if
        it stands for the prompt's bytes alone."""
        begun, self._pending_of_prompt = self._pending_of_prompt, 0
        broken, _ = utf_8_decode(data[: begun + 1], "replace", True)
        return text[1:] if len(broken) > 1 else text

    def _join(self, ids: Sequence[int]) -> bytes:
        get = self._get
        return b"".join([get(token_id, b"") for token_id in ids])


class StreamDecoder:
    """Decodes by tokenizers' DecodeStream, in windows that cannot grow without bound.

    DecodeStream keeps every id that has produced no text and decodes them all again
    at each step, and it repeats its context in the first delta if the context ends in
    half a character. So it is never started on such a context, and what stays silent
    for too long is released as it is.
    """

    __slots__ = ("_context", "_of_prompt", "_silent", "_skip", "_stream", "_tokenizer")

    def __init__(
        self, tokenizer: Tokenizer, prompt_tail: Sequence[int], skip_special_tokens: bool
    ) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        tail = [token_id for token_id in prompt_tail if 0 <= token_id <= _MAX_ID]
        complete = len(tail)
        while complete and self._text(tail[:complete]).endswith(_REPLACEMENT):
            complete -= 1
        if len(tail) - complete > _MAX_CHARACTER_IDS:  # not a half character, but rubbish
            tail, complete = [], 0
        self._context = tail[:complete]
        self._of_prompt = self._text(tail).removeprefix(self._text(self._context))
        """Text of the prompt that the first delta will repeat."""
        self._silent: list[int] = []
        self._stream = DecodeStream(ids=self._context, skip_special_tokens=self._skip)
        for token_id in tail[complete:]:
            self._step(token_id)

    def feed(self, ids: Sequence[int]) -> str:
        return "".join([self._step(token_id) for token_id in ids])

    def flush(self) -> str:
        return self._release(len(self._silent))

    def _step(self, token_id: int) -> str:
        if not 0 <= token_id <= _MAX_ID:
            return ""
        try:
            piece = self._stream.step(self._tokenizer, token_id)
        except Exception:  # tokenizers raises a bare Exception (InvalidPrefix)
            self._silent.append(token_id)
            return self._release(len(self._silent))
        self._silent.append(token_id)
        if piece is not None:
            return self._emit(len(self._silent), piece)
        if len(self._silent) > _MAX_SILENT_IDS:
            return self._release(len(self._silent) - _MAX_CHARACTER_IDS)
        return ""

    def _release(self, count: int) -> str:
        """Emits the first `count` silent ids as they decode, and starts a new window."""
        if not count:
            return ""
        ids, rest = self._silent[:count], self._silent[count:]
        before, after = self._text(self._context), self._text([*self._context, *ids])
        piece = after.removeprefix(before) if after.startswith(before) else self._text(ids)
        piece = self._emit(count, piece)
        if self._text(self._context).endswith(_REPLACEMENT):
            self._context = []
        self._silent = []
        self._stream = DecodeStream(ids=self._context, skip_special_tokens=self._skip)
        return piece + self.feed(rest)

    def _emit(self, count: int, piece: str) -> str:
        if piece:
            self._context = [*self._context, *self._silent[:count]][-_CONTEXT_IDS:]
        self._silent = self._silent[count:]
        if self._of_prompt and piece:
            # All of it again: the prompt's character was broken. Else it was completed.
            repeated, self._of_prompt = self._of_prompt, ""
            if not piece.startswith(repeated):
                repeated = repeated.rstrip(_REPLACEMENT)
            piece = piece.removeprefix(repeated)
        return piece

    def _text(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=self._skip)
