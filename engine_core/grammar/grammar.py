"""What is compiled once and followed by every sequence that asked for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from llguidance import LLMatcher


class BadConstraint(Exception):
    """A constraint that does not compile, or that nothing satisfies. The message is
    the library's, on one line."""


class Grammar:
    """A compiled constraint. Immutable, so that threads and sequences share it."""

    __slots__ = ("_prototype", "mask_words")

    def __init__(self, prototype: LLMatcher, vocab_size: int) -> None:
        """prototype: has consumed nothing and is never given anything."""
        self._prototype = prototype
        self.mask_words = -(-vocab_size // 32)
        """Of 32 bits, in a mask with one bit a token."""

    def start(self) -> Follower:
        return Follower(self._prototype.deep_copy())


class Follower:
    """Where one sequence stands in its grammar: a function of the ids it was given."""

    __slots__ = ("_matcher",)

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher

    def consume(self, token_ids: Sequence[int]) -> None:
        """Output ids, in order. After one that the grammar has no place for, error
        says so."""
        self._matcher.consume_tokens(list(token_ids))

    def try_consume(self, token_id: int) -> bool:
        """Consumes an id if the grammar has a place for it; says so."""
        return self._matcher.try_consume_tokens([token_id]) == 1

    def take_back(self, num_tokens: int) -> None:
        """As if the last num_tokens had not been consumed."""
        self._matcher.rollback(num_tokens)

    def fill_mask(self, mask: np.ndarray) -> None:
        """Sets bit i % 32 of word i // 32 where token i may come next; mask is int32
        [mask_words] and contiguous. Nothing may where there is an error.

        The end-of-sequence tokens may come where the text so far is a whole one.
        """
        matcher = self._matcher
        matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        if matcher.is_error():
            mask[:] = 0

    @property
    def error(self) -> str:
        """Why nothing may come next; empty where all is well."""
        return str(self._matcher.get_error())
