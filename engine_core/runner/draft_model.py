"""A smaller model that guesses what the model is going to draw.

It has weights and a KV cache of its own, over the same block tables: what a block holds of
the one sequence it holds of the other. Whatever becomes of that KV (a prefix hit that this
model has not computed, a block that was moved) costs right guesses and nothing else, so the
scheduler has it computed from a sequence's start, and no move or copy is made of it.

A guess is drawn with the numbers that the model's own draw at that place will use. So at
any temperature the two agree the more often, the closer their distributions are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from engine_core.model.inputs import ModelInput
from engine_core.runner.per_row import upload
from engine_core.runner.profile import run_verifying_step
from kernels.ops import AttentionBatch, SamplingBatch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine_core.device.base import Device
    from engine_core.model.decoder import DecoderModel
    from engine_core.model.inputs import KVCaches
    from engine_core.runner.rows import Rows
    from engine_core.sched.plan import DraftStep
    from kernels.ops import Ops


class DraftModel:
    def __init__(
        self, model: DecoderModel, ops: Ops, device: Device, kv_caches: KVCaches, rows: Rows
    ) -> None:
        """kv_caches: of as many blocks as the model's own. rows: the runner's."""
        self._model = model
        self._ops = ops
        self._device = device
        self._kv_caches = kv_caches
        self._rows = rows

    def run_verifying_step(self, num_tokens: int) -> None:
        """To measure it."""
        run_verifying_step(self._model, self._ops, self._kv_caches, num_tokens)

    @torch.inference_mode()
    def run(self, steps: Sequence[DraftStep]) -> None:
        """Writes the guesses behind the known ids of the rows that get some.

        The plan is applied, and each row has blocks for its guesses.
        """
        # Decodes come first in a batch.
        steps = sorted(steps, key=lambda step: step.num_new_tokens > 1)
        rows = np.array([step.row for step in steps])
        begins = np.array([step.num_computed_tokens for step in steps])
        nums = np.array([step.num_new_tokens for step in steps])
        drafts = np.array([step.num_drafts for step in steps])
        number = 0
        while True:
            hidden = self._compute(rows, begins, nums)
            wanting = drafts > number
            last = (np.cumsum(nums) - 1)[wanting]
            rows, drafts = rows[wanting], drafts[wanting]
            if len(rows):
                self._draw(hidden, last, rows, number)
            number += 1
            rows, drafts = rows[drafts > number], drafts[drafts > number]
            if not len(rows):
                return
            begins, nums = self._rows.num_tokens[rows] + number - 1, np.ones(len(rows), np.int64)

    def _compute(self, rows: np.ndarray, begins: np.ndarray, nums: np.ndarray) -> torch.Tensor:
        """The hidden states of tokens [begin, begin + num) of each row, one after the other."""
        state, block_size = self._rows, self._rows.block_size
        seq_lens = begins + nums
        starts = np.append(0, np.cumsum(nums))
        row_of = np.repeat(rows, nums)
        positions = np.arange(starts[-1]) + np.repeat(begins - starts[:-1], nums)
        blocks = state.block_table[row_of, positions // block_size].astype(np.int64)
        width = -(-int(seq_lens.max()) // block_size)
        starts_host = torch.from_numpy(starts.astype(np.int32))
        seq_lens_host = torch.from_numpy(seq_lens.astype(np.int32))
        attention = AttentionBatch(
            query_start_loc=self._upload(starts, np.int32),
            seq_lens=self._upload(seq_lens, np.int32),
            block_table=self._upload(state.block_table[rows, :width], np.int32),
            num_decodes=int((nums == 1).sum()),
            max_query_len=int(nums.max()),
            max_seq_len=int(seq_lens.max()),
            query_start_loc_host=starts_host,
            seq_lens_host=seq_lens_host,
        )
        inputs = ModelInput(
            input_ids=self._upload(state.token_ids[row_of, positions], np.int64),
            positions=self._upload(positions, np.int64),
            slot_mapping=self._upload(blocks * block_size + positions % block_size, np.int64),
            attention=attention,
            sampling_tokens=None,
        )
        return self._model.hidden_states(inputs, self._kv_caches)

    def _draw(self, hidden: torch.Tensor, last: np.ndarray, rows: np.ndarray, number: int) -> None:
        """The guess `number` of each of rows, after the tokens at `last` of the batch."""
        state = self._rows
        temperature, top_k = state.temperature[rows], state.top_k[rows]
        top_p, min_p = state.top_p[rows], state.min_p[rows]
        place = state.num_tokens[rows] + number
        batch = SamplingBatch(
            temperature=self._upload(temperature, np.float32),
            top_k=self._upload(top_k, np.int32),
            top_p=self._upload(top_p, np.float32),
            min_p=self._upload(min_p, np.float32),
            seed=self._upload(state.seed[rows].view(np.int64), np.int64),
            position=self._upload(place - state.num_prompt_tokens[rows], np.int64),
            sample_index=self._upload(state.sample_index[rows], np.int32),
            all_greedy=not temperature.any(),
            any_filter=bool(top_k.any() or (top_p < 1).any() or min_p.any()),
        )
        logits = self._model.logits(hidden, self._upload(last, np.int64))
        drawn = self._device.fetch(self._ops.sample(logits, batch)).wait()
        state.token_ids[rows, place] = drawn.numpy()

    def _upload(self, values: np.ndarray, dtype: type[np.generic]) -> torch.Tensor:
        return upload(values.astype(dtype), self._device.torch_device)
