"""The engine in this process: scheduler, core and runner, without frontends."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from engine_core.core import EngineCore
from engine_core.engine_builder import build_engine
from engine_core.kv.manager import KVManager
from engine_core.sched.limits import SchedulerLimits
from engine_core.sched.scheduler import Scheduler
from pagewire.config import EngineConfig
from pagewire.types import FinishReason
from pagewire.wire.codec import pack_ids, unpack_ids, unpack_request_ids
from pagewire.wire.messages import Add

if TYPE_CHECKING:
    from pathlib import Path

    from pagewire.types import SamplingParams
    from pagewire.wire.messages import PositionLogprobs
    from scripts.gpu_check.measure import Bench

_FRONTEND_ID, _EPOCH = 1, 1
_FILLER = 8192
"""Rows of the product that keeps the device busy while a step is queued behind it."""
_FILLERS = 8


@dataclass(slots=True)
class Answer:
    ids: list[int] = field(default_factory=list)
    logprobs: list[PositionLogprobs] = field(default_factory=list)


class Engine:
    """Raises what build_engine raises."""

    def __init__(self, model: Path, bench: Bench, **settings: Any) -> None:
        """settings: fields of EngineConfig."""
        self._bench = bench
        config = EngineConfig(
            model=str(model), device="cuda" if bench.is_cuda else "cpu", **settings
        )
        self._built = built = build_engine(config, lambda stage, done, total: None)
        limits = SchedulerLimits(
            built.max_num_seqs,
            built.max_num_batched_tokens,
            built.max_model_len,
            built.vocab_size,
            built.eos_token_ids,
        )
        self._core = EngineCore(
            Scheduler(
                limits,
                KVManager(built.num_blocks, built.block_size, False),
                prefill_budget=built.prefill_budget,
            ),
            built.runner,
            epoch=_EPOCH,
            async_scheduling=built.async_scheduling,
        )
        self._next_id = 0
        self._answers: dict[int, Answer] = {}
        self._launch = built.runner.launch
        self._spans: list[Any] | None = None
        """Of launches, while they are measured."""
        built.runner.launch = self._measured_launch  # type: ignore[method-assign]

    def add(self, prompt: list[int], sampling: SamplingParams) -> Answer:
        add = Add(self._next_id, _EPOCH, pack_ids(prompt), 0, sampling)
        answer = self._answers[self._next_id] = Answer()
        self._next_id += 1
        self._core.add(_FRONTEND_ID, add, time.monotonic())
        return answer

    def step(self) -> None:
        for output in self._core.step(lambda: None).values():
            ids = unpack_request_ids(output.request_ids)
            for request_id, token_id in zip(ids, unpack_ids(output.token_ids), strict=True):
                self._answers[request_id].ids.append(token_id)
            for drawn in output.logprobs:
                self._answers[drawn.request_id].logprobs += drawn.output
            for finished in output.finished:
                assert finished.reason == FinishReason.LENGTH, finished

    def run(self) -> None:
        """Until every request has ended."""
        while self._core.has_work():
            self.step()
        self._core.check_integrity()
        self._answers.clear()

    def step_seconds(self, steps: int) -> float:
        """Wall time of a step, the mean."""
        began = time.perf_counter()
        for _ in range(steps):
            self.step()
        return (time.perf_counter() - began) / steps

    def device_seconds(self, steps: int) -> float:
        """What the device alone takes over a step, the median: each is queued whole while the
        device is still busy with something else, so it never waits for the host."""
        self._spans = []
        for _ in range(steps):
            self.step()
        spans, self._spans = self._spans, None
        self._bench.wait()
        seconds = [
            span if isinstance(span, float) else span[0].elapsed_time(span[1]) / 1e3
            for span in spans
        ]
        return sorted(seconds)[len(seconds) // 2]

    def _measured_launch(self, plan: Any) -> Any:
        if self._spans is None:
            return self._launch(plan)
        if not self._bench.is_cuda:
            began = time.perf_counter()
            pending = self._launch(plan)
            self._spans.append(time.perf_counter() - began)
            return pending
        filler = torch.ones(_FILLER, _FILLER, dtype=torch.bfloat16, device="cuda")
        for _ in range(_FILLERS):
            torch.mm(filler, filler)
        start: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        end: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        start.record()
        pending = self._launch(plan)
        end.record()
        self._spans.append((start, end))
        return pending
