"""Text to ids, many texts at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pagewire.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tokenizers import Tokenizer


MAX_TEXT_CHARS = 8 << 20
"""The library needs some 350 bytes for each token while it encodes, and a character
can be a token: this bounds a text to 3 GB. It is over a million tokens of prose."""


def encode_batch(
    tokenizer: Tokenizer, texts: Sequence[str], *, add_special_tokens: bool
) -> list[list[int]]:
    """Encodes the texts in one call, which the library spreads over the cores with
    Python's lock released. A text may have no ids at all.

    Each text must have passed check_text.
    """
    if not texts:
        return []
    encodings = tokenizer.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
    return [encoding.ids for encoding in encodings]


def check_text(text: str, field: str) -> None:
    """Raises InvalidRequest naming `field` if the text is over MAX_TEXT_CHARS, or is not
    Unicode scalar values: a lone surrogate has no UTF-8 form, and one in a batch would
    fail the whole batch."""
    if len(text) > MAX_TEXT_CHARS:
        raise InvalidRequest(
            field, f"{len(text)} characters are too many to tokenize; the limit is {MAX_TEXT_CHARS}"
        )
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InvalidRequest(
            field, f"not valid Unicode: a lone surrogate at character {error.start}"
        ) from None
