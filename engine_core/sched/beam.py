"""Beam search: which sequences go on, which are complete, and when it is over.

The rule is that of transformers' generate(num_beams=width, do_sample=False), told in
terms of hypotheses instead of padded tensors:

    every running hypothesis x its likeliest tokens -> candidates, best sum first
    of the best `width`, those that end here        -> compete for the `width` complete ones
    the best `width` of those that go on            -> the next running ones

Sums of log probabilities compare the running ones, scores (sum / length **
length_penalty) the complete ones. Besides end of sequence and stop tokens, a stop
string in the output's bytes ends a candidate.
"""

from __future__ import annotations

from heapq import merge
from typing import TYPE_CHECKING

from pagewire.types import FinishReason
from pagewire.wire.codec import pack_ids
from pagewire.wire.messages import Beam, PositionLogprobs

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pagewire.types import BeamParams


class Hypothesis:
    """A sequence, as its last token and the hypothesis before it; the root has no token."""

    __slots__ = ("before", "length", "position", "sum_logprob", "tail", "token_id")

    def __init__(
        self,
        before: Hypothesis | None,
        token_id: int,
        sum_logprob: float,
        tail: bytes,
        position: PositionLogprobs | None,
    ) -> None:
        self.before = before
        self.token_id = token_id
        self.sum_logprob = sum_logprob
        self.length: int = 0 if before is None else before.length + 1
        """Output tokens."""
        self.tail = tail
        """The last bytes of the output, in which a stop string may have begun."""
        self.position = position
        """What is to be reported of the token, if that was asked for."""

    def path(self) -> list[Hypothesis]:
        """From the first token to the last. O(length)."""
        path = []
        at = self
        while at.before is not None:
            path.append(at)
            at = at.before
        return path[::-1]


class _Complete:
    __slots__ = ("hypothesis", "reason", "score", "stop_token_id")

    def __init__(
        self, hypothesis: Hypothesis, score: float, reason: FinishReason, stop_token_id: int | None
    ) -> None:
        self.hypothesis = hypothesis
        self.score = score
        self.reason = reason
        self.stop_token_id = stop_token_id


class BeamSearch:
    """One search, from its prompt to its beams. Knows tokens and sums, not rows or blocks."""

    def __init__(
        self,
        params: BeamParams,
        *,
        max_tokens: int,
        stop_ids: frozenset[int],
        vocab_size: int,
        logprobs: int | None = None,
        token_bytes: Sequence[bytes] = (),
    ) -> None:
        """stop_ids: end of sequence among them. logprobs: how many likeliest tokens to
        report beside each of a beam's; None reports nothing. token_bytes: by id, only read
        if there are stop strings."""
        self.width = params.width
        # Each row must have enough candidates for itself: `width` that end by their id
        # leave as many behind. The rest are for those that a stop string ends.
        self.num_candidates = min(vocab_size, 2 * params.width + len(stop_ids))
        """Likeliest tokens that advance() needs of each running hypothesis."""
        self.running = [Hypothesis(None, -1, 0.0, b"", None)]
        self.done = False
        self._params = params
        # Of one beam, transformers makes a greedy search, which ends with its first end.
        self._early_stopping = "true" if params.width == 1 else params.early_stopping
        self._max_tokens = max_tokens
        self._stop_ids = stop_ids
        self._stops = tuple(stop.encode() for stop in params.stop)
        self._tail_bytes = max(map(len, self._stops), default=1) - 1
        self._token_bytes = token_bytes
        self._logprobs = logprobs
        self._complete: list[_Complete] = []
        """The best `width` so far, best first."""

    def advance(self, drawn: Sequence[PositionLogprobs]) -> list[tuple[int, int]]:
        """drawn: for each of `running`, its num_candidates likeliest next tokens.

        Returns the new `running` as (index of the one before, token id), best first; none
        when the search is done.
        """
        candidates = merge(
            *(
                _best_first(before, index, position.top_logprobs[: self.num_candidates])
                for index, (before, position) in enumerate(zip(self.running, drawn, strict=True))
            )
        )
        going_on: list[tuple[int, Hypothesis]] = []
        for number, (negative_sum, index, place) in enumerate(candidates):
            if number >= self.width and len(going_on) == self.width:
                break
            hypothesis = self._extend(self.running[index], drawn[index], place, -negative_sum)
            reason = self._ends(hypothesis)
            if reason is not None and number < self.width:
                self._add_complete(hypothesis, reason)
            elif reason is None and len(going_on) < self.width:
                going_on.append((index, hypothesis))
        del self._complete[self.width :]
        self.running = [hypothesis for _, hypothesis in going_on]
        self.done = not self._goes_on()
        return [] if self.done else [(index, it.token_id) for index, it in going_on]

    def beams(self) -> tuple[Beam, ...]:
        """The num_return best, best first, once it is done."""
        assert self.done
        return tuple(map(_as_beam, self._complete[: self._params.num_return]))

    @property
    def num_output_tokens(self) -> int:
        """Of beams()."""
        return sum(it.hypothesis.length for it in self._complete[: self._params.num_return])

    @property
    def finish_reason(self) -> FinishReason:
        """LENGTH if it cut any of beams()."""
        cut = [it.reason is FinishReason.LENGTH for it in self._complete[: self._params.num_return]]
        return FinishReason.LENGTH if any(cut) else FinishReason.STOP

    def _extend(
        self, before: Hypothesis, position: PositionLogprobs, place: int, sum_logprob: float
    ) -> Hypothesis:
        token_id = position.top_ids[place]
        tail = b""
        if self._stops:
            tail = before.tail[-self._tail_bytes :] if self._tail_bytes else b""
            tail += self._token_bytes[token_id]
        reported = None
        if self._logprobs is not None:
            reported = _reported(position, place, self._logprobs)
        return Hypothesis(before, token_id, sum_logprob, tail, reported)

    def _ends(self, hypothesis: Hypothesis) -> FinishReason | None:
        if hypothesis.token_id in self._stop_ids:
            return FinishReason.STOP
        if any(stop in hypothesis.tail for stop in self._stops):
            return FinishReason.STOP
        return FinishReason.LENGTH if hypothesis.length >= self._max_tokens else None

    def _add_complete(self, hypothesis: Hypothesis, reason: FinishReason) -> None:
        score = self._score(hypothesis.sum_logprob, hypothesis.length)
        stop_token_id = hypothesis.token_id if hypothesis.token_id in self._stop_ids else None
        self._complete.append(_Complete(hypothesis, score, reason, stop_token_id))
        # Stable: of equal scores the earlier stays first.
        self._complete.sort(key=lambda it: -it.score)

    def _goes_on(self) -> bool:
        if not self.running:
            return False
        if len(self._complete) < self.width:
            return True
        if self._early_stopping == "true":
            return False
        best = self.running[0]
        # A positive penalty favours the long, so the best that can come is the longest.
        never = self._early_stopping == "never" and self._params.length_penalty > 0
        length = self._max_tokens if never else best.length
        return self._score(best.sum_logprob, length) > self._complete[-1].score

    def _score(self, sum_logprob: float, length: int) -> float:
        return float(sum_logprob / length**self._params.length_penalty)


def _best_first(
    before: Hypothesis, index: int, logprobs: Sequence[float]
) -> Iterator[tuple[float, int, int]]:
    """(minus the sum, index, place) of each; of equal sums the earlier comes first."""
    for place, logprob in enumerate(logprobs):
        yield -(before.sum_logprob + logprob), index, place


def _reported(position: PositionLogprobs, place: int, count: int) -> PositionLogprobs:
    """What a request is told of a candidate as its token."""
    logprob = position.top_logprobs[place]
    return PositionLogprobs(
        position.top_ids[place],
        logprob,
        # Equally likely tokens share a rank.
        1 + position.top_logprobs.index(logprob),
        position.top_ids[:count],
        position.top_logprobs[:count],
    )


def _as_beam(complete: _Complete) -> Beam:
    path = complete.hypothesis.path()
    return Beam(
        token_ids=pack_ids(it.token_id for it in path),
        score=complete.score,
        reason=int(complete.reason),
        stop_token_id=complete.stop_token_id,
        logprobs=tuple(it.position for it in path if it.position is not None),
    )
