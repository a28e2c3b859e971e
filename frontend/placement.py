"""Which engine a request goes to: pure, and told everything by its caller.

An engine's cost is what it has to do over what it can: its running and waiting
sequences, with those sent since its last report, over max_num_seqs, plus the share
of KV blocks in use. The rule:

    1. two engines are drawn at random, and the cheaper one stands (with stale
       reports from several frontends, the cheapest of all would be everybody's;
       https://www.eecs.harvard.edu/~michaelm/postscripts/tpds2001.pdf);
    2. the engine that lately got the longest prefix of this prompt takes its place,
       unless its cost is more than AFFINITY_MARGIN above.

Prefixes are remembered by hash at the depths of DEPTHS blocks, for an engine's life,
the MAX_PREFIXES used last.
"""

from __future__ import annotations

import random
from array import array
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

BLOCK_TOKENS = 16
DEPTHS = (1, 4, 16, 64)
"""In blocks. A shared prefix is known to the depth below it, within a factor of 4."""
AFFINITY_MARGIN = 0.5
"""Half of an engine's sequences, or half of its KV cache: about what a queue costs
more than a prompt that must be computed again."""
MAX_PREFIXES = 16_384


@dataclass(frozen=True, slots=True)
class Candidate:
    """An engine that may be given the request, as last reported."""

    epoch: int
    num_seqs: int
    """Running, waiting, and sent since."""
    max_num_seqs: int
    kv_usage: float
    """0 to 1."""

    @property
    def cost(self) -> float:
        return self.num_seqs / self.max_num_seqs + self.kv_usage


class Placement:
    def __init__(self, *, seed: int | None = None) -> None:
        self._random = random.Random(seed)  # noqa: S311
        self._prefixes: OrderedDict[int, int] = OrderedDict()
        """Hash of a prefix -> epoch of the engine that got it last."""

    def choose(
        self, candidates: Sequence[Candidate], prompt_ids: Sequence[int] = (), salt: str = ""
    ) -> int:
        """The index of the engine to take, of at least one candidate.

        Without `prompt_ids` the prefix cache does not count.
        """
        if len(candidates) == 1:
            chosen = 0
        else:
            drawn = self._random.sample(range(len(candidates)), 2)
            chosen = min(drawn, key=lambda index: candidates[index].cost)
        hashes = _hashes(prompt_ids, salt)
        warm = self._warm(candidates, hashes)
        if warm is not None:
            excess = candidates[warm].cost - candidates[chosen].cost
            if excess <= AFFINITY_MARGIN:
                chosen = warm
        self._remember(hashes, candidates[chosen].epoch)
        return chosen

    def _warm(self, candidates: Sequence[Candidate], hashes: Sequence[int]) -> int | None:
        """The candidate that has seen the longest prefix."""
        by_epoch = {candidate.epoch: index for index, candidate in enumerate(candidates)}
        for prefix in reversed(hashes):
            epoch = self._prefixes.get(prefix)
            if epoch in by_epoch:
                return by_epoch[epoch]
        return None

    def _remember(self, hashes: Sequence[int], epoch: int) -> None:
        for prefix in hashes:
            self._prefixes[prefix] = epoch
            self._prefixes.move_to_end(prefix)
        while len(self._prefixes) > MAX_PREFIXES:
            self._prefixes.popitem(last=False)


def _hashes(prompt_ids: Sequence[int], salt: str) -> list[int]:
    """One for each depth that the prompt fills, the shortest first."""
    sizes = [depth * BLOCK_TOKENS for depth in DEPTHS if depth * BLOCK_TOKENS <= len(prompt_ids)]
    if not sizes:
        return []
    ids = array("i", prompt_ids[: sizes[-1]])
    # hash() of bytes and strings is keyed for the process: nobody outside makes collisions.
    return [hash((salt, ids[:size].tobytes())) for size in sizes]
