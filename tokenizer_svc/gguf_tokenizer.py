"""A tokenizers.Tokenizer from the tokenizer.ggml.* keys of a GGUF file.

Two kinds are built: "gpt2", byte-level BPE, whose pre-tokenizer is named by
tokenizer.ggml.pre; and "llama", SentencePiece-style BPE with byte fallback. The
split patterns are the model families' own, as llama.cpp (src/llama-vocab.cpp) and
the models' tokenizer.json give them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar, cast

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from pagewire.errors import ModelLoadError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from pagewire.gguf_file import Value

T = TypeVar("T", str, int, float)

GGUF_TOKENIZER_PREFIX = "tokenizer."

_TYPE_UNKNOWN, _TYPE_CONTROL, _TYPE_USER_DEFINED = 2, 3, 4
_SPECIAL_ROLES = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
    "sep_token": "seperator_token_id",
    "mask_token": "mask_token_id",
}
"""Name in a chat template -> GGUF key (the misspelling is GGUF's own)."""

_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_SPLIT = _LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")
_TEKKEN_SPLIT = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_GPT4O_SPLIT = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """How a family of byte-level vocabularies cuts text before the merges."""

    split: str | None = None
    """None is the pattern of GPT-2."""
    single_digits: bool = False
    """Every digit stands alone, before anything else is split."""
    ignore_merges: bool = False
    """A piece that is a token as a whole is not built up from merges."""
    nfc: bool = False
    add_bos: bool = False
    """What the family does where the file does not say."""


_GPT2 = PreTokenizer()
_SINGLE_DIGITS = PreTokenizer(single_digits=True)
_LLAMA3 = PreTokenizer(_LLAMA3_SPLIT, ignore_merges=True, add_bos=True)
_QWEN2 = PreTokenizer(_QWEN2_SPLIT)
_TEKKEN = PreTokenizer(_TEKKEN_SPLIT, ignore_merges=True, add_bos=True)
_GPT4O = PreTokenizer(_GPT4O_SPLIT)

PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    "default": _GPT2,
    "gpt-2": _GPT2,
    "gpt2": _GPT2,
    "phi-2": _GPT2,
    "gigachat": _GPT2,
    "smollm": _SINGLE_DIGITS,
    "starcoder": _SINGLE_DIGITS,
    "refact": _SINGLE_DIGITS,
    "codeshell": _SINGLE_DIGITS,
    "command-r": _SINGLE_DIGITS,
    "minerva-7b": _SINGLE_DIGITS,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama-bpe": _LLAMA3,
    "falcon3": _LLAMA3,
    "pixtral": _LLAMA3,
    "tekken": _TEKKEN,
    "qwen2": PreTokenizer(_QWEN2_SPLIT, nfc=True),
    "deepseek-r1-qwen": _QWEN2,
    "gpt-4o": _GPT4O,
    "llama4": _GPT4O,
}
"""By the value of tokenizer.ggml.pre; a file without one is taken as "default"."""


@dataclass(frozen=True, slots=True)
class GgufTokenizer:
    tokenizer: Tokenizer
    special_tokens: dict[str, str]
    """bos_token and so on -> its text, as chat templates name them."""
    chat_template: str | None


def build_gguf_tokenizer(metadata: Mapping[str, Value], path: Path) -> GgufTokenizer:
    """Builds the tokenizer that the metadata describes; `path` is for messages.

    Control tokens become special added tokens and user-defined ones plain added
    tokens, so that both are matched whole in a text. Raises ModelLoadError for a
    kind or a pre-tokenizer that is not known, and for arrays that do not fit.
    """
    fields = _Fields(metadata, path)
    kind = fields.text("ggml.model")
    if kind == "gpt2":
        tokenizer, add_bos = _byte_level(fields)
    elif kind == "llama":
        tokenizer, add_bos = _sentencepiece(fields), True
    else:
        raise ModelLoadError(
            f"{path}: tokenizer.ggml.model is {kind!r}; this server knows 'gpt2' and 'llama'"
        )
    special_tokens = fields.special_tokens()
    _add_tokens(tokenizer, fields, set(special_tokens.values()))
    bos = special_tokens.get("bos_token") if fields.flag("ggml.add_bos_token", add_bos) else None
    eos = special_tokens.get("eos_token") if fields.flag("ggml.add_eos_token", False) else None
    _surround(tokenizer, bos=bos, eos=eos)
    template = metadata.get("tokenizer.chat_template")
    return GgufTokenizer(
        tokenizer, special_tokens, template if isinstance(template, str) and template else None
    )


def _surround(tokenizer: Tokenizer, *, bos: str | None, eos: str | None) -> None:
    """Makes encode(add_special_tokens=True) put `bos` in front and `eos` behind."""
    ends = [(token, tokenizer.token_to_id(token)) for token in (bos, eos) if token is not None]
    single = [token for token in (bos, "$A", eos) if token is not None]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=single, pair=[*single, "$B:1"], special_tokens=ends
    )


def _byte_level(fields: _Fields) -> tuple[Tokenizer, bool]:
    name = fields.text("ggml.pre", "default")
    pre = PRE_TOKENIZERS.get(name)
    if pre is None:
        known = ", ".join(sorted(PRE_TOKENIZERS))
        raise ModelLoadError(
            f"{fields.path}: tokenizer.ggml.pre is {name!r}, a pre-tokenizer this server does not "
            f"know; known: {known}"
        )
    vocab = fields.vocab()
    model = models.BPE(vocab=vocab, merges=fields.merges(vocab), ignore_merges=pre.ignore_merges)
    tokenizer = Tokenizer(model)
    stages: list[pre_tokenizers.PreTokenizer] = []
    if pre.single_digits:
        stages.append(pre_tokenizers.Digits(individual_digits=True))
    if pre.split is not None:
        stages.append(pre_tokenizers.Split(Regex(pre.split), behavior="isolated"))
    stages.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pre.split is None))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(stages)
    if pre.nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, pre.add_bos


def _sentencepiece(fields: _Fields) -> Tokenizer:
    vocab = fields.vocab()
    merges = fields.merges(vocab) if fields.has("ggml.merges") else _derive_merges(vocab, fields)
    unknown = fields.special_tokens().get("unk_token")
    tokenizer = Tokenizer(
        models.BPE(vocab=vocab, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    )
    # A normalizer works on each stretch between special tokens, as llama.cpp's prefix does.
    spaces = normalizers.Replace(" ", "▁")
    add_space = fields.flag("ggml.add_space_prefix", True)
    tokenizer.normalizer = (
        normalizers.Sequence([normalizers.Prepend("▁"), spaces]) if add_space else spaces
    )
    steps: list[decoders.Decoder] = [
        decoders.Replace("▁", " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
    ]
    if add_space:
        steps.append(decoders.Strip(content=" ", left=1, right=0))
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def _derive_merges(vocab: Mapping[str, int], fields: _Fields) -> list[tuple[str, str]]:
    """SentencePiece stores scores in place of merges: of all adjacent pairs that join
    into a token, the one whose token scores best is joined first."""
    scores = fields.array("ggml.scores", float, len(vocab))
    ranked: list[tuple[float, int, int, str, str]] = []
    for token, index in vocab.items():
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in vocab and right in vocab:
                ranked.append((-scores[index], len(left), len(right), left, right))
    ranked.sort(key=lambda entry: entry[:3])
    return [(left, right) for *_, left, right in ranked]


def _add_tokens(tokenizer: Tokenizer, fields: _Fields, named: set[str]) -> None:
    tokens = fields.tokens()
    types = (
        fields.array("ggml.token_type", int, len(tokens))
        if fields.has("ggml.token_type")
        else [0] * len(tokens)
    )
    special, plain = [], []
    for token, kind in zip(tokens, types, strict=True):
        if kind in (_TYPE_CONTROL, _TYPE_UNKNOWN) or token in named:
            special.append(AddedToken(token, normalized=False, special=True))
        elif kind == _TYPE_USER_DEFINED:
            plain.append(AddedToken(token, normalized=False, special=False))
    tokenizer.add_special_tokens(special)
    tokenizer.add_tokens(plain)


class _Fields:
    """Typed access to the keys below tokenizer.; errors name the file and the key."""

    def __init__(self, metadata: Mapping[str, Value], path: Path) -> None:
        self._metadata = metadata
        self.path = path

    def has(self, key: str) -> bool:
        return f"tokenizer.{key}" in self._metadata

    def text(self, key: str, default: str | None = None) -> str:
        value = self._metadata.get(f"tokenizer.{key}", default)
        if not isinstance(value, str):
            raise self._error(key, "is missing" if value is None else "is not a string")
        return value

    def flag(self, key: str, default: bool) -> bool:
        return bool(self._metadata.get(f"tokenizer.{key}", default))

    def array(self, key: str, kind: type[T], count: int | None = None) -> list[T]:
        value = self._metadata.get(f"tokenizer.{key}")
        if not isinstance(value, list) or not value or not isinstance(value[0], kind):
            raise self._error(key, f"is missing or not an array of {kind.__name__}")
        if count is not None and len(value) != count:
            raise self._error(key, f"has {len(value)} entries for {count} tokens")
        return cast("list[T]", value)

    def tokens(self) -> list[str]:
        return self.array("ggml.tokens", str)

    def vocab(self) -> dict[str, int]:
        tokens = self.tokens()
        vocab = {token: index for index, token in enumerate(tokens)}
        if len(vocab) != len(tokens):
            raise self._error("ggml.tokens", "holds the same token twice")
        return vocab

    def merges(self, vocab: Mapping[str, int]) -> list[tuple[str, str]]:
        merges: list[tuple[str, str]] = []
        for index, merge in enumerate(self.array("ggml.merges", str)):
            left, _, right = merge.partition(" ")
            # The library panics on a merge that is not of tokens into a token.
            if left not in vocab or right not in vocab or left + right not in vocab:
                raise self._error("ggml.merges", f"entry {index} does not make a token of two")
            merges.append((left, right))
        return merges

    def special_tokens(self) -> dict[str, str]:
        tokens: Sequence[str] = self.tokens()
        found: dict[str, str] = {}
        for role, key in _SPECIAL_ROLES.items():
            index = self._metadata.get(f"tokenizer.ggml.{key}")
            if index is None:
                continue
            if not isinstance(index, int) or not 0 <= index < len(tokens):
                raise self._error(f"ggml.{key}", f"is {index!r}, outside the vocabulary")
            found[role] = tokens[index]
        return found

    def _error(self, key: str, problem: str) -> ModelLoadError:
        return ModelLoadError(f"{self.path}: tokenizer.{key} {problem}")
