"""What each token id contributes to the text, in bytes.

The decoders of byte-level BPE and of SentencePiece-style BPE join their tokens
byte by byte, so a table of bytes decodes exactly what the library's decoder does,
and it can be cut anywhere: a half character is a few pending bytes.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>\Z")
_SPACE_MARK = "▁"


@dataclass(frozen=True, slots=True)
class TokenBytes:
    """Tables of id -> bytes; an id that is not a token has no entry."""

    all_tokens: dict[int, bytes]
    no_special: dict[int, bytes]
    """Special tokens are b""."""
    strips_first_space: bool
    """A text does not begin with the space that its first token carries."""


def token_bytes(tokenizer: Tokenizer) -> TokenBytes | None:
    """The table, or None for a decoder that is not a plain joining of bytes."""
    decoder = _describe(tokenizer)
    vocab = tokenizer.get_vocab(with_added_tokens=True)
    special = {
        index for index, token in tokenizer.get_added_tokens_decoder().items() if token.special
    }
    if _is_byte_level(decoder):
        strips = False
        table = _byte_level_table(vocab)
    elif (shape := _sentencepiece_shape(decoder)) is not None:
        strips = shape
        table = {index: _sentencepiece_bytes(token) for token, index in vocab.items()}
    else:
        return None
    no_special = table | dict.fromkeys(special, b"")
    return TokenBytes(table, no_special, strips)


def _describe(tokenizer: Tokenizer) -> dict[str, Any] | None:
    """The decoder as tokenizer.json spells it; its pickled state is that JSON, while
    Tokenizer.to_str would write out the whole vocabulary beside it."""
    if tokenizer.decoder is None:
        return None
    description: dict[str, Any] = json.loads(tokenizer.decoder.__getstate__())
    return description


def _is_byte_level(decoder: dict[str, Any] | None) -> bool:
    if decoder is None:
        return False
    if decoder["type"] == "Sequence" and len(decoder["decoders"]) == 1:
        return _is_byte_level(decoder["decoders"][0])
    return bool(decoder["type"] == "ByteLevel")


def _sentencepiece_shape(decoder: dict[str, Any] | None) -> bool | None:
    """Whether the first space is stripped; None for another decoder.

    Known: Replace(mark -> space), ByteFallback, Fuse and, maybe, Strip(one space, left).
    """
    if decoder is None or decoder["type"] != "Sequence":
        return None
    steps = decoder["decoders"]
    replace = {"type": "Replace", "pattern": {"String": _SPACE_MARK}, "content": " "}
    if steps[:3] != [replace, {"type": "ByteFallback"}, {"type": "Fuse"}]:
        return None
    if not steps[3:]:
        return False
    strip = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
    return True if steps[3:] == [strip] else None


def _byte_level_table(vocab: dict[str, int]) -> dict[int, bytes]:
    """A token that uses a character outside the byte alphabet stands for itself."""
    # Characters that latin-1 has and the alphabet lacks must not pass for bytes.
    spelling = dict.fromkeys(range(256), "\uffff")
    spelling |= {ord(character): chr(byte) for byte, character in enumerate(_byte_alphabet())}
    table = {}
    for token, index in vocab.items():
        try:
            table[index] = token.translate(spelling).encode("latin-1")
        except UnicodeEncodeError:
            table[index] = token.encode("utf-8")
    return table


def _byte_alphabet() -> list[str]:
    """The printable stand-in of each byte in GPT-2's vocabulary files: printable
    latin-1 characters stand for themselves, the others for U+0100 and on, in order."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


def _sentencepiece_bytes(token: str) -> bytes:
    if match := _BYTE_TOKEN.match(token):
        return bytes([int(match[1], 16)])
    return token.replace(_SPACE_MARK, " ").encode("utf-8")
