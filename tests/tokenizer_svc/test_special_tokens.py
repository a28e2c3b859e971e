"""Special tokens in the text: spaces between them, and those that stay."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest

from tests.tokenizer_svc.tokenizers_for_tests import (
    sentencepiece_tokenizer,
    word_piece_tokenizer,
)
from tokenizer_svc.detokenize import Detokenizer

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from tokenizer_svc.loader import LoadedTokenizer

REPO_NAME = 3


def text_of(tokenizer: Tokenizer, ids: list[int], **how: Any) -> str:
    """One id at a time."""
    decoder = Detokenizer(tokenizer).decoder([], **{"skip_special_tokens": False, **how})
    return "".join([*(decoder.feed([token_id]) for token_id in ids), decoder.flush()])


@pytest.mark.parametrize("spaces", [True, False])
def test_byte_level_vocabularies_put_no_spaces(embedded: LoadedTokenizer, spaces: bool) -> None:
    """huggingface/transformers#24511."""
    ids = [REPO_NAME] * 3
    sut = Detokenizer(embedded.tokenizer)
    how: dict[str, Any] = {"skip_special_tokens": False, "spaces_between_special_tokens": spaces}
    assert text_of(embedded.tokenizer, ids, **how) == "<repo_name>" * 3
    assert sut.decode(ids, **how) == "<repo_name>" * 3
    from transformers import PreTrainedTokenizerFast

    theirs = PreTrainedTokenizerFast(tokenizer_object=embedded.tokenizer)
    assert theirs.decode(ids, **how) == "<repo_name>" * 3


def test_spaces_of_a_decoder_can_be_left_out() -> None:
    """Between special tokens only; with them it is the library's own text."""
    tokenizer = word_piece_tokenizer()
    ids = [tokenizer.token_to_id(t) for t in ("[SEP]", "[SEP]", "a", "[SEP]", "play", "##ing")]
    with_spaces = "[SEP] [SEP] a [SEP] playing"
    assert tokenizer.decode(ids, skip_special_tokens=False) == with_spaces
    sut = Detokenizer(tokenizer)
    for spaces, expected in ((True, with_spaces), (False, "[SEP][SEP] a [SEP] playing")):
        how: dict[str, Any] = {
            "skip_special_tokens": False,
            "spaces_between_special_tokens": spaces,
        }
        assert text_of(tokenizer, ids, **how) == expected
        assert sut.decode(ids, **how) == expected
    skipped = {"skip_special_tokens": True, "spaces_between_special_tokens": False}
    assert text_of(tokenizer, ids, **skipped) == "a playing"


@pytest.mark.parametrize("make", [sentencepiece_tokenizer, word_piece_tokenizer])
def test_kept_tokens_stay_and_the_others_go(make: Any) -> None:
    tokenizer = make()
    tokenizer.add_special_tokens(["[TOOL_CALLS]", "[ARGS]"])
    kept, other = (tokenizer.token_to_id(t) for t in ("[TOOL_CALLS]", "[ARGS]"))
    letter = tokenizer.token_to_id("a")
    ids = [other, letter, kept, other, letter, letter, kept]
    how: dict[str, Any] = {"skip_special_tokens": True, "kept_special_tokens": ["[TOOL_CALLS]"]}
    words = tokenizer.decode([letter, letter])
    assert text_of(tokenizer, ids, **how) == f"a[TOOL_CALLS]{words}[TOOL_CALLS]"
    assert text_of(tokenizer, ids, skip_special_tokens=True) == tokenizer.decode(ids)


@pytest.mark.parametrize("make", [sentencepiece_tokenizer, word_piece_tokenizer])
def test_decoding_complete_characters(make: Any) -> None:
    tokenizer = make()
    sut = Detokenizer(tokenizer)
    rng = random.Random(5)
    for _ in range(200):
        # Without byte tokens every character is complete.
        first = 259 if tokenizer.token_to_id("<0x00>") is not None else 1
        ids = [rng.randrange(first, tokenizer.get_vocab_size()) for _ in range(8)]
        text = sut.decode(ids, skip_special_tokens=True, complete_characters_only=True)
        assert text == tokenizer.decode(ids)


def test_half_a_character_at_the_end_is_left_out(embedded: LoadedTokenizer) -> None:
    ids = [28120, 15107, 116]
    sut = Detokenizer(embedded.tokenizer)
    how: dict[str, Any] = {"skip_special_tokens": True}
    assert sut.decode(ids, **how) == "hello \ufffd"
    assert sut.decode(ids, complete_characters_only=True, **how) == "hello "
    assert sut.decode([*ids, 246], complete_characters_only=True, **how) == "hello 🦜"
