"""Loads a model's tokenizer, chat template and special tokens, without torch."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from pagewire.errors import ConfigError, ModelLoadError
from pagewire.gguf_file import GgufFile
from tokenizer_svc.gguf_tokenizer import GGUF_TOKENIZER_PREFIX, build_gguf_tokenizer

_NAMED_TOKENS = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)


@dataclass(frozen=True, slots=True)
class LoadedTokenizer:
    """One tokenizer, never changed after loading, so that threads may share it."""

    tokenizer: Tokenizer
    vocab_size: int
    """The largest id + 1."""
    chat_template: str | None
    special_tokens: dict[str, str] = field(default_factory=dict)
    """bos_token and so on -> text, as chat templates name them."""


def load_tokenizer(path: Path, chat_template_file: str | None = None) -> LoadedTokenizer:
    """Loads from an HF directory or a GGUF file, as ModelSource.path names it.

    What is put around a text comes from tokenizer.json's own post-processor (as in
    transformers, add_bos_token in tokenizer_config.json does not change it) or from the
    GGUF file's flags. `chat_template_file` replaces the model's own template. Raises ModelLoadError
    naming the file that is missing or wrong, ConfigError for the template file.
    """
    loaded = _load_gguf(path) if path.is_file() else _load_hf(path)
    if chat_template_file is None:
        return loaded
    template = _read_template_file(chat_template_file)
    return LoadedTokenizer(loaded.tokenizer, loaded.vocab_size, template, loaded.special_tokens)


def _load_gguf(path: Path) -> LoadedTokenizer:
    built = build_gguf_tokenizer(GgufFile(path).read_metadata(GGUF_TOKENIZER_PREFIX), path)
    return LoadedTokenizer(
        _never_cut(built.tokenizer),
        _vocab_size(built.tokenizer),
        built.chat_template,
        built.special_tokens,
    )


def _load_hf(directory: Path) -> LoadedTokenizer:
    file = directory / "tokenizer.json"
    if not file.is_file():
        raise ModelLoadError(
            f"{file}: missing; a tokenizer in another format (tokenizer.model) must be saved as "
            "tokenizer.json with transformers first"
        )
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # tokenizers raises bare Exception for what it cannot parse
        raise ModelLoadError(f"{file}: not a tokenizer ({error})") from error
    config_file = directory / "tokenizer_config.json"
    config = _read_json(config_file) if config_file.is_file() else {}
    special_tokens = {
        role: text for role in _NAMED_TOKENS if (text := _token_text(config.get(role))) is not None
    }
    _add_missing_tokens(tokenizer, config, config_file)
    template = _hf_chat_template(directory, config)
    return LoadedTokenizer(_never_cut(tokenizer), _vocab_size(tokenizer), template, special_tokens)


def _never_cut(tokenizer: Tokenizer) -> Tokenizer:
    """tokenizer.json may carry training-time truncation: a served prompt is never cut."""
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _vocab_size(tokenizer: Tokenizer) -> int:
    """Ids may have holes, so the count of tokens is not enough."""
    return max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1


def _add_missing_tokens(tokenizer: Tokenizer, config: dict[str, Any], file: Path) -> None:
    """Tokens that only tokenizer_config.json lists must land on the ids it gives them."""
    listed = config.get("added_tokens_decoder") or {}
    for key, entry in sorted(listed.items(), key=lambda item: int(item[0])):
        text = _token_text(entry)
        if text is None or tokenizer.token_to_id(text) is not None:
            continue
        options = {
            name: bool(entry[name])
            for name in ("single_word", "lstrip", "rstrip", "normalized", "special")
            if name in entry
        }
        token = AddedToken(text, **options)
        (tokenizer.add_special_tokens if token.special else tokenizer.add_tokens)([token])
        if tokenizer.token_to_id(text) != int(key):
            raise ModelLoadError(f"{file}: added token {text!r} does not fit at id {key}")


def _hf_chat_template(directory: Path, config: dict[str, Any]) -> str | None:
    jinja_file = directory / "chat_template.jinja"
    if jinja_file.is_file():
        return jinja_file.read_text(encoding="utf-8")
    json_file = directory / "chat_template.json"
    listed = (_read_json(json_file) if json_file.is_file() else config).get("chat_template")
    if isinstance(listed, list):
        named = {entry["name"]: entry["template"] for entry in listed}
        listed = named.get("default")
    return listed if isinstance(listed, str) and listed else None


def _read_template_file(name: str) -> str:
    try:
        return Path(name).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--chat-template {name}: cannot be read ({error})") from error


def _token_text(entry: object) -> str | None:
    if isinstance(entry, dict):
        entry = entry.get("content")
    return entry if isinstance(entry, str) else None


def _read_json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ModelLoadError(f"{file}: cannot be read as JSON ({error})") from error
    if not isinstance(content, dict):
        raise ModelLoadError(f"{file}: not a JSON object")
    return content
