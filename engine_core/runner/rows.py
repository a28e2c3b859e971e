"""What the runner remembers of each sequence between steps."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from engine_core.sched.plan import BY_MODEL, NO_TOKEN
from kernels.lora import NO_SLOT

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from engine_core.sched.plan import NewSeq, StepPlan

UNRESOLVED = -1
"""Stands for a sampled id that is still on the device."""

NOT_ASKED = -1


class Rows:
    """One row per running sequence, as columns of numpy arrays.

    0                num_prompt_tokens            num_tokens       max_model_len
    |   prompt ids   |   output ids so far        |   free         |
    """

    def __init__(self, max_num_seqs: int, max_model_len: int, block_size: int) -> None:
        self.block_size = block_size
        max_blocks = -(-max_model_len // block_size)
        # empty and zeros this large are mapped, not touched: a row costs memory once used.
        self.token_ids = np.empty((max_num_seqs, max_model_len), np.int32)
        self.block_table = np.zeros((max_num_seqs, max_blocks), np.int32)
        self.num_tokens = np.zeros(max_num_seqs, np.int64)
        self.num_prompt_tokens = np.zeros(max_num_seqs, np.int64)
        self.num_blocks = np.zeros(max_num_seqs, np.int64)
        self.temperature = np.zeros(max_num_seqs, np.float32)
        self.top_k = np.zeros(max_num_seqs, np.int32)
        self.top_p = np.ones(max_num_seqs, np.float32)
        self.min_p = np.zeros(max_num_seqs, np.float32)
        self.seed = np.zeros(max_num_seqs, np.uint64)
        self.sample_index = np.zeros(max_num_seqs, np.int32)
        # How many likeliest tokens to report, or NOT_ASKED.
        self.logprobs = np.full(max_num_seqs, NOT_ASKED, np.int32)
        self.prompt_logprobs = np.full(max_num_seqs, NOT_ASKED, np.int32)
        self.prompt_logprobs_from = np.zeros(max_num_seqs, np.int64)
        self.asking: set[int] = set()
        """Held rows that want logprobs of either kind."""
        self.adapter_slot = np.full(max_num_seqs, NO_SLOT, np.int32)
        self.adapted: set[int] = set()
        """Held rows that have an adapter."""
        # Counts the sequences a row has held, so that an id fetched late does not land in
        # the next one.
        self.tenancy = np.zeros(max_num_seqs, np.int64)
        self._held = np.zeros(max_num_seqs, np.bool_)

    def apply(self, plan: StepPlan) -> None:
        """Forgets freed rows, fills new ones, appends blocks."""
        for row in plan.freed_rows:
            self._free(row)
        for row, token_id in plan.chosen:
            assert self._held[row], row
            self.token_ids[row, self.num_tokens[row] - 1] = token_id
        for new in plan.new_seqs:
            self._add(new)
        for seq in plan.seqs:
            assert self._held[seq.row], seq
            if seq.new_block_ids:
                self._append_blocks(seq.row, seq.new_block_ids)
            if seq.draft_token_ids and seq.draft_token_ids[0] != BY_MODEL:
                self._write_drafts(seq.row, seq.draft_token_ids)

    def _free(self, row: int) -> None:
        assert self._held[row], row
        self._held[row] = False
        # Entries past a sequence's end must be the null block.
        self.block_table[row, : self.num_blocks[row]] = 0
        self.num_blocks[row] = 0
        self.tenancy[row] += 1
        self.asking.discard(row)
        self.adapted.discard(row)
        self.adapter_slot[row] = NO_SLOT

    def _add(self, new: NewSeq) -> None:
        row, params = new.row, new.sampling
        assert not self._held[row], row
        self._held[row] = True
        self.token_ids[row, : len(new.token_ids)] = new.token_ids
        self.num_tokens[row] = len(new.token_ids)
        self.num_prompt_tokens[row] = new.num_prompt_tokens
        self.temperature[row] = params.temperature
        self.top_k[row] = params.top_k
        self.top_p[row] = params.top_p
        self.min_p[row] = params.min_p
        self.seed[row] = params.seed
        self.sample_index[row] = new.sample_index
        if new.adapter_slot is not None:
            self.adapter_slot[row] = new.adapter_slot
            self.adapted.add(row)
        if new.block_ids:
            self._append_blocks(row, new.block_ids)
        self._ask_logprobs(new)

    def _ask_logprobs(self, new: NewSeq) -> None:
        row, params = new.row, new.sampling
        self.logprobs[row] = NOT_ASKED
        self.prompt_logprobs[row] = NOT_ASKED
        if params.logprobs is not None:
            self.logprobs[row] = params.logprobs
            self.asking.add(row)
        if new.prompt_logprobs_from is not None:
            assert params.prompt_logprobs is not None, row
            self.prompt_logprobs[row] = params.prompt_logprobs
            self.prompt_logprobs_from[row] = new.prompt_logprobs_from
            self.asking.add(row)

    def _append_blocks(self, row: int, block_ids: Sequence[int]) -> None:
        start = self.num_blocks[row]
        end = start + len(block_ids)
        assert end <= self.block_table.shape[1], (row, end)
        self.block_table[row, start:end] = block_ids
        self.num_blocks[row] = end

    def _write_drafts(self, row: int, token_ids: Sequence[int]) -> None:
        """Behind the known ids, without counting them."""
        begin = self.num_tokens[row]
        end = begin + len(token_ids)
        assert end < self.token_ids.shape[1], (row, end)
        self.token_ids[row, begin:end] = token_ids

    def lengths(self, rows: np.ndarray) -> np.ndarray:
        """[S] ids that a token drawn at each of the places follows.

        A row with draft tokens has several places beside each other: the first comes after
        its known ids, each further one after a draft token more.
        """
        known: np.ndarray = self.num_tokens[rows]
        again = rows[1:] == rows[:-1]
        if not again.any():
            return known
        places = np.arange(len(rows))
        firsts = np.where(np.append(False, again), 0, places)
        return known + places - np.maximum.accumulate(firsts)

    def accept(
        self, rows: np.ndarray, tenancy: np.ndarray, accepted: Mapping[int, Sequence[int]]
    ) -> np.ndarray:
        """Draft tokens of some of the rows were drawn, before the unresolved id that each has
        at its end. Returns how many of each row's [R]."""
        nums = np.zeros(len(rows), np.int64)
        for at, row in enumerate(rows.tolist()):
            token_ids = accepted.get(row, ())
            nums[at] = len(token_ids)
            if token_ids and self.tenancy[row] == tenancy[at]:
                begin = self.num_tokens[row] - 1
                self.token_ids[row, begin : begin + len(token_ids)] = token_ids
                self.num_tokens[row] += len(token_ids)
        return nums

    def append_unresolved(self, rows: np.ndarray) -> None:
        """A token was sampled for each of rows; its id comes later, by resolve()."""
        ends = self.num_tokens[rows]
        # The last token of a full context is never an input, so it needs no place.
        room = ends < self.token_ids.shape[1]
        self.token_ids[rows[room], ends[room]] = UNRESOLVED
        self.num_tokens[rows] = ends + 1

    def resolve(
        self, rows: np.ndarray, tenancy: np.ndarray, positions: np.ndarray, token_ids: np.ndarray
    ) -> np.ndarray:
        """Sets the id at a position of each row that still has the same tenant. Returns the
        rows of those whose id is NO_TOKEN: what they draw from here on is dropped, and any
        id does to draw it from."""
        same = self.tenancy[rows] == tenancy
        live = same & (positions < self.token_ids.shape[1])
        self.token_ids[rows[live], positions[live]] = np.maximum(token_ids[live], 0)
        dead: np.ndarray = rows[same & (token_ids == NO_TOKEN)]
        return dead
