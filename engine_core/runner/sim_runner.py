"""Runs plans on no model: the device takes its time, and the ids are made up."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from engine_core.device.roofline import StepWork, step_seconds
from engine_core.runner.batch import BatchBuilder
from engine_core.runner.model_runner import PendingModelStep
from engine_core.runner.rows import Rows

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from engine_core.device.roofline import Gpu, ModelCost
    from engine_core.device.sim import SimDevice
    from engine_core.sched.plan import StepPlan
    from pagewire.types import SamplingParams

_MOST_IDS = 4096


class SimRunner:
    """A Runner (engine_core/runner/base.py) on a SimDevice.

    The host does all that it does for a real device, up to the tensors of the batch.
    An id drawn is a hash of (seed, output position, sample index), taken from
    `token_ids` or from the request's allowed_token_ids; the seed is 0 where the
    temperature is. So it is the same whatever is batched, preempted or replayed.
    """

    def __init__(
        self,
        gpu: Gpu | None,
        model: ModelCost,
        device: SimDevice,
        token_ids: Sequence[int],
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        block_size: int,
    ) -> None:
        """gpu None takes no time. token_ids: at least one."""
        self._gpu = gpu
        self._model = model
        self._device = device
        self._rows = Rows(max_num_seqs, max_model_len, block_size)
        self._builder = BatchBuilder(self._rows, device, max_num_seqs, max_num_batched_tokens)
        self._token_ids = np.array(token_ids, np.int64)
        self._allowed: dict[int, np.ndarray] = {}
        """Row -> the ids that it is drawn from, where the request names them."""

    def launch(self, plan: StepPlan) -> PendingModelStep:
        self._rows.apply(plan)
        for row in plan.freed_rows:
            self._allowed.pop(row, None)
        for new in plan.new_seqs:
            if new.sampling.allowed_token_ids is not None:
                self._allowed[new.row] = np.array(new.sampling.allowed_token_ids, np.int64)
        if not plan.seqs:
            return PendingModelStep(self._rows, np.empty(0, np.int64), None, None)
        batch = self._builder.build(plan)
        rows = batch.sampling_rows
        if self._gpu is not None:
            attention = batch.inputs.attention
            seq_lens = attention.seq_lens_host.numpy()
            num_new = np.diff(attention.query_start_loc_host.numpy())
            num_copied = len(plan.moves.copy) * self._rows.block_size
            work = step_work(seq_lens, num_new, len(rows), num_copied)
            self._device.run(step_seconds(self._gpu, self._model, work))
        fetch = None
        if len(rows):
            fetch = self._device.fetch(torch.from_numpy(self._draw(rows)))
        return PendingModelStep(self._rows, rows, fetch, None)

    def _draw(self, rows: np.ndarray) -> np.ndarray:
        state = self._rows
        seed = np.where(state.temperature[rows] > 0, state.seed[rows], np.uint64(0))
        position = (state.num_tokens[rows] - state.num_prompt_tokens[rows]).astype(np.uint64)
        numbers = _mix(_mix(_mix(seed) ^ state.sample_index[rows].astype(np.uint64)) ^ position)
        drawn: np.ndarray = self._token_ids[numbers % np.uint64(len(self._token_ids))]
        if self._allowed:
            for at, row in enumerate(rows.tolist()):
                allowed = self._allowed.get(row)
                if allowed is not None:
                    drawn[at] = allowed[int(numbers[at]) % len(allowed)]
        return drawn


def step_work(
    seq_lens: np.ndarray, num_new: np.ndarray, num_sampled: int, num_copied_tokens: int = 0
) -> StepWork:
    """seq_lens [R]: tokens with those of the step; num_new [R]: those of the step."""
    lens, new = seq_lens.astype(np.int64), num_new.astype(np.int64)
    # Each of a sequence's new tokens sees those before it, and itself.
    pairs = new * (lens - new) + new * (new + 1) // 2
    return StepWork(
        int(new.sum()), num_sampled, int(lens.sum()), int(pairs.sum()), num_copied_tokens
    )


def _mix(values: np.ndarray) -> np.ndarray:
    """The finalizer of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014), uint64 -> uint64."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: np.ndarray = values ^ (values >> np.uint64(31))
    return mixed


def printable_ids(text_bytes: Sequence[bytes], excluded: Collection[int]) -> list[int]:
    """Ids whose text stands by itself, so that any of them in a row make a text: words
    with a space before them if there are any, else whatever is printable."""
    printable = {
        index: text
        for index, token in enumerate(text_bytes)
        if index not in excluded and (text := _text(token)).isprintable() and text
    }
    words = [index for index, text in printable.items() if text[0] == " " and text[1:].isalpha()]
    return (words or list(printable))[:_MOST_IDS]


def _text(token: bytes) -> str:
    try:
        return token.decode()
    except UnicodeDecodeError:
        return ""


def find_unsimulated(sampling: SamplingParams) -> tuple[str, str] | None:
    """(field, what is wrong with it) of what would have to be computed to be true; None if
    all is well. What only shapes a distribution, such as temperature, changes nothing here."""
    asked = {
        "structured_output": sampling.structured_output is not None,
        "logprobs": sampling.logprobs is not None,
        "prompt_logprobs": sampling.prompt_logprobs is not None,
        "beam_search": sampling.beam is not None,
        "logit_bias": bool(sampling.logit_bias),
        "bad_words": bool(sampling.bad_words),
        # Nothing keeps an id that ends the output from being drawn.
        "min_tokens": sampling.min_tokens > 0
        and (bool(sampling.stop_token_ids) or sampling.allowed_token_ids is not None),
    }
    for name, is_asked in asked.items():
        if is_asked:
            beside = " beside stop_token_ids or allowed_token_ids" if name == "min_tokens" else ""
            return f"sampling_params.{name}", f"{name}{beside} is not simulated"
    return None
