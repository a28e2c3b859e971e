from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from tokenizers import processors

from pagewire.errors import ConfigError, ModelLoadError
from tests.tokenizer_svc.tokenizers_for_tests import sentencepiece_tokenizer
from tokenizer_svc.loader import load_tokenizer

if TYPE_CHECKING:
    from pathlib import Path


def write_hf(directory: Path, config: dict[str, Any] | None = None) -> Path:
    directory.mkdir(exist_ok=True)
    sentencepiece_tokenizer().save(str(directory / "tokenizer.json"))
    if config is not None:
        (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory


def ids_of(directory: Path, text: str) -> list[int]:
    ids: list[int] = load_tokenizer(directory).tokenizer.encode(text).ids
    return ids


HELLO = sentencepiece_tokenizer().encode("hello").ids


def test_tokenizer_json_alone(tmp_path: Path) -> None:
    loaded = load_tokenizer(write_hf(tmp_path))
    assert loaded.tokenizer.encode("hello").ids == HELLO
    assert loaded.chat_template is None
    assert loaded.special_tokens == {}
    assert loaded.vocab_size == sentencepiece_tokenizer().get_vocab_size()


def test_special_tokens_as_text_or_object(tmp_path: Path) -> None:
    config = {"bos_token": "<s>", "eos_token": {"content": "</s>", "special": True}}
    loaded = load_tokenizer(write_hf(tmp_path, config))
    assert loaded.special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}


def test_truncation_of_the_file_is_not_applied(tmp_path: Path) -> None:
    tokenizer = sentencepiece_tokenizer()
    tokenizer.enable_truncation(max_length=2)
    tokenizer.enable_padding(length=8)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert len(ids_of(tmp_path, "hello world hello world")) == 4


def test_tokens_that_only_the_config_lists(tmp_path: Path) -> None:
    size = sentencepiece_tokenizer().get_vocab_size()
    entry = {"content": "<|tool|>", "special": True, "normalized": False}
    directory = write_hf(tmp_path, {"added_tokens_decoder": {str(size): entry}})
    loaded = load_tokenizer(directory)
    assert loaded.vocab_size == size + 1
    assert loaded.tokenizer.encode("<|tool|>").ids == [size]
    directory = write_hf(tmp_path, {"added_tokens_decoder": {str(size + 5): entry}})
    with pytest.raises(ModelLoadError, match=r"tokenizer_config\.json"):
        load_tokenizer(directory)


def test_where_the_chat_template_comes_from(tmp_path: Path) -> None:
    listed = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    assert load_tokenizer(write_hf(tmp_path, {"chat_template": "C"})).chat_template == "C"
    assert load_tokenizer(write_hf(tmp_path, {"chat_template": listed})).chat_template == "D"
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "J"}))
    assert load_tokenizer(tmp_path).chat_template == "J"
    (tmp_path / "chat_template.jinja").write_text("F")
    assert load_tokenizer(tmp_path).chat_template == "F"
    own = tmp_path / "own.jinja"
    own.write_text("O")
    assert load_tokenizer(tmp_path, str(own)).chat_template == "O"
    with pytest.raises(ConfigError, match="absent"):
        load_tokenizer(tmp_path, str(tmp_path / "absent"))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", "{", r"tokenizer\.json: not a tokenizer"),
        ("tokenizer.json", '{"model": 1}', r"tokenizer\.json: not a tokenizer"),
        ("tokenizer_config.json", "{", r"tokenizer_config\.json: cannot be read as JSON"),
        ("tokenizer_config.json", "[]", r"tokenizer_config\.json: not a JSON object"),
        ("chat_template.json", "{", r"chat_template\.json"),
    ],
)
def test_a_bad_file_is_named(tmp_path: Path, name: str, content: str, message: str) -> None:
    write_hf(tmp_path, {})
    (tmp_path / name).write_text(content)
    with pytest.raises(ModelLoadError, match=message):
        load_tokenizer(tmp_path)


def test_no_tokenizer_json(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"tokenizer\.json: missing"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("flags", [{}, {"add_bos_token": True}, {"add_bos_token": False}])
@pytest.mark.parametrize("post_processor", [False, True])
def test_equals_transformers(tmp_path: Path, flags: dict[str, bool], post_processor: bool) -> None:
    """Whatever the flags say, tokenizer.json decides what is put around a text."""
    from transformers import AutoTokenizer

    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    directory = write_hf(tmp_path, {**names, **flags, "tokenizer_class": "PreTrainedTokenizerFast"})
    if post_processor:
        tokenizer = sentencepiece_tokenizer()
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A </s>",
            pair="<s> $A $B:1 </s>",
            special_tokens=[("<s>", 1), ("</s>", 2)],
        )
        tokenizer.save(str(directory / "tokenizer.json"))
    theirs: Any = AutoTokenizer.from_pretrained(str(directory))
    for text in ["hello world", "the é日本 🦜", "<s>hello"]:
        assert ids_of(directory, text) == theirs.encode(text)
