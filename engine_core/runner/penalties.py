"""Repetition, frequency and presence penalties."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from engine_core.runner.per_row import PerRow, token_lists, upload
from kernels.ops import PenaltyBatch

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from engine_core.runner.rows import Rows
    from engine_core.sched.plan import NewSeq
    from kernels.ops import Ops


class Counts(NamedTuple):
    ids: np.ndarray
    """[K] int64, each once."""
    counts: np.ndarray
    """[K] float32: occurrences in the output."""


class TokenCounts:
    """The distinct ids of a sequence, and how often its output holds each.

    O(1) an id fed; memory follows the distinct ids, not the vocabulary.
    """

    def __init__(self, prompt_ids: np.ndarray) -> None:
        """Prompt ids are known with a count of 0."""
        known = np.unique(prompt_ids)
        self._size = len(known)
        self._ids = known.astype(np.int64)
        self._counts = np.zeros(self._size, np.float32)
        self._places = {token_id: at for at, token_id in enumerate(known.tolist())}

    @property
    def ids(self) -> np.ndarray:
        """[K] int64, each once."""
        return self._ids[: self._size]

    @property
    def counts(self) -> np.ndarray:
        """[K] float32: occurrences in the output."""
        return self._counts[: self._size]

    def feed(self, output_ids: Iterable[int]) -> None:
        for token_id in output_ids:
            at = self._places.setdefault(token_id, self._size)
            if at == self._size:
                self._grow()
                self._ids[at] = token_id
                self._size += 1
            self._counts[at] += 1

    def counts_with(self, output_ids: Sequence[int]) -> Counts:
        """As if these had been fed too. O(K)."""
        ids, counts = self.ids, self.counts
        if not output_ids:
            return Counts(ids, counts)
        more: dict[int, int] = {}
        counts = counts.copy()
        for token_id in output_ids:
            at = self._places.get(token_id)
            if at is None:
                more[token_id] = more.get(token_id, 0) + 1
            else:
                counts[at] += 1
        return Counts(
            np.concatenate([ids, np.array(list(more), np.int64)]),
            np.concatenate([counts, np.array(list(more.values()), np.float32)]),
        )

    def _grow(self) -> None:
        if self._size == len(self._ids):
            more = max(16, self._size)
            self._ids = np.concatenate([self._ids, np.zeros(more, np.int64)])
            self._counts = np.concatenate([self._counts, np.zeros(more, np.float32)])


@dataclass(slots=True)
class _Penalized:
    repetition: float
    frequency: float
    presence: float
    counts: TokenCounts
    num_fed: int
    """Ids of the row that counts knows."""


class Penalties(PerRow[_Penalized]):
    """Ops.apply_penalties on the ids of prompt and output; prompt ids count for repetition only."""

    bans = False

    def __init__(self, history: Rows, ops: Ops) -> None:
        super().__init__()
        self._history = history
        self._ops = ops

    def admit(self, new: NewSeq) -> bool:
        params = new.sampling
        repeats = params.repetition_penalty != 1
        if not (repeats or params.frequency_penalty or params.presence_penalty):
            return False
        prompt_ids = new.token_ids[: new.num_prompt_tokens] if repeats else ()
        self._states[new.row] = _Penalized(
            params.repetition_penalty,
            params.frequency_penalty,
            params.presence_penalty,
            TokenCounts(np.array(prompt_ids, np.int64)),
            new.num_prompt_tokens,
        )
        return True

    def apply(self, logits: torch.Tensor, rows: Sequence[int]) -> None:
        """See LogitsProcessor. Two copies to the device and one op for the whole batch."""
        present = self._present(rows)
        lengths = self._history.lengths(np.asarray(rows))
        held: list[Counts] = []
        for at, row, state in present:
            self._catch_up(row, state)
            drafts = self._history.token_ids[row, state.num_fed : lengths[at]]
            held.append(state.counts.counts_with(drafts.tolist()))
        known = token_lists(
            [(at, each.ids) for (at, _, _), each in zip(present, held, strict=True)],
            logits.device,
        )
        floats = np.concatenate(
            [
                np.array([state.repetition for _, _, state in present], np.float32),
                np.array([state.frequency for _, _, state in present], np.float32),
                np.array([state.presence for _, _, state in present], np.float32),
                *[each.counts for each in held],
            ]
        )
        num = len(present)
        repetition, frequency, presence, counts = torch.split(
            upload(floats, logits.device), [num, num, num, len(floats) - 3 * num]
        )
        self._ops.apply_penalties(
            logits, PenaltyBatch(known, counts, repetition, frequency, presence)
        )

    def _catch_up(self, row: int, state: _Penalized) -> None:
        num_tokens = int(self._history.num_tokens[row])
        fresh = self._history.token_ids[row, state.num_fed : num_tokens].tolist()
        assert min(fresh, default=0) >= 0, (row, fresh)
        state.counts.feed(fresh)
        state.num_fed = num_tokens
