"""How well a sequence can be guessed at."""

from __future__ import annotations

_FADES = 0.85
"""What a past draft token counts after each one more."""
_FADES_UNTRIED = 0.98
"""And after each step without, so that a sequence which was hard to guess is tried again."""
_PRIOR_RATE = 0.5
_PRIOR_WEIGHT = 0.5


class Acceptance:
    """How likely the next guess at a sequence is right, if those before it were."""

    __slots__ = ("_right", "_tried")

    def __init__(self) -> None:
        self._right = _PRIOR_RATE * _PRIOR_WEIGHT
        self._tried = _PRIOR_WEIGHT

    @property
    def rate(self) -> float:
        return self._right / self._tried

    def observe(self, num_drafts: int, num_accepted: int) -> None:
        """num_accepted leading ones of num_drafts were right."""
        # Nothing is known of those after the first that was wrong.
        num_tried = min(num_drafts, num_accepted + 1)
        self._fade(_FADES**num_tried)
        self._right += num_accepted
        self._tried += num_tried

    def not_tried(self) -> None:
        self._fade(_FADES_UNTRIED)

    def _fade(self, factor: float) -> None:
        self._right = factor * self._right + (1 - factor) * _PRIOR_RATE * _PRIOR_WEIGHT
        self._tried = factor * self._tried + (1 - factor) * _PRIOR_WEIGHT
