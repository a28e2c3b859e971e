"""From a StepPlan to the flat tensors that model and sampler read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from engine_core.model.inputs import ModelInput
from engine_core.runner.rows import UNRESOLVED
from kernels.ops import AttentionBatch, SamplingBatch

if TYPE_CHECKING:
    from engine_core.device.base import Device, Fence
    from engine_core.runner.rows import Rows
    from engine_core.sched.plan import StepPlan


@dataclass(frozen=True, slots=True)
class StepBatch:
    inputs: ModelInput
    sampling: SamplingBatch | None
    """None where no row samples."""
    sampling_rows: np.ndarray
    """[S] row numbers, in plan order."""
    late: LateInputs | None


@dataclass(frozen=True, slots=True)
class LateInputs:
    """Input ids that an unfinished step has sampled: only the device has them."""

    tokens: torch.Tensor  # [U] int64, indices into input_ids
    rows: torch.Tensor  # [U] int64


class BatchBuilder:
    """Fills staging buffers that last for the process; a step's cost follows its own tokens."""

    def __init__(
        self,
        rows: Rows,
        device: Device,
        max_num_seqs: int,
        max_num_batched_tokens: int,
    ) -> None:
        self._rows = rows
        self._device = device
        self._max_num_seqs = max_num_seqs
        self._max_tokens = max_num_batched_tokens
        self._sets = [
            _StagingSet(device, max_num_seqs, max_num_batched_tokens, rows.block_table.shape[1])
            for _ in range(device.num_staging_sets)
        ]
        self._turn = 0

    def build(self, plan: StepPlan) -> StepBatch:
        """plan.seqs is not empty, and the rows have applied the plan."""
        num_seqs = len(plan.seqs)
        assert 0 < num_seqs <= self._max_num_seqs, num_seqs
        staging = self._sets[self._turn]
        self._turn = (self._turn + 1) % len(self._sets)
        staging.wait()

        rows = np.array([seq.row for seq in plan.seqs])
        computed = np.array([seq.num_computed_tokens for seq in plan.seqs])
        new = np.array([seq.num_new_tokens for seq in plan.seqs])
        samples = np.array([seq.samples for seq in plan.seqs])
        ends = np.cumsum(new)
        num_tokens = int(ends[-1])
        assert num_tokens <= self._max_tokens, (num_tokens, self._max_tokens)
        # A missing block would send writes to the null block, unseen.
        assert (computed + new <= self._rows.num_blocks[rows] * self._rows.block_size).all(), plan
        assert (samples == (computed + new == self._rows.num_tokens[rows])).all(), plan

        late = self._fill_tokens(staging, rows, computed, new, ends)
        attention = self._fill_attention(staging, rows, computed + new, new, ends)
        all_sample = bool(samples.all()) and num_tokens == num_seqs
        sampling_tokens = None if all_sample else staging.long("sampling_tokens", ends[samples] - 1)
        sampling_rows = rows[samples]
        inputs = ModelInput(
            input_ids=staging.take("input_ids", num_tokens),
            positions=staging.take("positions", num_tokens),
            slot_mapping=staging.take("slot_mapping", num_tokens),
            attention=attention,
            sampling_tokens=sampling_tokens,
        )
        sampling = self._fill_sampling(staging, sampling_rows) if len(sampling_rows) else None
        staging.fence = self._device.fence()
        return StepBatch(inputs, sampling, sampling_rows, late)

    def _fill_tokens(
        self,
        staging: _StagingSet,
        rows: np.ndarray,
        computed: np.ndarray,
        new: np.ndarray,
        ends: np.ndarray,
    ) -> LateInputs | None:
        num_tokens = int(ends[-1])
        row_of = np.repeat(rows, new)
        # Position in the sequence = position in the batch - the sequence's start + computed.
        positions = np.arange(num_tokens) + np.repeat(computed - (ends - new), new)
        blocks = self._rows.block_table[row_of, positions // self._rows.block_size]
        input_ids = staging.arrays["input_ids"]
        input_ids[:num_tokens] = self._rows.token_ids[row_of, positions]
        staging.arrays["positions"][:num_tokens] = positions
        staging.arrays["slot_mapping"][:num_tokens] = (
            blocks.astype(np.int64) * self._rows.block_size + positions % self._rows.block_size
        )
        if self._device.is_synchronous:
            return None
        late = np.flatnonzero(input_ids[:num_tokens] == UNRESOLVED)
        if not len(late):
            return None
        input_ids[late] = 0
        return LateInputs(
            staging.long("late_tokens", late), staging.long("late_rows", row_of[late])
        )

    def _fill_attention(
        self,
        staging: _StagingSet,
        rows: np.ndarray,
        seq_lens: np.ndarray,
        new: np.ndarray,
        ends: np.ndarray,
    ) -> AttentionBatch:
        num_seqs = len(rows)
        width = -(-int(seq_lens.max()) // self._rows.block_size)
        starts = staging.arrays["query_start_loc"]
        starts[0] = 0
        starts[1 : num_seqs + 1] = ends
        staging.arrays["seq_lens"][:num_seqs] = seq_lens
        table = staging.arrays["block_table"][: num_seqs * width].reshape(num_seqs, width)
        table[:] = self._rows.block_table[rows, :width]
        is_chunk = new > 1
        num_decodes = int(is_chunk.argmax()) if is_chunk.any() else num_seqs
        return AttentionBatch(
            query_start_loc=staging.take("query_start_loc", num_seqs + 1),
            seq_lens=staging.take("seq_lens", num_seqs),
            block_table=staging.take("block_table", num_seqs * width).view(num_seqs, width),
            num_decodes=num_decodes,
            max_query_len=int(new.max()),
            max_seq_len=int(seq_lens.max()),
            query_start_loc_host=staging.tensors["query_start_loc"][: num_seqs + 1],
            seq_lens_host=staging.tensors["seq_lens"][:num_seqs],
        )

    def _fill_sampling(self, staging: _StagingSet, rows: np.ndarray) -> SamplingBatch:
        state, num = self._rows, len(rows)
        temperature, top_k = state.temperature[rows], state.top_k[rows]
        top_p, min_p = state.top_p[rows], state.min_p[rows]
        arrays = staging.arrays
        arrays["temperature"][:num] = temperature
        arrays["top_k"][:num] = top_k
        arrays["top_p"][:num] = top_p
        arrays["min_p"][:num] = min_p
        arrays["seed"][:num] = state.seed[rows].view(np.int64)
        arrays["sample_index"][:num] = state.sample_index[rows]
        arrays["position"][:num] = state.num_tokens[rows] - state.num_prompt_tokens[rows]
        return SamplingBatch(
            temperature=staging.take("temperature", num),
            top_k=staging.take("top_k", num),
            top_p=staging.take("top_p", num),
            min_p=staging.take("min_p", num),
            seed=staging.take("seed", num),
            position=staging.take("position", num),
            sample_index=staging.take("sample_index", num),
            all_greedy=not temperature.any(),
            any_filter=bool(top_k.any() or (top_p < 1).any() or min_p.any()),
        )


class _StagingSet:
    """Host buffers by name, as torch tensors and as numpy views of the same memory."""

    def __init__(
        self, device: Device, max_num_seqs: int, max_num_tokens: int, max_blocks: int
    ) -> None:
        per_token = ("input_ids", "positions", "slot_mapping")
        per_seq = {
            "seq_lens": torch.int32,
            "sampling_tokens": torch.int64,
            "late_tokens": torch.int64,
            "late_rows": torch.int64,
            "temperature": torch.float32,
            "top_k": torch.int32,
            "top_p": torch.float32,
            "min_p": torch.float32,
            "seed": torch.int64,
            "position": torch.int64,
            "sample_index": torch.int32,
        }
        self._device = device
        self.tensors = {
            "query_start_loc": device.host_buffer([max_num_seqs + 1], torch.int32),
            "block_table": device.host_buffer([max_num_seqs * max_blocks], torch.int32),
        }
        for name in per_token:
            self.tensors[name] = device.host_buffer([max_num_tokens], torch.int64)
        for name, dtype in per_seq.items():
            self.tensors[name] = device.host_buffer([max_num_seqs], dtype)
        self.arrays = {name: tensor.numpy() for name, tensor in self.tensors.items()}
        self.fence: Fence | None = None

    def wait(self) -> None:
        """Until the device has read what this set last held."""
        if self.fence is not None:
            self.fence.wait()

    def take(self, name: str, length: int) -> torch.Tensor:
        return self._device.stage(self.tensors[name][:length])

    def long(self, name: str, values: np.ndarray) -> torch.Tensor:
        self.arrays[name][: len(values)] = values
        return self.take(name, len(values))
