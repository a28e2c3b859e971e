"""Runs plans on the model."""

from __future__ import annotations

import math
import time
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch

from engine_core.kv.restore_policy import MeasuredCosts
from engine_core.runner.batch import BatchBuilder
from engine_core.runner.draft_model import DraftModel
from engine_core.runner.graphs import DecodeGraphs
from engine_core.runner.logits import LogitsProcessors
from engine_core.runner.logprobs import StepReporter
from engine_core.runner.offload import NO_TIMES
from engine_core.runner.per_row import upload
from engine_core.runner.profile import run_dummy_step, run_verifying_step
from engine_core.runner.rows import Rows
from engine_core.runner.verification import Verification
from engine_core.sched.plan import StepResult
from engine_core.sched.step_costs import MEASURED_SIZES

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from engine_core.device.base import Device, Fetch
    from engine_core.model.decoder import DecoderModel
    from engine_core.model.inputs import KVCaches
    from engine_core.runner.offload import HostKV, MoveTimes
    from engine_core.sched.plan import BlockMoves, StepPlan
    from kernels.ops import Ops

_WARM_UP_TOKENS = 32
_MEASURED_TOKENS = 256
_ROUNDS = 3


class ModelRunner:
    """A Runner (engine_core/runner/base.py) for one model on one device."""

    def __init__(
        self,
        model: DecoderModel,
        ops: Ops,
        device: Device,
        kv_caches: KVCaches,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        host_kv: HostKV | None = None,
        graph_sizes: Sequence[int] = (),
        max_sampled_tokens: int | None = None,
    ) -> None:
        """host_kv: where plans offload KV blocks to; without it they have no such moves.
        graph_sizes: of decode batches that are captured, ascending, on a device that can.
        max_sampled_tokens: drawn in a step, if not one for each sequence at most."""
        self._model = model
        self._ops = ops
        self._device = device
        self._kv_caches = kv_caches
        self._host_kv = host_kv
        self._rows = Rows(max_num_seqs, max_model_len, block_size=kv_caches[0].k.shape[1])
        self._builder = BatchBuilder(
            self._rows, device, max_num_seqs, max_num_batched_tokens, max_sampled_tokens
        )
        self._processors = LogitsProcessors(self._rows, model.config.eos_token_ids, ops)
        self._graph_sizes = graph_sizes
        self._graphs = DecodeGraphs(model, device, kv_caches, self._builder, ())
        self.draft_model: DraftModel | None = None
        """Where guesses come from, if plans leave them to the runner."""
        self._unread: list[PendingModelStep] = []
        """Steps whose ids may still be on the device only."""
        self._max_num_batched_tokens = max_num_batched_tokens
        self._max_model_len = max_model_len
        # Where ids are fetched late, the next step reads them here.
        self._last_ids = (
            None
            if device.is_synchronous
            else torch.zeros(max_num_seqs, dtype=torch.int64, device=device.torch_device)
        )

    def add_draft_model(self, model: DecoderModel, ops: Ops, kv_caches: KVCaches) -> None:
        """kv_caches: of as many blocks, of the same size, as the model's."""
        self.draft_model = DraftModel(model, ops, self._device, kv_caches, self._rows)

    def warm_up(self) -> None:
        """One step of each kind, so that the first request does not pay for first calls,
        and the graphs."""
        for num_seqs in (1, _WARM_UP_TOKENS):
            num_tokens = min(_WARM_UP_TOKENS, self._max_num_batched_tokens)
            self._run_dummy_step(num_tokens, num_seqs)
        self._graphs = DecodeGraphs(
            self._model, self._device, self._kv_caches, self._builder, self._graph_sizes
        )

    def measure_kv_costs(self) -> MeasuredCosts:
        """What restoring a block from host_kv takes, and what computing a token does."""
        assert self._host_kv is not None
        num_tokens = min(_MEASURED_TOKENS, self._max_num_batched_tokens, self._max_model_len)
        timer = self._device.timer()
        self._run_dummy_step(num_tokens, 1)
        timer.stop()
        self._device.fence().wait()
        return MeasuredCosts(self._host_kv.measure_restore(), timer.seconds() / num_tokens)

    def measure_step_costs(self, run: Callable[[int], None] | None = None) -> dict[int, float]:
        """run: a step of so many tokens. Default: of the model.

        Seconds of a step that draws from each of its tokens, by their number: the least of
        a few rounds over all sizes, as many on all ranks.

        Where the host computes it is CPU time, of all threads: only the ratios count, and
        these are then the same beside other processes."""
        if run is None:
            run = partial(run_verifying_step, self._model, self._ops, self._kv_caches)
        most = min(self._max_num_batched_tokens, self._max_model_len)
        sizes = [size for size in MEASURED_SIZES if size <= max(2, most)]
        costs = dict.fromkeys(sizes, math.inf)
        for _ in range(_ROUNDS):
            for size in sizes:
                timer, began_at = self._device.timer(), time.process_time()
                run(size)
                timer.stop()
                self._device.fence().wait()
                seconds = timer.seconds()
                if self._device.is_synchronous:
                    seconds = time.process_time() - began_at
                costs[size] = min(costs[size], seconds)
        return costs

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> PendingModelStep:
        self._rows.apply(plan)
        self._processors.follow(plan)
        if not plan.seqs:
            return PendingModelStep(self._rows, np.empty(0, np.int64), None, None)
        if plan.draft_steps:
            assert self.draft_model is not None, "guesses of a model that is not there"
            self.draft_model.run(plan.draft_steps)
        # Decodes come first, so that the last one tells of all.
        last = plan.seqs[-1]
        decodes = last.samples and last.num_new_tokens == 1
        graph_size = 0
        if decodes and not self._has_adapters(plan):
            graph_size = self._graphs.size_for(len(plan.seqs))
        batch = self._builder.build(plan, graph_size)
        if batch.late is not None:
            assert self._last_ids is not None
            batch.inputs.input_ids[batch.late.tokens] = self._last_ids[batch.late.rows]
        times = self._move_tiers(plan.moves)
        self._copy_blocks(plan.moves.copy)
        reporter = StepReporter(plan, self._rows, self._device, self._ops)
        if graph_size:
            hidden = self._graphs.replay(graph_size)[: len(plan.seqs)]
        else:
            hidden = self._model.hidden_states(batch.inputs, self._kv_caches)
        reporter.read_prompts(self._model, hidden)
        if batch.sampling is None:
            return PendingModelStep(self._rows, batch.sampling_rows, None, reporter, times=times)
        logits = self._model.logits(hidden, batch.inputs.sampling_tokens)
        reporter.keep(logits)
        if self._processors.read_ids_of(batch.sampling_rows):
            self._read_all()
        processed = self._processors.process(logits, batch.sampling_rows)
        sampled = self._ops.sample(processed.logits, batch.sampling)
        reporter.read_sampled(sampled)
        if self._last_ids is not None:
            self._last_ids[batch.sampling_rows_there] = sampled
        fetch = self._device.fetch(processed.mark_dead_ends(sampled))
        pending = PendingModelStep(
            self._rows,
            batch.sampling_rows,
            fetch,
            reporter,
            self._processors.release,
            times,
            Verification(plan, self._rows) if plan.has_drafts else None,
        )
        if self._device.is_synchronous:
            pending.result()
        else:
            self._unread = [step for step in self._unread if not step.is_read]
            self._unread.append(pending)
        return pending

    def _run_dummy_step(self, num_tokens: int, num_seqs: int) -> None:
        run_dummy_step(
            self._model, self._ops, self._kv_caches, num_tokens, num_seqs, self._max_model_len
        )

    def _has_adapters(self, plan: StepPlan) -> bool:
        """Graphs are of the base model."""
        adapted = self._rows.adapted
        return bool(adapted) and any(seq.row in adapted for seq in plan.seqs)

    def _move_tiers(self, moves: BlockMoves) -> MoveTimes:
        if not moves.offload and not moves.restore:
            return NO_TIMES
        assert self._host_kv is not None, "moves to or from a host tier that is not there"
        return self._host_kv.move(moves)

    def _copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        """The device runs it after all earlier steps and before this one, as its stream says."""
        if not copies:
            return
        sources, targets = upload(np.array(copies).T, self._device.torch_device)
        for cache in self._kv_caches:
            k_cache, v_cache, *scales = cache.paged
            self._ops.copy_blocks(k_cache, v_cache, sources, targets, *scales)

    def _read_all(self) -> None:
        """Waits for the ids that earlier steps have drawn: penalties and bad words
        depend on them. The device is at the current step's model meanwhile."""
        for step in self._unread:
            step.result()
        self._unread.clear()


class PendingModelStep:
    """Counts the sampled tokens in their rows at once, and fills in the ids when they arrive."""

    def __init__(
        self,
        rows: Rows,
        sampling_rows: np.ndarray,
        fetch: Fetch | None,
        reporter: StepReporter | None,
        release: Callable[[int], None] | None = None,
        times: MoveTimes = NO_TIMES,
        verification: Verification | None = None,
    ) -> None:
        """release: told each row that has drawn NO_TOKEN, and with which its request ends.
        verification: of draft tokens, where there are any."""
        self._rows = rows
        self._release = release
        self._verification = verification
        if verification is not None:
            sampling_rows = verification.rows
        self._sampling_rows = sampling_rows
        self._fetch = fetch
        self._reporter = reporter
        self._times = times
        self._result: StepResult | None = None
        if fetch is not None:
            self._tenancy = rows.tenancy[sampling_rows]
            self._positions = rows.num_tokens[sampling_rows]
            rows.append_unresolved(sampling_rows)

    @property
    def is_read(self) -> bool:
        return self._result is not None

    def result(self) -> StepResult:
        if self._result is None:
            ids: tuple[int, ...] = ()
            drawn: Sequence[int] = ()
            accepted: Mapping[int, tuple[int, ...]] = {}
            if self._fetch is not None:
                fetched = self._fetch.wait().numpy()
                drawn = fetched.tolist()
                if self._verification is not None:
                    verified = self._verification.read(drawn)
                    accepted, fetched = verified.accepted, np.array(verified.token_ids)
                    self._positions += self._rows.accept(
                        self._sampling_rows, self._tenancy, accepted
                    )
                dead = self._rows.resolve(
                    self._sampling_rows, self._tenancy, self._positions, fetched
                )
                if self._release is not None:
                    for row in dead.tolist():
                        self._release(row)
                ids = tuple(fetched.tolist())
            logprobs = None
            if self._reporter is not None:
                logprobs = self._reporter.result(drawn, accepted)
            self._result = StepResult(
                tuple(self._sampling_rows.tolist()),
                ids,
                logprobs,
                accepted,
                offload_s=self._times.offload_s,
                restore_s=self._times.restore_s,
            )
        return self._result
