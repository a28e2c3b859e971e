"""What each token id contributes to the text, in bytes.

The decoders of byte-level BPE and of SentencePiece-style BPE join their tokens
byte by byte, so a table of bytes decodes exactly what the library's decoder does,
and it can be cut anywhere: a half character is a few pending bytes.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pagewire.token_bytes import find_spelling

if TYPE_CHECKING:
    from tokenizers import Tokenizer


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
    spelling = find_spelling(_describe(tokenizer))
    if spelling is None:
        return None
    table = spelling.read(tokenizer.get_vocab(with_added_tokens=True))
    special = {
        index for index, token in tokenizer.get_added_tokens_decoder().items() if token.special
    }
    no_special = table | dict.fromkeys(special, b"")
    return TokenBytes(table, no_special, spelling.strips_first_space)


def _describe(tokenizer: Tokenizer) -> dict[str, Any] | None:
    """The decoder as tokenizer.json spells it; its pickled state is that JSON, while
    Tokenizer.to_str would write out the whole vocabulary beside it."""
    if tokenizer.decoder is None:
        return None
    description: dict[str, Any] = json.loads(tokenizer.decoder.__getstate__())
    return description
