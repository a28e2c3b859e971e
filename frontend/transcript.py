"""An outbox that remembers all it was given, so that another reader can go on anywhere.

A sequence is kept as the pieces that were put, and a client's position is a number of
tokens or of characters:

    pieces      |  p0  |  p1  |  p2  |
    num_tokens  0      1      2      2     p1 has a token and no text: half a character
    num_chars   0      3      3      5     p2 has text and no token: held back until the end

Frames are made of whole pieces, so a client that counts what it has stands between two
of them. Where its count fits several places the first is taken, so that nothing is lost:
what comes after the last token (text that was held back, tool calls, which have ids) may
come twice. Characters are refused where they leave it open which tokens there are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from frontend.stream import Outbox
from pagewire.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Sequence

    from frontend.request import Job, Received
    from frontend.stream import Delta, Finish, Queued
    from pagewire.errors import PagewireError
    from pagewire.tools import ToolCall
    from pagewire.wire.messages import PositionLogprobs


@dataclass(frozen=True, slots=True)
class _Piece:
    text: str
    token_ids: Sequence[int]
    logprobs: Sequence[PositionLogprobs]
    prompt_logprobs: Sequence[PositionLogprobs]
    tool_calls: Sequence[ToolCall]

    @property
    def num_tokens(self) -> int:
        """As far as the client is told them."""
        return max(len(self.token_ids), len(self.logprobs))


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a reader goes on: before that piece, after so many of its characters."""

    piece: int
    num_chars: int = 0


class Transcript(Outbox):
    __slots__ = ("_counts_tokens", "_eviction", "_n", "_pieces")

    def __init__(self, job: Job) -> None:
        super().__init__()
        self._n = job.n
        self._counts_tokens = job.return_token_ids or job.sampling.logprobs is not None
        self._pieces: dict[int, list[_Piece]] = {}
        """By index."""
        self._eviction: PagewireError | None = None
        """The last one: its identity tells a reader that it was meant."""

    def put(
        self,
        text: str,
        token_ids: Sequence[int] = (),
        logprobs: Sequence[PositionLogprobs] = (),
        prompt_logprobs: Sequence[PositionLogprobs] = (),
        index: int = 0,
        tool_calls: Sequence[ToolCall] = (),
    ) -> None:
        if text or token_ids or logprobs or prompt_logprobs or tool_calls:
            piece = _Piece(text, token_ids, logprobs, prompt_logprobs, tool_calls)
            self._pieces.setdefault(index, []).append(piece)
        super().put(text, token_ids, logprobs, prompt_logprobs, index, tool_calls)

    async def take(self) -> Queued | Delta | Finish:
        """As Outbox.take. Raises what evict() was given to a reader that waits."""
        eviction = self._eviction
        while not (self._queued or self._pending or self.ended):
            await self._wait()
            if self._eviction is not eviction:
                assert self._eviction is not None
                raise self._eviction
        return await super().take()

    def evict(self, error: PagewireError) -> None:
        """Whoever waits or is attached is to read no more."""
        self._eviction = error
        if self._reader is not None:
            reader, self._reader = self._reader, None
            reader.evicted(error)
            return
        self._wake()
        self._waiter = None

    def check(self, received: Sequence[Received]) -> None:
        """Raises InvalidRequest where a client cannot stand."""
        self._places(received)

    def rewind(self, received: Sequence[Received]) -> None:
        """What is taken from now on begins where that client stands."""
        places = self._places(received)
        self._pending.clear()
        self._prompt_logprobs = ()
        for index, pieces in self._pieces.items():
            place = places.get(index, _Place(0))
            for number, piece in enumerate(pieces[place.piece :]):
                super().put(
                    piece.text if number else piece.text[place.num_chars :],
                    piece.token_ids,
                    piece.logprobs,
                    piece.prompt_logprobs,
                    index,
                    piece.tool_calls,
                )

    def _places(self, received: Sequence[Received]) -> dict[int, _Place]:
        places: dict[int, _Place] = {}
        for number, sequence in enumerate(received):
            field = f"resume_from.sequences[{number}]"
            if not 0 <= sequence.index < self._n:
                raise InvalidRequest(
                    f"{field}.index", f"index is {sequence.index}, of {self._n} sequences"
                )
            if sequence.index in places:
                raise InvalidRequest(f"{field}.index", f"index {sequence.index} is there twice")
            pieces = self._pieces.get(sequence.index, [])
            if sequence.num_tokens is not None:
                place = self._after_tokens(pieces, sequence.num_tokens, f"{field}.num_tokens")
            elif sequence.num_chars is not None:
                place = self._after_chars(pieces, sequence.num_chars, f"{field}.num_chars")
            else:
                raise InvalidRequest(
                    f"{field}.received", "set one of num_tokens and num_chars, or leave it out"
                )
            places[sequence.index] = place
        return places

    def _after_tokens(self, pieces: list[_Piece], num_tokens: int, field: str) -> _Place:
        if not self._counts_tokens:
            raise InvalidRequest(
                field, "the request's deltas tell of no tokens; use num_chars for it"
            )
        total = number = 0
        while number < len(pieces) and total < num_tokens:
            total += pieces[number].num_tokens
            number += 1
        if total != num_tokens:
            raise _impossible(field, num_tokens, sum(piece.num_tokens for piece in pieces))
        return _Place(number)

    def _after_chars(self, pieces: list[_Piece], num_chars: int, field: str) -> _Place:
        if num_chars == 0:
            return _Place(0)
        total = number = 0
        while number < len(pieces) and total + len(pieces[number].text) <= num_chars:
            total += len(pieces[number].text)
            number += 1
            if total == num_chars:
                break
        rest = num_chars - total
        if num_chars < 0 or (rest and number == len(pieces)):
            raise _impossible(field, num_chars, sum(len(piece.text) for piece in pieces))
        silent = number < len(pieces) and not pieces[number].text and not rest
        if self._counts_tokens and (rest or silent):
            raise InvalidRequest(
                field, f"{num_chars} characters do not tell which tokens there are; use num_tokens"
            )
        return _Place(number, rest)


def _impossible(field: str, count: int, total: int) -> InvalidRequest:
    return InvalidRequest(
        field, f"{count} is no place where a frame ended; {total} have been written so far"
    )
