"""From a constraint's text to a Grammar, by llguidance.

https://github.com/guidance-ai/llguidance: an Earley parser over a lexer of regular
expression derivatives, which walks the vocabulary as a trie.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Final

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from engine_core.grammar.grammar import BadConstraint, Grammar
from pagewire.errors import ModelLoadError
from pagewire.types import MAX_JSON_WHITESPACE

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from llguidance._lib import JsonCompileOptions

    from engine_core.grammar.vocabulary import Vocabulary
    from pagewire.types import StructuredOutput

_SPECIAL_MARK = b"\xff"
"""llguidance's sign of a token that no text matches."""
_MAX_ERROR_CHARS = 500

_JSON_OPTIONS: Final[JsonCompileOptions] = {
    "whitespace_flexible": True,
    "whitespace_pattern": rf"[\x20\x0A\x0D\x09]{{1,{MAX_JSON_WHITESPACE}}}",
    "item_separator": ",",
    "key_separator": ":",
}
"""They win over a schema's own x-guidance, so that the bound holds for all."""


class GrammarCompiler:
    """Compiles; not for the engine's loop, and for one thread at a time.

    The vocabulary is read with the first constraint, since few models ever see one.
    """

    def __init__(
        self, read_vocabulary: Callable[[], Vocabulary], eos_token_ids: Sequence[int]
    ) -> None:
        """eos_token_ids: not empty; what ends a text that satisfies its grammar."""
        self._read_vocabulary = read_vocabulary
        self._eos_token_ids = list(eos_token_ids)
        self._tokenizer: LLTokenizer | None = None

    def compile(self, wanted: StructuredOutput) -> Grammar:
        """Raises BadConstraint."""
        if self._tokenizer is None:
            self._tokenizer = self._make_tokenizer()
        tokenizer = self._tokenizer
        try:
            source = _grammar_source(wanted)
        except ValueError as error:
            raise BadConstraint(_one_line(str(error))) from error
        prototype = LLMatcher(tokenizer, source, log_level=0, limits=_limits())
        if prototype.is_error():
            raise BadConstraint(_one_line(prototype.get_error()))
        grammar = Grammar(prototype, tokenizer.vocab_size)
        # The first mask finds out what has no text at all, and does the largest part of
        # the lexer's work here and not in a step.
        mask = np.zeros(grammar.mask_words, np.int32)
        # Twice, because what the first one leaves in the shared lexer may be too much.
        for _ in range(2):
            follower = grammar.start()
            follower.fill_mask(mask)
            if follower.error:
                raise BadConstraint(f"no text satisfies it ({_one_line(follower.error)})")
        return grammar

    def _make_tokenizer(self) -> LLTokenizer:
        try:
            vocabulary = self._read_vocabulary()
        except ModelLoadError as error:
            raise BadConstraint(f"this model cannot be constrained: {error}") from error
        table = _TokenTable(vocabulary, self._eos_token_ids[0])
        tokenizer = LLTokenizer(table, eos_token=self._eos_token_ids)  # type: ignore[arg-type]
        table.tokenize = tokenizer.greedy_tokenize
        return tokenizer


class _TokenTable:
    """What LLTokenizer asks of a tokenizer (its TokenizerWrapper, which needs more)."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary, eos_token_id: int) -> None:
        special = vocabulary.special_ids
        self.eos_token_id = eos_token_id
        self.special_token_ids = sorted(special)
        self.tokens = [
            _SPECIAL_MARK + token if index in special else token
            for index, token in enumerate(vocabulary.tokens)
        ]
        self.tokenize: Callable[[str], list[int]] | None = None

    def __call__(self, text: str) -> list[int]:
        """Text that a grammar leaves no choice about, as ids: the longest token first."""
        assert self.tokenize is not None
        return self.tokenize(text)


def _grammar_source(wanted: StructuredOutput) -> str:
    """llguidance's own format. Raises ValueError for what is no JSON."""
    if wanted.kind == "json_schema":
        return str(LLMatcher.grammar_from_json_schema(wanted.text, overrides=_JSON_OPTIONS))
    if wanted.kind == "json_object":
        schema = '{"type": "object"}'
        return str(LLMatcher.grammar_from_json_schema(schema, overrides=_JSON_OPTIONS))
    if wanted.kind == "regex":
        return str(LLMatcher.grammar_from_regex(wanted.text))
    if wanted.kind == "grammar":
        return str(LLMatcher.grammar_from_lark(wanted.text))
    choices = json.loads(wanted.text)
    if not isinstance(choices, list) or not choices:
        raise ValueError("choice is not a list of texts, or an empty one")
    alternatives = " | ".join(json.dumps(str(choice)) for choice in choices)
    return str(LLMatcher.grammar_from_lark(f"start: {alternatives}"))


def _limits() -> LLParserLimits:
    """A compilation with its first mask takes seconds at most, a step's mask some
    hundredths of a second, whatever the text."""
    return LLParserLimits(
        initial_lexer_fuel=250_000,
        step_lexer_fuel=50_000,
        step_max_items=20_000,
        max_lexer_states=20_000,
        max_grammar_size=100_000,
        verbose_errors=False,
    )


def _one_line(message: str) -> str:
    line = " ".join(message.replace("<non-verbose/>", "").split())
    return line if len(line) <= _MAX_ERROR_CHARS else line[: _MAX_ERROR_CHARS - 3] + "..."
