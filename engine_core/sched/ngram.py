"""Draft tokens from the sequence itself: what followed its last words the time before.

Prompt lookup decoding (Saxena, 2023, https://github.com/apoorvumang/prompt-lookup-decoding);
vLLM's method "ngram". The index is the chain of a Lempel-Ziv compressor, and grows with
the sequence.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from array import array
    from collections.abc import Sequence

_MOST_TRIED = 8
"""Earlier places that are compared, the latest first."""


class NgramIndex:
    """Where the short n-grams of one sequence stand.

    place p: the n-gram that ends right before id p, so that id p follows it.

        0            previous(p)          p = num_indexed        num_tokens
        |  .. a b | c d  ..          a b | c    | to be indexed    |
    """

    __slots__ = ("_last", "_min_size", "_previous", "num_indexed")

    def __init__(self, min_size: int) -> None:
        """min_size: ids of an n-gram."""
        self._min_size = min_size
        self._last: dict[bytes, int] = {}
        self._previous: list[int] = []
        """[place - min_size]: the place before it with the same n-gram, or -1."""
        self.num_indexed = min_size - 1
        """The last place that is indexed."""

    def extend(self, token_ids: array[int], most: int) -> int:
        """Indexes the places that have an id, at most so many; returns how many it was."""
        begin = self.num_indexed + 1
        end = min(len(token_ids), begin + most)
        last, previous, size = self._last, self._previous, self._min_size
        for place in range(begin, end):
            key = token_ids[place - size : place].tobytes()
            previous.append(last.get(key, -1))
            last[key] = place
        self.num_indexed = max(self.num_indexed, end - 1)
        return max(0, end - begin)

    def find(self, token_ids: array[int], max_size: int) -> int:
        """The place whose ids before it are most like the sequence's last, up to max_size
        of them; of several the latest. -1 if not even min_size are."""
        num_tokens, size = len(token_ids), self._min_size
        if num_tokens < size:
            return -1
        place = self._last.get(token_ids[num_tokens - size :].tobytes(), -1)
        best, longest = -1, 0
        for _ in range(_MOST_TRIED):
            if place < 0:
                break
            length = size
            while (
                length < max_size
                and length < place
                and token_ids[place - length - 1] == token_ids[num_tokens - length - 1]
            ):
                length += 1
            if length > longest:
                best, longest = place, length
                if length == max_size:
                    break
            place = self._previous[place - size]
        return best


def follow(token_ids: array[int], place: int, most: int) -> Sequence[int]:
    """The ids from a place on, and round and round if the sequence ends before there are
    `most`: as if what is repeated now had been repeated before."""
    known = token_ids[place : place + most]
    if len(known) == most:
        return known
    period = len(known)
    return [known[index % period] for index in range(most)]
