"""The running sequences of one beam search, which go in lockstep.

    leader (from the queue, computes the prompt) --draws--> advance --> its beams
        beam that goes on as one    stays in its row
        beam that goes on as more   the others enter rows of their own, as its forks
        beam that goes on as none   leaves its row

The leader is the request that the frontend knows; it always is one of the beams, and the
only one to be queued. When the group is preempted, which it is as a whole, the leader waits
with its own output, and the others enter as its forks once it is computed again. The
search advances when every beam has drawn.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine_core.request import Request, Status

if TYPE_CHECKING:
    from array import array
    from collections.abc import Callable

    from engine_core.kv.block_table import BlockTable
    from engine_core.sched.beam import BeamSearch
    from pagewire.wire.messages import PositionLogprobs


@dataclass(frozen=True, slots=True)
class Entry:
    """A beam that is to enter a row with the KV of source's first num_shared tokens."""

    beam: Request
    source: Request
    num_shared: int


class BeamGroup:
    def __init__(
        self,
        leader: Request,
        search: BeamSearch,
        new_table: Callable[[array[int]], BlockTable],
    ) -> None:
        """new_table: an empty one for ids that begin with the leader's prompt."""
        self.leader = leader
        self.search = search
        self.width = search.width
        self.entering: deque[Entry] = deque()
        self._beams = [leader]
        """Parallel to search.running."""
        self._spare: list[Request] = []
        """Hold no beam at present."""
        self._drawn: dict[Request, PositionLogprobs] = {}
        self._new_table = new_table

    @property
    def in_rows(self) -> list[Request]:
        """All of them, or none while the leader waits."""
        return [beam for beam in self._beams if beam.status is Status.RUNNING]

    def take(self, beam: Request, candidates: PositionLogprobs) -> bool:
        """A beam has drawn. Returns whether all have, so that the search can advance."""
        assert beam not in self._drawn, beam
        self._drawn[beam] = candidates
        return len(self._drawn) == len(self._beams)

    def advance(self, now: float, leave_row: Callable[[Request], None]) -> list[Request]:
        """What all have drawn becomes the next beams, unless the search is done by it.

        leave_row: called for each beam that goes on as none, once. Returns those that stay,
        whose last token is not what was drawn but what the search chose.
        """
        before, self._beams = self._beams, []
        steps = self.search.advance([self._drawn[beam] for beam in before])
        self._drawn.clear()
        if self.search.done:
            self._beams = before
            return []
        if self.leader not in {before[index] for index, _ in steps}:
            self._lead_with(before, steps[0][0])
        going_on = {before[index] for index, _ in steps}
        for beam in before:
            if beam not in going_on:
                leave_row(beam)
                self._spare.append(beam)
        stay: list[tuple[Request, int]] = []
        for index, token_id in steps:
            source = before[index]
            if source in going_on:
                going_on.discard(source)
                stay.append((source, token_id))
                self._beams.append(source)
            else:
                self._beams.append(self._fork(source, token_id))
        # Not before all forks have copied what they begin with.
        for beam, token_id in stay:
            beam.append(token_id, now)
        return [beam for beam, _ in stay]

    def suspend(self) -> None:
        """The group has lost its rows. Each beam keeps its tokens."""
        self._drawn.clear()
        self.entering.clear()
        for beam in self._beams:
            if beam is not self.leader:
                shared = _common_prefix(beam.token_ids, self.leader.token_ids)
                self.entering.append(Entry(beam, self.leader, shared))

    def _lead_with(self, before: list[Request], index: int) -> None:
        """The leader goes on as none, so it takes another beam's place, which takes its own."""
        leader, other = self.leader, before[index]
        before[before.index(leader)], before[index] = other, leader
        leader.trade_places(other)

    def _fork(self, source: Request, token_id: int) -> Request:
        token_ids = source.token_ids[:]
        token_ids.append(token_id)
        table = self._new_table(token_ids)
        if self._spare:
            beam = self._spare.pop()
            beam.restart(table)
        else:
            beam = self.leader.new_branch(table)
        self.entering.append(Entry(beam, source, source.num_tokens))
        return beam


def _common_prefix(ids: array[int], others: array[int]) -> int:
    """The length up to which two sequences are the same."""
    low, high = 0, min(len(ids), len(others))
    while low < high:
        middle = (low + high + 1) // 2
        if ids[low:middle] == others[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def together(request: Request) -> list[Request]:
    """Those that run and end with a request that runs, itself among them."""
    return [request] if request.group is None else request.group.in_rows


def num_forks(request: Request) -> int:
    """Beams that may still join it, each with a block of its own."""
    return max(0, request.num_reserved_rows - 1)
