"""The bytes of each token, read from the model's own files for what constrains or ends text.

The engine works with ids; what constrains text has to know what they stand for.
Nothing here tokenizes or decodes a request.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pagewire.errors import ModelLoadError
from pagewire.gguf_file import GgufFile
from pagewire.token_bytes import TokenSpelling, find_spelling

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from pagewire.model_source import ModelSource

_GGUF_UNKNOWN, _GGUF_CONTROL = 2, 3
_GGUF_SPELLINGS = {"gpt2": TokenSpelling(byte_level=True), "llama": TokenSpelling(byte_level=False)}
"""By tokenizer.ggml.model."""
_GGUF_ROLES = ("bos", "eos", "unknown", "padding", "seperator", "mask")
"""In tokenizer.ggml.<role>_token_id (the misspelling is GGUF's own)."""


@dataclass(frozen=True, slots=True)
class Vocabulary:
    tokens: tuple[bytes, ...]
    """One for each of the model's ids; b"" for an id that no token has."""
    special_ids: frozenset[int]
    """Tokens that are signs to the model and no text."""

    def text_bytes(self) -> tuple[bytes, ...]:
        """What each id adds to a text: its bytes, or nothing for a sign."""
        special = self.special_ids
        return tuple(b"" if at in special else token for at, token in enumerate(self.tokens))


def read_vocabulary(source: ModelSource, vocab_size: int) -> Vocabulary:
    """vocab_size: of the model, which may have more ids than the tokenizer.

    Raises ModelLoadError for files that are missing or damaged, or whose tokens do
    not stand for fixed bytes.
    """
    table, special = _read_gguf(source.path) if source.kind == "gguf" else _read_hf(source.path)
    # A tokenizer may know tokens that the model has no logits for.
    tokens = tuple(table.get(index, b"") for index in range(vocab_size))
    return Vocabulary(tokens, frozenset(index for index in special if index < vocab_size))


def _read_gguf(path: Path) -> tuple[dict[int, bytes], set[int]]:
    file = GgufFile(path)
    kind = file.metadata.get("tokenizer.ggml.model")
    spelling = _GGUF_SPELLINGS.get(kind) if isinstance(kind, str) else None
    if spelling is None:
        raise ModelLoadError(f"{path}: tokenizer.ggml.model {kind!r} is not known to grammars")
    tokens = file.read_array("tokenizer.ggml.tokens")
    special = {file.metadata.get(f"tokenizer.ggml.{role}_token_id") for role in _GGUF_ROLES}
    if "tokenizer.ggml.token_type" in file.metadata:
        types = file.read_array("tokenizer.ggml.token_type")
        special.update(at for at, of in enumerate(types) if of in (_GGUF_UNKNOWN, _GGUF_CONTROL))
    table = spelling.read({str(token): index for index, token in enumerate(tokens)})
    return table, {index for index in special if isinstance(index, int)}


def _read_hf(directory: Path) -> tuple[dict[int, bytes], set[int]]:
    file = directory / "tokenizer.json"
    described = _read_json(file)
    try:
        spelling = find_spelling(described["decoder"])
        if spelling is None:
            raise ModelLoadError(f"{file}: its decoder is not known to grammars")
        vocab: dict[str, int] = dict(described["model"]["vocab"])
        added = _added_tokens(described, directory)
        vocab |= {token: index for index, (token, _) in added.items()}
        return spelling.read(vocab), {index for index, (_, special) in added.items() if special}
    except (KeyError, TypeError, ValueError) as error:
        raise ModelLoadError(f"{file}: its vocabulary is not known to grammars") from error


def _added_tokens(described: Mapping[str, Any], directory: Path) -> dict[int, tuple[str, bool]]:
    """Id -> (text, whether it is special); tokenizer_config.json may list more of them."""
    config = directory / "tokenizer_config.json"
    listed = _read_json(config).get("added_tokens_decoder") if config.is_file() else None
    added = {
        int(index): (str(entry["content"]), bool(entry.get("special", False)))
        for index, entry in (listed or {}).items()
    }
    for entry in described.get("added_tokens") or ():
        added[int(entry["id"])] = (str(entry["content"]), bool(entry.get("special", False)))
    return added


def _read_json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{file}: cannot be read as JSON ({error})") from error
    if not isinstance(content, dict):
        raise ModelLoadError(f"{file}: not a JSON object")
    return content
