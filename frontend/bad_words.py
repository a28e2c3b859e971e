"""Words that must not come out, as the ids that would make them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pagewire.errors import InvalidRequest

if TYPE_CHECKING:
    from frontend.tokenizer_client import TokenizerClient


def variants(word: str) -> list[str]:
    """The word at the start of a line and inside of one, and as it was written.

    A leading space usually makes other tokens, and more or fewer of them
    (vllm-project/vllm#23886), so each variant is banned for itself.
    """
    stem = word.lstrip(" ")
    return list(dict.fromkeys((stem, f" {stem}", word))) if stem else [word]


async def tokenize_bad_word(
    tokenizer: TokenizerClient, word: str, index: int
) -> list[tuple[int, ...]]:
    """The id sequences of the index-th word's variants, each once.

    Raises InvalidRequest where the tokenizer drops all of its characters, and what
    TokenizerClient.tokenize_text does.
    """
    field = f"sampling_params.bad_words[{index}]"
    found: dict[tuple[int, ...], None] = {}
    for text in variants(word):
        ids = tuple(await tokenizer.tokenize_text(text, field))
        if not ids:
            # With a space before it, only the space would be banned.
            raise InvalidRequest(field, "the tokenizer makes no tokens of this word")
        found[ids] = None
    return list(found)
