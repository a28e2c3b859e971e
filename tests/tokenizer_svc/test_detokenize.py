from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest

from tests.tokenizer_svc.tokenizers_for_tests import (
    SPACE,
    sentencepiece_tokenizer,
    word_piece_tokenizer,
)
from tokenizer_svc.detokenize import ByteDecoder, Detokenizer, StreamDecoder
from tokenizer_svc.token_bytes import token_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tokenizers import Tokenizer

    from tokenizer_svc.detokenize import Decoder
    from tokenizer_svc.loader import LoadedTokenizer

PARROT = [10813, 116, 246]
JAPANESE = [23274, 115, 40993, 179, 120, 248]
THAI = [31933, 222, 10283, 241, 10283, 112]


@pytest.fixture(params=["bytes", "stream"])
def decoder(
    request: pytest.FixtureRequest, embedded: LoadedTokenizer
) -> Callable[[Sequence[int], bool], Decoder]:
    """Both decoders over the embedded tokenizer: (prompt_tail, skip_special_tokens)."""
    tokenizer = embedded.tokenizer
    if request.param == "stream":
        return lambda tail, skip: StreamDecoder(tokenizer, tail, skip)
    tables = token_bytes(tokenizer)
    assert tables is not None
    return lambda tail, skip: ByteDecoder(tables, tail, skip)


def one_by_one(decoder: Decoder, ids: Sequence[int]) -> list[str]:
    """The delta of each id, and the flush."""
    return [*(decoder.feed([token_id]) for token_id in ids), decoder.flush()]


@pytest.mark.parametrize("skip", [False, True], ids=["keep", "skip"])
def test_deltas_add_up_to_the_whole_text(
    decoder: Callable[[Sequence[int], bool], Decoder], embedded: LoadedTokenizer, skip: bool
) -> None:
    """Over the whole vocabulary, with many special tokens and stray bytes. Equality is
    exact for invalid bytes too: a byte-level text is one run of bytes, in which both
    sides put U+FFFD for each maximal invalid part."""
    rng = random.Random(7)
    size = embedded.vocab_size
    for _ in range(3000):
        low = rng.choice([20, 300, size])
        ids = [rng.randrange(low) for _ in range(rng.randrange(1, 30))]
        deltas = one_by_one(decoder([], skip), ids)
        assert "".join(deltas) == embedded.tokenizer.decode(ids, skip_special_tokens=skip)


def test_every_id_alone(
    decoder: Callable[[Sequence[int], bool], Decoder], embedded: LoadedTokenizer
) -> None:
    for token_id in range(embedded.vocab_size):
        whole = embedded.tokenizer.decode([token_id], skip_special_tokens=False)
        assert "".join(one_by_one(decoder([], False), [token_id])) == whole


def test_batches_of_ids_give_the_same_text(
    decoder: Callable[[Sequence[int], bool], Decoder], embedded: LoadedTokenizer
) -> None:
    rng = random.Random(11)
    for _ in range(300):
        ids = [rng.randrange(embedded.vocab_size) for _ in range(40)]
        sut, text, start = decoder([], True), "", 0
        while start < len(ids):
            count = rng.randrange(6)
            text += sut.feed(ids[start : start + count])
            start += count
        assert text + sut.flush() == embedded.tokenizer.decode(ids, skip_special_tokens=True)


def test_no_replacement_character_in_valid_text(
    decoder: Callable[[Sequence[int], bool], Decoder], embedded: LoadedTokenizer
) -> None:
    # waybarrios/vllm-mlx#109, tenstorrent/tt-inference-server#2594
    rng = random.Random(13)
    alphabet = "ab \n🦜日本語ไทยé\u0301👩\u200d🚀\U0010ffff"
    for _ in range(500):
        text = "".join(rng.choice(alphabet) for _ in range(20))
        ids = embedded.tokenizer.encode(text, add_special_tokens=False).ids
        deltas = one_by_one(decoder([], True), ids)
        assert "".join(deltas) == text
        assert not any("\ufffd" in delta for delta in deltas)


@pytest.mark.parametrize(
    ("ids", "text"),
    [
        (PARROT, "🦜"),
        (JAPANESE, "日本語"),
        (THAI, "ไทย"),
        ([*PARROT, 17097, 241, 115, 40993, 179, 120, 248, 216, *THAI], "🦜 日本語 ไทย"),
    ],
)
def test_known_splits(
    decoder: Callable[[Sequence[int], bool], Decoder], ids: list[int], text: str
) -> None:
    deltas = one_by_one(decoder([], True), ids)
    assert "".join(deltas) == text
    assert not any("\ufffd" in delta for delta in deltas)
    assert deltas[-1] == ""


class TestPromptThatEndsInHalfACharacter:
    """vllm-project/vllm#48853. The rule: the character belongs to the output if the
    output completes it; if it breaks it, nothing of it is emitted."""

    TAIL = (28120, 15107, 116)

    def test_completed(self, decoder: Callable[[Sequence[int], bool], Decoder]) -> None:
        assert "".join(one_by_one(decoder(self.TAIL, True), [246])) == "🦜"

    def test_completed_then_stray_bytes(
        self, decoder: Callable[[Sequence[int], bool], Decoder]
    ) -> None:
        assert "".join(one_by_one(decoder(self.TAIL, True), [246, 246, 246])) == "🦜\ufffd\ufffd"

    def test_broken(self, decoder: Callable[[Sequence[int], bool], Decoder]) -> None:
        assert "".join(one_by_one(decoder(self.TAIL, True), [81, 81])) == "aa"

    def test_no_output(self, decoder: Callable[[Sequence[int], bool], Decoder]) -> None:
        assert one_by_one(decoder(self.TAIL, True), []) == [""]

    def test_still_half(self, decoder: Callable[[Sequence[int], bool], Decoder]) -> None:
        assert "".join(one_by_one(decoder(self.TAIL[:2], True), [116])) in ("\ufffd", "")


def test_special_tokens_have_no_spaces_around_them(
    decoder: Callable[[Sequence[int], bool], Decoder],
) -> None:
    # huggingface/transformers#24511
    assert "".join(one_by_one(decoder([4093], False), [3, 3, 3])) == "<repo_name>" * 3
    assert "".join(one_by_one(decoder([4093], True), [3, 3, 3])) == ""


@pytest.mark.parametrize("stray", [-1, -(2**31), 49152, 2**31 - 1, 2**33])
def test_ids_outside_the_vocabulary_add_nothing(
    decoder: Callable[[Sequence[int], bool], Decoder], stray: int
) -> None:
    assert "".join(one_by_one(decoder([stray], True), [stray, *PARROT[:1], stray, 116, 246])) == (
        "🦜"
    )


def test_silent_ids_do_not_pile_up(
    decoder: Callable[[Sequence[int], bool], Decoder], embedded: LoadedTokenizer
) -> None:
    """A stray continuation byte for ever, and special tokens for ever: each step
    decodes a short window only, so the cost is linear."""
    sut = decoder([], True)
    ids = [246] * 4000 + [2] * 4000 + [81]
    assert "".join(one_by_one(sut, ids)) == "\ufffd" * 4000 + "a"
    if isinstance(sut, StreamDecoder):
        assert len(sut._silent) <= 16
        assert len(sut._context) <= 8


class TestSentencePiece:
    @pytest.fixture
    def tokenizer(self) -> Tokenizer:
        return sentencepiece_tokenizer()

    def test_the_table_serves_it(self, tokenizer: Tokenizer) -> None:
        assert isinstance(Detokenizer(tokenizer).decoder([], skip_special_tokens=True), ByteDecoder)

    def test_the_first_space_belongs_to_the_start_of_a_text(self, tokenizer: Tokenizer) -> None:
        ids = tokenizer.encode("hello world").ids
        make = Detokenizer(tokenizer).decoder
        assert [tokenizer.id_to_token(token_id) for token_id in ids] == [
            f"{SPACE}hello",
            f"{SPACE}world",
        ]
        assert one_by_one(make([], skip_special_tokens=True), ids) == ["hello", " world", ""]
        assert one_by_one(make([1], skip_special_tokens=True), ids) == ["hello", " world", ""]
        after = tokenizer.encode("the").ids
        assert one_by_one(make(after, skip_special_tokens=True), ids) == [" hello", " world", ""]

    def test_deltas_add_up(self, tokenizer: Tokenizer) -> None:
        rng = random.Random(3)
        words = ["hello", "world", "the", "日本", "é", "🦜", "ไทย", "a, b!", " "]
        make = Detokenizer(tokenizer).decoder
        for _ in range(500):
            text = " ".join(rng.choice(words) for _ in range(8))
            ids = tokenizer.encode(text, add_special_tokens=False).ids
            deltas = one_by_one(make([], skip_special_tokens=True), ids)
            assert "".join(deltas) == tokenizer.decode(ids) == text
            assert not any("\ufffd" in delta for delta in deltas)

    def test_an_output_is_what_it_adds_to_the_prompt(self, tokenizer: Tokenizer) -> None:
        """With random ids, byte tokens in valid runs only: the library turns a whole run
        of byte tokens into U+FFFD if any of it is invalid, also what was valid before,
        and a stream cannot take that back."""
        rng = random.Random(5)
        parrot = [3 + byte for byte in "🦜".encode()]
        units = [[token_id] for token_id in range(259, tokenizer.get_vocab_size())] + [parrot, [2]]
        for _ in range(500):
            prompt = [token_id for unit in rng.choices(units, k=4) for token_id in unit]
            output = [token_id for unit in rng.choices(units, k=9) for token_id in unit]
            sut = Detokenizer(tokenizer).decoder(prompt, skip_special_tokens=True)
            deltas = one_by_one(sut, output)
            before = tokenizer.decode(prompt)
            # A prompt of special tokens only has no text: the output begins the text.
            assert before + "".join(deltas) == tokenizer.decode(prompt + output)

    def test_stray_bytes(self, tokenizer: Tokenizer) -> None:
        lone = 3 + 0x9C
        letter = tokenizer.token_to_id("a")
        make = Detokenizer(tokenizer).decoder
        deltas = one_by_one(make([letter], skip_special_tokens=True), [lone, letter, 3 + 0xF0])
        assert deltas == ["\ufffd", "a", "", "\ufffd"]


class TestWordPiece:
    """A decoder that only DecodeStream can follow."""

    @pytest.fixture
    def tokenizer(self) -> Tokenizer:
        return word_piece_tokenizer()

    def test_deltas_add_up(self, tokenizer: Tokenizer) -> None:
        make = Detokenizer(tokenizer).decoder
        assert isinstance(make([], skip_special_tokens=True), StreamDecoder)
        rng = random.Random(17)
        for skip in (False, True):
            for _ in range(300):
                prompt = [rng.randrange(1, 9) for _ in range(3)]
                output = [rng.randrange(1, 9) for _ in range(20)]
                deltas = one_by_one(make(prompt, skip_special_tokens=skip), output)
                whole = tokenizer.decode(prompt + output, skip_special_tokens=skip)
                before = tokenizer.decode(prompt, skip_special_tokens=skip)
                assert before + "".join(deltas) == whole

    def test_many_special_tokens_between_words(self, tokenizer: Tokenizer) -> None:
        game, separator = tokenizer.token_to_id("game"), tokenizer.token_to_id("[SEP]")
        sut = Detokenizer(tokenizer).decoder([game], skip_special_tokens=True)
        deltas = one_by_one(sut, [separator] * 100 + [game])
        assert "".join(deltas) == " game"


def test_single_tokens_of_another_decoder() -> None:
    """WordPiece joins no bytes: a token is what it decodes to by itself."""
    tokenizer = word_piece_tokenizer()
    detokenizer = Detokenizer(tokenizer)
    for token_id in range(tokenizer.get_vocab_size()):
        alone = tokenizer.decode([token_id], skip_special_tokens=False)
        assert detokenizer.spell(token_id).decode() == alone
    assert detokenizer.spell(-1) == detokenizer.spell(10**6) == b""
