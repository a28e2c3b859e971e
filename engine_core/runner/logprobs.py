"""Log probabilities of the model itself, for the rows that ask.

They come from the logits before temperature, penalties, masks and filters
touch them. A step in which no row asks costs nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from engine_core.runner.per_row import upload
from engine_core.runner.rows import NOT_ASKED
from engine_core.sched.plan import PromptChunk, StepLogprobs
from pagewire.wire.messages import PositionLogprobs

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from engine_core.device.base import Device, Fetch
    from engine_core.model.decoder import DecoderModel
    from engine_core.runner.rows import Rows
    from engine_core.sched.plan import StepPlan
    from kernels.ops import Ops

SLICE_ELEMENTS = 1 << 22
"""Logits that are held in float32 at once: 16 MiB, and four times that beside them to sort."""


class Report(NamedTuple):
    """N positions on the device."""

    values: torch.Tensor
    """[N, 1 + top] float32: the token's logprob, then the likeliest ones', best first."""
    numbers: torch.Tensor
    """[N, 1 + top] int64: the token's rank, then the likeliest ones' ids."""


def report(ops: Ops, logits: torch.Tensor, token_ids: torch.Tensor, top: int) -> Report:
    """logits [N, V] of any float type and token_ids [N] int64 -> Report.

    Of equally likely tokens the lower id comes first. A rank is 1 + the number
    of tokens that are strictly likelier, so equally likely tokens share one.
    """
    told = ops.token_logprobs(logits, token_ids, with_all=top > 0)
    own, ranks = told.values.unsqueeze(1), told.ranks.unsqueeze(1)
    logprobs = told.all_values
    if logprobs is None:
        return Report(own, ranks)
    ids = _top_ids(logprobs, top)
    return Report(torch.cat([own, logprobs.gather(1, ids)], dim=1), torch.cat([ranks, ids], dim=1))


def _top_ids(logprobs: torch.Tensor, top: int) -> torch.Tensor:
    """[N, V] float32 -> [N, top] int64.

    topk leaves open which of equal values it takes, and in which order. Ties
    that reach beyond the last place are rare in float32 and dear to settle; but
    where the device works by itself, to ask it for them would be dearer.
    """
    if logprobs.device.type != "cpu":
        return _top_ids_with_ties(logprobs, top)
    values, ids = logprobs.topk(top, dim=1)
    if ((logprobs >= values[:, -1:]).sum(dim=1) > top).any():
        return _top_ids_with_ties(logprobs, top)
    ids, by_id = ids.sort(dim=1)
    by_value = values.gather(1, by_id).argsort(dim=1, descending=True, stable=True)
    return ids.gather(1, by_value)


def _top_ids_with_ties(logprobs: torch.Tensor, top: int) -> torch.Tensor:
    """The same by keys that no two tokens share: value first, then the lower id."""
    bits = logprobs.view(torch.int32).long()
    # As integers, the bits of negative floats run backwards.
    order = torch.where(bits < 0, -(bits & 0x7FFF_FFFF), bits)
    vocab_size = logprobs.shape[1]
    keys = (order << 32) + torch.arange(vocab_size - 1, -1, -1, device=logprobs.device)
    return vocab_size - 1 - (keys.topk(top, dim=1).values & 0xFFFF_FFFF)


def sliced_report(ops: Ops, logits: torch.Tensor, token_ids: torch.Tensor, top: int) -> Report:
    """report() in slices of bounded memory."""
    step = slice_len(logits.shape[1])
    return _cat(
        [
            report(ops, logits[i : i + step], token_ids[i : i + step], top)
            for i in range(0, logits.shape[0], step)
        ]
    )


def slice_len(vocab_size: int) -> int:
    """Positions whose logits are looked at together."""
    return max(1, SLICE_ELEMENTS // vocab_size)


def _cat(reports: Sequence[Report]) -> Report:
    if len(reports) == 1:
        return reports[0]
    return Report(torch.cat([r.values for r in reports]), torch.cat([r.numbers for r in reports]))


@dataclass(frozen=True, slots=True)
class _Part:
    """A row's prompt positions [first, first + len(targets)) in this step.

    Batch tokens [start, start + len(targets)) predict them: each the one after it.
    """

    row: int
    first: int
    start: int
    targets: np.ndarray


class StepReporter:
    """One step's logprobs, from what is asked to what is told.

    Made once the rows have applied the plan, while sampled ids are not yet appended.
    """

    def __init__(self, plan: StepPlan, rows: Rows, device: Device, ops: Ops) -> None:
        self._device = device
        self._ops = ops
        self._asking: list[int] = []
        """[A] indices into the step's sampled tokens."""
        self._rows: list[int] = []
        self._tops: list[int] = []
        self._parts: list[_Part] = []
        self._part_tops: list[int] = []
        self._raw: torch.Tensor | None = None
        self._output: _PendingReport | None = None
        self._prompt: _PendingReport | None = None
        if rows.asking:
            self._read_plan(plan, rows)

    def _read_plan(self, plan: StepPlan, rows: Rows) -> None:
        sampling = [
            seq.row for seq in plan.seqs if seq.samples for _ in range(1 + len(seq.draft_token_ids))
        ]
        self._asking = [i for i, row in enumerate(sampling) if rows.logprobs[row] != NOT_ASKED]
        self._rows = [sampling[i] for i in self._asking]
        self._tops = rows.logprobs[self._rows].tolist()
        self._parts = _parts(plan, rows)
        self._part_tops = rows.prompt_logprobs[[part.row for part in self._parts]].tolist()

    @property
    def asked(self) -> bool:
        return bool(self._rows or self._parts)

    def read_prompts(self, model: DecoderModel, hidden: torch.Tensor) -> None:
        """Computes the logits of the prompt positions that are asked for, slice by slice."""
        if not self._parts:
            return
        tokens = self._upload(
            np.concatenate([np.arange(p.start, p.start + len(p.targets)) for p in self._parts])
        )
        targets = self._upload(np.concatenate([part.targets for part in self._parts]))
        vocab_size = model.config.vocab_size
        top, step = min(max(self._part_tops), vocab_size), slice_len(vocab_size)
        reports = []
        for i in range(0, len(tokens), step):
            logits = model.logits(hidden, tokens[i : i + step])
            reports.append(report(self._ops, logits, targets[i : i + step], top))
        self._prompt = _PendingReport(_cat(reports), self._device)

    def keep(self, logits: torch.Tensor) -> None:
        """logits [S, V] as the model gave them, before anything changes them in place."""
        if self._rows:
            self._raw = logits[self._upload(self._asking)]

    def read_sampled(self, sampled: torch.Tensor) -> None:
        """sampled [S] int64 on the device; keep() has been called."""
        if self._raw is None:
            return
        top = min(max(self._tops), self._raw.shape[1])
        token_ids = sampled[self._upload(self._asking)]
        told = sliced_report(self._ops, self._raw, token_ids, top)
        self._output = _PendingReport(told, self._device)
        self._raw = None

    def result(
        self, sampled_ids: Sequence[int], accepted: Mapping[int, Sequence[int]]
    ) -> StepLogprobs | None:
        """Waits for the device. sampled_ids [S] as they came from it; accepted as in
        StepResult."""
        if not self.asked:
            return None
        output = {}
        before: dict[int, tuple[PositionLogprobs, ...]] = {}
        if self._output is not None:
            ids = [sampled_ids[index] for index in self._asking]
            positions = self._output.positions(ids, self._tops)
            output = dict(zip(self._rows, positions, strict=True))
            if accepted:
                at = {row: self._rows.index(row) for row in output}
                for row, first in at.items():
                    end = first + len(accepted.get(row, ()))
                    before[row] = tuple(positions[first:end])
                    output[row] = positions[end]
        return StepLogprobs(output, self._prompt_chunks(), before)

    def _prompt_chunks(self) -> dict[int, PromptChunk]:
        if self._prompt is None:
            return {}
        ids = [token_id for part in self._parts for token_id in part.targets.tolist()]
        tops = [
            top
            for part, top in zip(self._parts, self._part_tops, strict=True)
            for _ in range(len(part.targets))
        ]
        positions = self._prompt.positions(ids, tops)
        chunks, end = {}, 0
        for part in self._parts:
            begin, end = end, end + len(part.targets)
            chunks[part.row] = PromptChunk(part.first, tuple(positions[begin:end]))
        return chunks

    def _upload(self, values: np.ndarray | list[int]) -> torch.Tensor:
        return upload(np.asarray(values, np.int64), self._device.torch_device)


def _parts(plan: StepPlan, rows: Rows) -> list[_Part]:
    """The prompt positions that this step's tokens predict and somebody wants.

    0        num_computed              num_computed + num_new
    |          | p: its logits predict p + 1  |
    wanted: p + 1 in [prompt_logprobs_from, num_prompt_tokens)
    """
    parts, start = [], 0
    for seq in plan.seqs:
        row, computed = seq.row, seq.num_computed_tokens
        if rows.prompt_logprobs[row] != NOT_ASKED:
            first = max(computed + 1, int(rows.prompt_logprobs_from[row]))
            end = min(computed + seq.num_new_tokens + 1, int(rows.num_prompt_tokens[row]))
            if first < end:
                targets = rows.token_ids[row, first:end].copy()
                parts.append(_Part(row, first, start + first - 1 - computed, targets))
        start += seq.num_new_tokens
    return parts


class _PendingReport:
    """A report on its way to the host."""

    def __init__(self, whole: Report, device: Device) -> None:
        self._values: Fetch = device.fetch(whole.values)
        self._numbers: Fetch = device.fetch(whole.numbers)

    def positions(self, ids: Sequence[int], tops: Sequence[int]) -> list[PositionLogprobs]:
        """ids and tops [N]: each position's token and how many likeliest it asked for."""
        values, numbers = self._values.wait().tolist(), self._numbers.wait().tolist()
        return [
            PositionLogprobs(
                int(token_id),
                value[0],
                number[0],
                tuple(number[1 : 1 + top]),
                tuple(value[1 : 1 + top]),
            )
            for token_id, top, value, number in zip(ids, tops, values, numbers, strict=True)
        ]
