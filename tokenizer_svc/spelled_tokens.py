"""Special tokens whose text is their own spelling, whatever a decoder would make of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from tokenizer_svc.detokenize import Decoder


class SpelledTokenDecoder:
    """Sets another decoder on again behind each of these tokens."""

    __slots__ = ("_anywhere", "_inner", "_last", "_spelled", "_start")

    def __init__(
        self,
        start: Callable[[Sequence[int]], Decoder],
        prompt_tail: Sequence[int],
        spelled: Mapping[int, str],
        *,
        anywhere: bool,
    ) -> None:
        """start: makes the other decoder, for a prompt's tail. anywhere: else only a token
        that follows on another one of them is spelled."""
        self._start = start
        self._inner = start(prompt_tail)
        self._last = prompt_tail[-1] if prompt_tail else -1
        self._spelled = spelled
        self._anywhere = anywhere

    def feed(self, ids: Sequence[int]) -> str:
        pieces = []
        for token_id in ids:
            text = self._spelled.get(token_id)
            if text is not None and (self._anywhere or self._last in self._spelled):
                pieces.append(self._inner.flush() + text)
                self._inner = self._start([token_id])
            else:
                pieces.append(self._inner.feed([token_id]))
            self._last = token_id
        return "".join(pieces)

    def flush(self) -> str:
        return self._inner.flush()
