"""What to ask: prompts and output lengths, the same for the same seed."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pagewire.errors import ConfigError

if TYPE_CHECKING:
    import random
    from pathlib import Path

_LOWEST_ID = 100
"""Vocabularies begin with their special tokens."""
_WORDS = """
the of and to in that it is was for on are as with his they at be this from have or by one
had not but what all were when we there can an your which their said if do will each about
how up out them then she many some so these would other into has more her two like him see
time could no make than first been its who now people my made over did down only way find
use may water long little very after words called just where most know river mountain light
"""


@dataclass(frozen=True, slots=True)
class Ask:
    """One request: `text` or `ids`, not both."""

    max_tokens: int
    ids: tuple[int, ...] = ()
    text: str | None = None


@dataclass(frozen=True, slots=True)
class Lengths:
    """Drawn evenly from low to high, both included."""

    low: int
    high: int

    @classmethod
    def parse(cls, text: str) -> Lengths:
        """N or LOW:HIGH. Raises ValueError."""
        match = re.fullmatch(r"(\d+)(?::(\d+))?", text)
        if match is None:
            raise ValueError(f"must be N or LOW:HIGH, got {text!r}")
        low = int(match[1])
        high = int(match[2] or low)
        if not 1 <= low <= high:
            raise ValueError(f"must be from 1, and LOW not above HIGH, got {text!r}")
        return cls(low, high)

    def draw(self, rng: random.Random) -> int:
        return rng.randint(self.low, self.high)

    def __str__(self) -> str:
        return str(self.low) if self.low == self.high else f"{self.low}:{self.high}"


def random_ids(
    count: int, prompt: Lengths, output: Lengths, vocab_size: int, rng: random.Random
) -> list[Ask]:
    """Prompts of independent token ids: no two have a prefix in common."""
    return [
        Ask(output.draw(rng), _draw_ids(prompt.draw(rng), vocab_size, rng)) for _ in range(count)
    ]


def random_text(count: int, words: Lengths, output: Lengths, rng: random.Random) -> list[Ask]:
    """Prompts of common words; `words` counts these, not tokens."""
    return [
        Ask(output.draw(rng), text=" ".join(rng.choices(_WORDS.split(), k=words.draw(rng))))
        for _ in range(count)
    ]


def shared_prefix(
    count: int,
    prefix_len: int,
    num_prefixes: int,
    suffix: Lengths,
    output: Lengths,
    vocab_size: int,
    rng: random.Random,
) -> list[Ask]:
    """Prompts of token ids that begin with one of num_prefixes prefixes, in turn."""
    prefixes = [_draw_ids(prefix_len, vocab_size, rng) for _ in range(num_prefixes)]
    return [
        Ask(
            output.draw(rng),
            prefixes[index % num_prefixes] + _draw_ids(suffix.draw(rng), vocab_size, rng),
        )
        for index in range(count)
    ]


def other_prompts(ask: Ask, turn: int, vocab_size: int) -> Ask:
    """The same request in the `turn`-th run of a workload, 0 the first: as long, with its
    beginnings in common with the same others, but of other tokens or words, so that no earlier
    run has left it in a prefix cache. For random_ids(), random_text() and shared_prefix()."""
    if ask.text is not None:
        words = _WORDS.split()
        after = {word: words[(place + turn) % len(words)] for place, word in enumerate(words)}
        return Ask(ask.max_tokens, text=" ".join(after[word] for word in ask.text.split()))
    low = _lowest_id(vocab_size)
    span = vocab_size - low
    ids = tuple(low + (token_id - low + turn) % span for token_id in ask.ids)
    return Ask(ask.max_tokens, ids)


def from_file(path: Path, count: int, output: Lengths) -> list[Ask]:
    """The first `count` lines of a JSONL file, from the top again where it has fewer.

    A line is {"prompt": text or [ids], "max_tokens": N}; without max_tokens it is
    output.high. Raises ConfigError naming the line.
    """
    try:
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--file {path}: {error}") from None
    asks = [
        _parse(line, f"--file {path}, line {number}", output.high)
        for number, line in enumerate(lines, 1)
        if line.strip()
    ]
    if not asks:
        raise ConfigError(f"--file {path}: holds no prompt")
    return [asks[index % len(asks)] for index in range(count)]


def _parse(line: str, where: str, default_max_tokens: int) -> Ask:
    try:
        entry: Any = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{where}: not JSON: {error}") from None
    if not isinstance(entry, dict):
        raise ConfigError(f"{where}: must be an object")
    prompt, max_tokens = entry.get("prompt"), entry.get("max_tokens", default_max_tokens)
    if type(max_tokens) is not int or max_tokens < 1:
        raise ConfigError(f"{where}: max_tokens must be an integer above 0")
    if isinstance(prompt, str) and prompt:
        return Ask(max_tokens, text=prompt)
    if isinstance(prompt, list) and prompt and all(type(item) is int for item in prompt):
        return Ask(max_tokens, ids=tuple(prompt))
    raise ConfigError(f"{where}: prompt must be a text or a list of token ids, not empty")


def _draw_ids(count: int, vocab_size: int, rng: random.Random) -> tuple[int, ...]:
    low = _lowest_id(vocab_size)
    return tuple(rng.randrange(low, vocab_size) for _ in range(count))


def _lowest_id(vocab_size: int) -> int:
    return min(_LOWEST_ID, vocab_size // 2)
