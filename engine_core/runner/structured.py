"""Keeps the output of a row within its grammar."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from engine_core.runner.per_row import PerRow, upload

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from engine_core.grammar.grammar import Follower
    from engine_core.runner.rows import Rows
    from engine_core.sched.plan import NewSeq

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Constrained:
    follower: Follower
    num_fed: int
    """Ids of the row that the follower is past, the prompt's among them."""
    mask_words: int
    ends: frozenset[int]
    ended: bool = False
    """By the last id fed: what is drawn beyond it is dropped, and needs no mask."""
    failed: bool = False


class _LookAhead:
    """A follower that is past draft tokens for as long as their masks are made."""

    def __init__(self) -> None:
        self._state: _Constrained | None = None
        self._num_past = 0

    def move(self, state: _Constrained, drafts: Sequence[int]) -> bool:
        """Whether there is a mask for what comes after the known ids and these drafts, one more
        than at the last call for the same row. There is none where no token is to be drawn:
        beyond an end, or a draft token that has no place."""
        if state is not self._state or not drafts:
            self.move_home()
            self._state = state
        if state.ended:
            return False
        if len(drafts) == self._num_past + 1 and drafts[-1] not in state.ends:
            self._num_past += state.follower.try_consume(drafts[-1])
        return len(drafts) == self._num_past

    def move_home(self) -> None:
        if self._state is not None and self._num_past:
            self._state.follower.take_back(self._num_past)
        self._state, self._num_past = None, 0


class StructuredOutputs(PerRow[_Constrained]):
    """Bans what the grammar has no place for. Only the output is read, never the prompt."""

    def __init__(self, history: Rows, eos_token_ids: tuple[int, ...]) -> None:
        super().__init__()
        self._history = history
        self._eos_token_ids = eos_token_ids

    def admit(self, new: NewSeq) -> bool:
        grammar = new.grammar
        if grammar is None:
            return False
        self._states[new.row] = _Constrained(
            grammar.start(),
            new.num_prompt_tokens,
            grammar.mask_words,
            frozenset((*self._eos_token_ids, *new.sampling.stop_token_ids)),
        )
        return True

    def apply(self, logits: torch.Tensor, rows: Sequence[int]) -> None:
        """See LogitsProcessor. One walk of the vocabulary's trie for each row."""
        present = self._present(rows)
        lengths = self._history.lengths(np.asarray(rows))
        masks = np.zeros((len(present), max(state.mask_words for _, _, state in present)), np.int32)
        ahead = _LookAhead()
        for mask, (at, row, state) in zip(masks, present, strict=True):
            self._catch_up(row, state)
            drafts = self._history.token_ids[row, state.num_fed : lengths[at]].tolist()
            if not ahead.move(state, drafts):
                mask[:] = -1
                continue
            state.follower.fill_mask(mask[: state.mask_words])
            self._report_failure(state)
        ahead.move_home()
        banned = np.unpackbits(~masks.view(np.uint8), axis=1, bitorder="little")
        banned = banned[:, : logits.shape[1]].view(np.bool_)
        places = [at for at, _, _ in present]
        ban = upload(banned, logits.device)
        if len(places) == logits.shape[0]:
            logits.masked_fill_(ban, float("-inf"))
        else:
            index = upload(np.array(places), logits.device)
            logits[index] = logits[index].masked_fill_(ban, float("-inf"))

    def _catch_up(self, row: int, state: _Constrained) -> None:
        num_tokens = int(self._history.num_tokens[row])
        fresh = self._history.token_ids[row, state.num_fed : num_tokens].tolist()
        assert min(fresh, default=0) >= 0, (row, fresh)
        state.num_fed = num_tokens
        state.ended = bool(fresh) and fresh[-1] in state.ends
        if not state.ended:
            state.follower.consume(fresh)

    def _report_failure(self, state: _Constrained) -> None:
        error = state.follower.error
        if error and not state.failed:
            state.failed = True
            _log.warning("a grammar gave up, which ends its request: %s", error[:200])
