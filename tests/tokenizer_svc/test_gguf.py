from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any

import gguf
import pytest

from pagewire.errors import ModelLoadError
from pagewire.gguf_file import GgufFile
from tests.tokenizer_svc.tokenizers_for_tests import (
    SPACE,
    sentencepiece_pieces,
    sentencepiece_tokenizer,
)
from tokenizer_svc.gguf_tokenizer import PRE_TOKENIZERS
from tokenizer_svc.loader import load_tokenizer

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tokenizer_svc.loader import LoadedTokenizer

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6


def write_gguf(path: Path, fill: Callable[[gguf.GGUFWriter], None]) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    fill(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_byte_level(path: Path, pre: str | None = "llama-bpe", **flags: bool) -> Path:
    tokens = ["<|bos|>", "<|eos|>", "<think>", "a", "b", "Ġ", "ab", "Ġa", "1", "2", "12"]
    types = [CONTROL, CONTROL, USER_DEFINED] + [NORMAL] * (len(tokens) - 3)

    def fill(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("gpt2")
        if pre is not None:
            writer.add_tokenizer_pre(pre)
        writer.add_token_list(tokens)
        writer.add_token_types(types)
        writer.add_token_merges(["a b", "Ġ a", "1 2"])
        writer.add_bos_token_id(0)
        writer.add_eos_token_id(1)
        for key, value in flags.items():
            writer.add_bool(f"tokenizer.ggml.{key}", value)

    return write_gguf(path, fill)


def write_sentencepiece(path: Path, **flags: bool) -> Path:
    pieces, scores = sentencepiece_pieces()

    def fill(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("llama")
        writer.add_token_list(pieces)
        writer.add_token_scores(scores)
        types = [UNKNOWN, CONTROL, CONTROL] + [BYTE] * 256 + [NORMAL] * (len(pieces) - 259)
        writer.add_token_types(types)
        writer.add_unk_token_id(0)
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        for key, value in flags.items():
            writer.add_bool(f"tokenizer.ggml.{key}", value)

    return write_gguf(path, fill)


def ids_of(loaded: LoadedTokenizer, text: str, *, special: bool = True) -> list[int]:
    ids: list[int] = loaded.tokenizer.encode(text, add_special_tokens=special).ids
    return ids


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("alpha beta gamma delta", [13433, 11345, 16439, 15184]),
        ("copper copper copper copper", [16827, 456, 8548, 8548, 8548]),
        ("What is the capital of France?", [1780, 314, 260, 3575, 282, 4649, 47]),
        ("\u0004", []),
        ("", []),
        ("🦜", [10813, 116, 246]),
        ("日本語", [23274, 115, 40993, 179, 120, 248]),
        ("ไทย", [31933, 222, 10283, 241, 10283, 112]),
        ("\nObservation:", [198, 23143, 2903, 42]),
    ],
)
def test_embedded_ids(embedded: LoadedTokenizer, text: str, ids: list[int]) -> None:
    assert ids_of(embedded, text) == ids


def test_digits_stand_alone(embedded: LoadedTokenizer) -> None:
    """Before the split at spaces: so two spaces before a digit are one token."""
    digits = [ids_of(embedded, digit)[0] for digit in "1234"]
    assert ids_of(embedded, "1234") == digits
    two_spaces = embedded.tokenizer.token_to_id("ĠĠ")
    assert ids_of(embedded, "a  1") == [*ids_of(embedded, "a"), two_spaces, digits[0]]


def test_embedded_facts(embedded: LoadedTokenizer) -> None:
    assert embedded.vocab_size == 49152
    assert embedded.special_tokens["bos_token"] == "<|im_start|>"
    assert embedded.special_tokens["eos_token"] == "<|im_end|>"
    assert embedded.chat_template is not None
    special = {i for i, token in embedded.tokenizer.get_added_tokens_decoder().items()}
    assert special == set(range(17))


def test_embedded_equals_transformers(embedded: LoadedTokenizer, embedded_gguf: Path) -> None:
    """transformers 5.24 does not know the "smollm" pre-tokenizer and splits as GPT-2 does,
    which differs only where two spaces precede a digit: such texts are left out."""
    from transformers import AutoTokenizer

    theirs: Any = AutoTokenizer.from_pretrained(
        str(embedded_gguf.parent), gguf_file=embedded_gguf.name
    )
    texts = [
        "It's the year 2024, isn't it?\n\n\tYes!  No...",
        "def f(x):\n    return x**2 # 🦜 日本語 ไทย é e\u0301",
        "<|im_start|>user\n<|im_end|> <repo_name>  tail ",
        "\x00\x04\x7f\u00a0\u00ad\u200b",
        " leading", "trailing ", "  ", "ꙮ" * 3,
    ]  # fmt: skip
    for text in texts:
        ids = ids_of(embedded, text)
        assert ids == theirs.encode(text)
        for skip in (False, True):
            ours = embedded.tokenizer.decode(ids, skip_special_tokens=skip)
            assert ours == theirs.decode(ids, skip_special_tokens=skip)
    assert embedded.chat_template == theirs.chat_template
    assert len(theirs) == embedded.vocab_size


def test_split_patterns_are_those_of_transformers() -> None:
    from transformers.integrations.gguf import gguf_tokenizer_mapping

    theirs = gguf_tokenizer_mapping.GGUF_PRE_TOKENIZER_SPLITS
    shared = PRE_TOKENIZERS.keys() & theirs.keys()
    assert {"llama-bpe", "qwen2", "tekken", "gpt-4o"} <= shared
    for name in shared:
        assert PRE_TOKENIZERS[name].split == theirs[name], name


class TestByteLevel:
    def test_added_tokens_are_whole(self, tmp_path: Path) -> None:
        loaded = load_tokenizer(write_byte_level(tmp_path / "m.gguf", add_bos_token=False))
        assert ids_of(loaded, "ab<think>a<|eos|>") == [6, 2, 3, 1]
        assert loaded.tokenizer.decode([2, 3, 1], skip_special_tokens=True) == "<think>a"

    def test_bos_and_eos_flags(self, tmp_path: Path) -> None:
        path = tmp_path / "m.gguf"
        loaded = load_tokenizer(write_byte_level(path, add_bos_token=True, add_eos_token=True))
        assert ids_of(loaded, "ab") == [0, 6, 1]
        assert ids_of(loaded, "ab", special=False) == [6]
        assert ids_of(load_tokenizer(write_byte_level(path, add_bos_token=False)), "ab") == [6]
        # Without the flag the family decides: Llama 3 begins with BOS, GPT-2 does not.
        assert ids_of(load_tokenizer(write_byte_level(path)), "ab") == [0, 6]
        assert ids_of(load_tokenizer(write_byte_level(path, pre="gpt-2")), "ab") == [6]

    def test_no_pre_tokenizer_is_default(self, tmp_path: Path) -> None:
        loaded = load_tokenizer(write_byte_level(tmp_path / "m.gguf", pre=None))
        assert ids_of(loaded, "12 a") == [10, 7]

    def test_digits_by_pre_tokenizer(self, tmp_path: Path) -> None:
        path = tmp_path / "m.gguf"
        assert ids_of(load_tokenizer(write_byte_level(path, pre="smollm")), "12") == [8, 9]
        assert ids_of(load_tokenizer(write_byte_level(path, pre="qwen2")), "12") == [8, 9]
        assert ids_of(load_tokenizer(write_byte_level(path, pre="gpt-4o")), "12") == [10]

    def test_unknown_pre_tokenizer(self, tmp_path: Path) -> None:
        path = write_byte_level(tmp_path / "m.gguf", pre="martian")
        with pytest.raises(ModelLoadError, match=r"m\.gguf.*'martian'.*smollm"):
            load_tokenizer(path)


class TestSentencePiece:
    def test_same_ids_as_the_models_own_tokenizer(self, tmp_path: Path) -> None:
        loaded = load_tokenizer(write_sentencepiece(tmp_path / "m.gguf", add_bos_token=False))
        own = sentencepiece_tokenizer()
        for text in [
            "hello world",
            " hello",
            "the, the! é日本",
            "🦜\n",
            "",
            "hel wor the</s>hello",
        ]:
            assert ids_of(loaded, text) == own.encode(text).ids
            ids = own.encode(text, add_special_tokens=False).ids
            assert loaded.tokenizer.decode(ids) == own.decode(ids)

    def test_begins_with_bos_unless_told(self, tmp_path: Path) -> None:
        path = tmp_path / "m.gguf"
        hello = [1, sentencepiece_tokenizer().token_to_id(f"{SPACE}hello")]
        assert ids_of(load_tokenizer(write_sentencepiece(path)), "hello") == hello
        loaded = load_tokenizer(write_sentencepiece(path, add_bos_token=True, add_eos_token=True))
        assert ids_of(loaded, "hello") == [*hello, 2]

    def test_without_the_space_prefix(self, tmp_path: Path) -> None:
        path = write_sentencepiece(tmp_path / "m.gguf", add_space_prefix=False, add_bos_token=False)
        loaded = load_tokenizer(path)
        ids = ids_of(loaded, "hello")
        assert loaded.tokenizer.id_to_token(ids[0]) == "h"
        assert loaded.tokenizer.decode(ids_of(loaded, " hello")) == " hello"

    def test_equals_transformers(self, tmp_path: Path) -> None:
        """Where no special token stands inside the text; there llama.cpp and Llama 2's own
        tokenizer.json prefix each stretch with a space, and transformers the first only."""
        from transformers import AutoTokenizer

        path = write_sentencepiece(tmp_path / "m.gguf")
        write_gguf_config(path)
        theirs: Any = AutoTokenizer.from_pretrained(str(tmp_path), gguf_file=path.name)
        loaded = load_tokenizer(path)
        for text in ["hello world", "the, the! é日本 🦜", "x\n\ny"]:
            assert ids_of(loaded, text) == theirs.encode(text)


def write_gguf_config(path: Path) -> None:
    """AutoTokenizer asks for a config beside the file."""
    (path.parent / "config.json").write_text('{"model_type": "llama"}')


class TestDamagedFiles:
    def test_every_truncation_is_a_model_load_error(self, tmp_path: Path) -> None:
        whole = write_byte_level(tmp_path / "whole.gguf").read_bytes()
        path = tmp_path / "cut.gguf"
        for size in range(1, len(whole) - 32, 7):  # at most 31 bytes are padding
            path.write_bytes(whole[:size])
            with pytest.raises(ModelLoadError, match=r"cut\.gguf"):
                load_tokenizer(path)

    def test_empty_file(self, tmp_path: Path) -> None:
        path = tmp_path / "empty.gguf"
        path.write_bytes(b"")
        with pytest.raises(ModelLoadError, match=r"empty\.gguf"):
            load_tokenizer(path)

    def test_a_count_from_nowhere(self, tmp_path: Path) -> None:
        header = struct.pack("<4sIQQ", b"GGUF", 3, 0, 1)
        key = b"tokenizer.ggml.tokens"
        entry = struct.pack("<Q", len(key)) + key + struct.pack("<IIQ", 9, 8, 1 << 60)
        path = tmp_path / "m.gguf"
        path.write_bytes(header + entry)
        with pytest.raises(ModelLoadError, match="array"):
            GgufFile(path)

    def test_no_tokenizer_in_it(self, tmp_path: Path) -> None:
        path = write_gguf(tmp_path / "m.gguf", lambda writer: writer.add_name("x"))
        with pytest.raises(ModelLoadError, match=r"tokenizer\.ggml\.model is missing"):
            load_tokenizer(path)

    def test_a_special_id_outside_the_vocabulary(self, tmp_path: Path) -> None:
        def fill(writer: gguf.GGUFWriter) -> None:
            writer.add_tokenizer_model("gpt2")
            writer.add_token_list(["a", "aa"])
            writer.add_token_types([NORMAL, NORMAL])
            writer.add_token_merges(["a a"])
            writer.add_eos_token_id(2)

        path = write_gguf(tmp_path / "m.gguf", fill)
        with pytest.raises(ModelLoadError, match=r"eos_token_id is 2, outside"):
            load_tokenizer(path)

    def test_a_merge_of_nothing(self, tmp_path: Path) -> None:
        def fill(writer: gguf.GGUFWriter) -> None:
            writer.add_tokenizer_model("gpt2")
            writer.add_token_list(["a", "b"])
            writer.add_token_merges(["a b"])

        path = write_gguf(tmp_path / "m.gguf", fill)
        with pytest.raises(ModelLoadError, match=r"m\.gguf: tokenizer\.ggml\.merges entry 0"):
            load_tokenizer(path)

    def test_another_kind_of_tokenizer(self, tmp_path: Path) -> None:
        path = write_gguf(tmp_path / "m.gguf", lambda writer: writer.add_tokenizer_model("rwkv"))
        with pytest.raises(ModelLoadError, match="'rwkv'"):
            load_tokenizer(path)
