"""From a StepPlan to the flat tensors that model and sampler read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from engine_core.model.inputs import ModelInput
from engine_core.runner.per_row import upload
from engine_core.runner.rows import UNRESOLVED
from kernels.lora import LoraBatch
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
    """[S] row numbers, in plan order; a row with k draft tokens 1 + k times."""
    sampling_rows_there: torch.Tensor
    """[S] int64, the same on the device."""
    late: LateInputs | None


@dataclass(frozen=True, slots=True)
class LateInputs:
    """Input ids that an unfinished step has sampled: only the device has them."""

    tokens: torch.Tensor  # [U] int64, indices into input_ids
    rows: torch.Tensor  # [U] int64


class BatchBuilder:
    """Fills buffers that last for the process; a step's cost follows its own tokens.

        rows --numpy--> a staging set on the host --copy--> the buffers on the device

    Sets are taken in turn, so that filling one does not wait for the copies of the last
    step. There is one set of buffers on the device: its queue keeps copies and steps in
    order.
    """

    def __init__(
        self,
        rows: Rows,
        device: Device,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_sampled_tokens: int | None = None,
    ) -> None:
        """max_sampled_tokens: drawn in a step. Default: one for each sequence."""
        self._rows = rows
        self._device = device
        self._max_num_seqs = max_num_seqs
        self._max_tokens = max_num_batched_tokens
        # A padded batch has a token for each of its sequences.
        layout = _layout(
            max_num_seqs,
            max(max_num_seqs, max_num_batched_tokens),
            max_sampled_tokens or max_num_seqs,
            rows.block_table.shape[1],
        )
        self._buffers = {
            name: torch.empty(size, dtype=dtype, device=device.torch_device)
            for name, (size, dtype) in layout.items()
        }
        self._sets = [
            _StagingSet(device, layout, self._buffers) for _ in range(device.num_staging_sets)
        ]
        self._turn = 0
        self._decode_table: torch.Tensor | None = None
        self._decode_inputs: dict[int, ModelInput] = {}

    def decode_inputs(self, num_seqs: int) -> ModelInput:
        """What every batch that is padded to num_seqs is built in, always the same memory,
        on a device that captures_graphs. It holds padding alone now."""
        inputs = self._decode_inputs.get(num_seqs)
        if inputs is None:
            assert num_seqs <= self._max_num_seqs, num_seqs
            if self._decode_table is None:
                self._decode_table = self._device.zeros(
                    (self._max_num_seqs, self._rows.block_table.shape[1]), torch.int32
                )
            max_seq_len = self._rows.token_ids.shape[1]
            buffers = self._buffers
            inputs = self._decode_inputs[num_seqs] = ModelInput(
                input_ids=buffers["input_ids"][:num_seqs],
                positions=buffers["positions"][:num_seqs],
                slot_mapping=buffers["slot_mapping"][:num_seqs],
                attention=AttentionBatch(
                    query_start_loc=buffers["query_start_loc"][: num_seqs + 1],
                    seq_lens=buffers["seq_lens"][:num_seqs],
                    block_table=self._decode_table[:num_seqs],
                    num_decodes=num_seqs,
                    max_query_len=1,
                    # Whoever captures work on it must be right for the longest there can be.
                    max_seq_len=max_seq_len,
                    query_start_loc_host=torch.arange(num_seqs + 1, dtype=torch.int32),
                    seq_lens_host=torch.full((num_seqs,), max_seq_len, dtype=torch.int32),
                ),
                sampling_tokens=None,
            )
        staging = self._next_set()
        self._pad(staging, 0, num_seqs)
        self._stage_padded(staging, num_seqs)
        staging.fence = self._device.fence()
        return inputs

    def build(self, plan: StepPlan, pad_to: int = 0) -> StepBatch:
        """plan.seqs is not empty, and the rows have applied the plan.

        pad_to: makes decode_inputs(pad_to) of a plan that only decodes, no more sequences
        than that: sequences without tokens follow, which write nothing.
        """
        num_seqs = len(plan.seqs)
        assert 0 < num_seqs <= self._max_num_seqs, num_seqs
        staging = self._next_set()

        rows = np.array([seq.row for seq in plan.seqs])
        computed = np.array([seq.num_computed_tokens for seq in plan.seqs])
        new = np.array([seq.num_new_tokens for seq in plan.seqs])
        samples = np.array([seq.samples for seq in plan.seqs])
        drafts = _num_drafts(plan)
        ends = np.cumsum(new)
        num_tokens = int(ends[-1])
        assert num_tokens <= self._max_tokens, (num_tokens, self._max_tokens)
        # A missing block would send writes to the null block, unseen.
        assert (computed + new <= self._rows.num_blocks[rows] * self._rows.block_size).all(), plan
        assert (samples == (computed + new - drafts == self._rows.num_tokens[rows])).all(), plan

        late = self._fill_tokens(staging, rows, computed, new, ends)
        table = self._fill_attention(staging, rows, computed + new, ends)
        all_sample = bool(samples.all()) and num_tokens == num_seqs + drafts.sum()
        if pad_to:
            assert all_sample, plan
            inputs = self._decode_inputs[pad_to]
            self._pad(staging, num_seqs, pad_to)
            self._stage_padded(staging, pad_to)
            assert self._decode_table is not None
            self._decode_table[:num_seqs, : table.shape[1]].copy_(table)
        else:
            inputs = ModelInput(
                input_ids=staging.take("input_ids", num_tokens),
                positions=staging.take("positions", num_tokens),
                slot_mapping=staging.take("slot_mapping", num_tokens),
                attention=self._attention(staging, table, computed + new, new),
                sampling_tokens=(
                    None
                    if all_sample
                    else staging.long("sampling_tokens", _last_tokens(ends, samples, drafts))
                ),
                lora=self._lora(rows, new) if self._rows.adapted else None,
            )
        sampling_rows = rows[samples]
        if plan.has_drafts:
            sampling_rows = np.repeat(rows, np.where(samples, 1 + drafts, 0))
        sampling_rows_there = staging.long("sampling_rows", sampling_rows)
        sampling = self._fill_sampling(staging, sampling_rows) if len(sampling_rows) else None
        staging.fence = self._device.fence()
        return StepBatch(inputs, sampling, sampling_rows, sampling_rows_there, late)

    def _next_set(self) -> _StagingSet:
        staging = self._sets[self._turn]
        self._turn = (self._turn + 1) % len(self._sets)
        staging.wait()
        return staging

    @staticmethod
    def _pad(staging: _StagingSet, num_seqs: int, pad_to: int) -> None:
        """Sequences [num_seqs, pad_to) get a token each that is none."""
        arrays = staging.arrays
        arrays["input_ids"][num_seqs:pad_to] = 0
        arrays["positions"][num_seqs:pad_to] = 0
        arrays["slot_mapping"][num_seqs:pad_to] = -1
        arrays["seq_lens"][num_seqs:pad_to] = 0
        arrays["query_start_loc"][num_seqs : pad_to + 1] = np.arange(num_seqs, pad_to + 1)

    @staticmethod
    def _stage_padded(staging: _StagingSet, pad_to: int) -> None:
        for name in ("input_ids", "positions", "slot_mapping", "seq_lens"):
            staging.take(name, pad_to)
        staging.take("query_start_loc", pad_to + 1)

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

    def _lora(self, rows: np.ndarray, new: np.ndarray) -> LoraBatch | None:
        slots = np.repeat(self._rows.adapter_slot[rows], new)
        return LoraBatch.of(slots, lambda values: upload(values, self._device.torch_device))

    def _fill_attention(
        self,
        staging: _StagingSet,
        rows: np.ndarray,
        seq_lens: np.ndarray,
        ends: np.ndarray,
    ) -> torch.Tensor:
        """Returns the block table on the device, as wide as the longest sequence."""
        num_seqs = len(rows)
        width = -(-int(seq_lens.max()) // self._rows.block_size)
        starts = staging.arrays["query_start_loc"]
        starts[0] = 0
        starts[1 : num_seqs + 1] = ends
        staging.arrays["seq_lens"][:num_seqs] = seq_lens
        table = staging.arrays["block_table"][: num_seqs * width].reshape(num_seqs, width)
        table[:] = self._rows.block_table[rows, :width]
        return staging.take("block_table", num_seqs * width).view(num_seqs, width)

    @staticmethod
    def _attention(
        staging: _StagingSet, table: torch.Tensor, seq_lens: np.ndarray, new: np.ndarray
    ) -> AttentionBatch:
        num_seqs = len(new)
        is_chunk = new > 1
        num_decodes = int(is_chunk.argmax()) if is_chunk.any() else num_seqs
        return AttentionBatch(
            query_start_loc=staging.take("query_start_loc", num_seqs + 1),
            seq_lens=staging.take("seq_lens", num_seqs),
            block_table=table,
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
        arrays["position"][:num] = state.lengths(rows) - state.num_prompt_tokens[rows]
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


def _num_drafts(plan: StepPlan) -> np.ndarray:
    """[R], or what stands for as many zeros."""
    if not plan.has_drafts:
        return np.zeros(1, np.int64)
    return np.array([len(seq.draft_token_ids) for seq in plan.seqs])


def _last_tokens(ends: np.ndarray, samples: np.ndarray, drafts: np.ndarray) -> np.ndarray:
    """[S] the batch tokens to draw after: of each sequence that samples the last, and as
    many before it as it has draft tokens."""
    if not drafts.any():
        last: np.ndarray = ends[samples] - 1
        return last
    counts = np.where(samples, 1 + drafts, 0)
    firsts = np.repeat(ends - counts, counts)
    tokens: np.ndarray = (
        firsts + np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    )
    return tokens


def _layout(
    max_num_seqs: int, max_num_tokens: int, max_sampled: int, max_blocks: int
) -> dict[str, tuple[int, torch.dtype]]:
    """(elements, type) of every buffer, by name."""
    layout = {
        "query_start_loc": (max_num_seqs + 1, torch.int32),
        "block_table": (max_num_seqs * max_blocks, torch.int32),
    }
    for name in ("input_ids", "positions", "slot_mapping"):
        layout[name] = (max_num_tokens, torch.int64)
    layout["seq_lens"] = (max_num_seqs, torch.int32)
    layout["late_tokens"] = layout["late_rows"] = (max_num_seqs, torch.int64)
    per_sample = {
        "sampling_tokens": torch.int64,
        "sampling_rows": torch.int64,
        "temperature": torch.float32,
        "top_k": torch.int32,
        "top_p": torch.float32,
        "min_p": torch.float32,
        "seed": torch.int64,
        "position": torch.int64,
        "sample_index": torch.int32,
    }
    for name, dtype in per_sample.items():
        layout[name] = (max_sampled, dtype)
    return layout


class _StagingSet:
    """Host buffers by name, as torch tensors and as numpy views of the same memory."""

    def __init__(
        self,
        device: Device,
        layout: dict[str, tuple[int, torch.dtype]],
        buffers: dict[str, torch.Tensor],
    ) -> None:
        """buffers: those on the device."""
        self._device = device
        self._buffers = buffers
        self.tensors = {
            name: device.host_buffer([size], dtype) for name, (size, dtype) in layout.items()
        }
        self.arrays = {name: tensor.numpy() for name, tensor in self.tensors.items()}
        self.fence: Fence | None = None

    def wait(self) -> None:
        """Until the device has read what this set last held."""
        if self.fence is not None:
            self.fence.wait()

    def take(self, name: str, length: int) -> torch.Tensor:
        """Its first elements, where the device reads them."""
        return self._device.stage(self.tensors[name][:length], self._buffers[name][:length])

    def long(self, name: str, values: np.ndarray) -> torch.Tensor:
        self.arrays[name][: len(values)] = values
        return self.take(name, len(values))
