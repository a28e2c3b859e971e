"""What a token's entry in a vocabulary stands for, in bytes.

Two spellings are known: byte-level BPE, where each character stands for one byte,
and SentencePiece-style BPE, with a mark for spaces and tokens for single bytes.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>\Z")
_SPACE_MARK = "▁"


@dataclass(frozen=True, slots=True)
class TokenSpelling:
    byte_level: bool
    """Else SentencePiece's."""
    strips_first_space: bool = False
    """A text does not begin with the space that its first token carries."""

    def read(self, vocab: Mapping[str, int]) -> dict[int, bytes]:
        """Id -> bytes of every entry."""
        if self.byte_level:
            return _byte_level_table(vocab)
        return {index: _sentencepiece_bytes(token) for token, index in vocab.items()}


def find_spelling(decoder: Mapping[str, Any] | None) -> TokenSpelling | None:
    """From a decoder as tokenizer.json spells it; None for one that is not a plain
    joining of bytes."""
    if _is_byte_level(decoder):
        return TokenSpelling(byte_level=True)
    strips = _sentencepiece_shape(decoder)
    return None if strips is None else TokenSpelling(byte_level=False, strips_first_space=strips)


def _is_byte_level(decoder: Mapping[str, Any] | None) -> bool:
    if decoder is None:
        return False
    if decoder["type"] == "Sequence" and len(decoder["decoders"]) == 1:
        return _is_byte_level(decoder["decoders"][0])
    return bool(decoder["type"] == "ByteLevel")


def _sentencepiece_shape(decoder: Mapping[str, Any] | None) -> bool | None:
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


def _byte_level_table(vocab: Mapping[str, int]) -> dict[int, bytes]:
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
