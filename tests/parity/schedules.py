"""Requests of many kinds that come, go and are cancelled at given turns of an engine."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from engine_core.grammar.compiler import GrammarCompiler
from engine_core.grammar.gate import GrammarGate
from engine_core.grammar.vocabulary import read_vocabulary
from pagewire.model_source import resolve_model
from pagewire.types import FinishReason
from pagewire.wire.codec import pack_ids
from pagewire.wire.messages import Add
from tests.parity.harness import EPOCH, FRONTEND_ID, rows_of

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from pagewire.types import SamplingParams
    from pagewire.wire.messages import Beam, Finished, PositionLogprobs, StepOutput
    from tests.parity.harness import Engine


@dataclass(eq=False)
class Asked:
    """A request to come."""

    prompt: list[int]
    sampling: SamplingParams
    arrives: int = 0
    """The turn."""
    aborts: int | None = None
    priority: int = 0
    tenant: str = ""
    cache_salt: str = ""
    skip_prefix_cache: bool = False
    sample_index: int = 0
    leader: Asked | None = None
    """Another sequence of the same request, which came before."""


@dataclass
class Answer:
    ids: list[int] = field(default_factory=list)
    output: list[PositionLogprobs] = field(default_factory=list)
    prompt: list[PositionLogprobs] = field(default_factory=list)
    finished: Finished | None = None

    @property
    def reason(self) -> FinishReason:
        assert self.finished is not None
        return FinishReason(self.finished.reason)

    @property
    def beams(self) -> tuple[Beam, ...]:
        assert self.finished is not None
        return self.finished.beams


class Grammars:
    """A gate over a model's tokenizer, and the wake-ups of its thread."""

    def __init__(self, model: Path, vocab_size: int, eos: int) -> None:
        source = resolve_model(str(model))
        compiler = GrammarCompiler(lambda: read_vocabulary(source, vocab_size), (eos,))
        self.gate = GrammarGate(compiler.compile)
        self.woken = threading.Semaphore(0)
        self.gate.set_wake(self.woken.release)


def serve(engine: Engine, asked: Sequence[Asked], grammars: Grammars) -> list[Answer]:
    """All of them, to their ends, with the bookkeeping checked at every turn."""
    numbers = {one: number for number, one in enumerate(asked)}
    answers = [Answer() for _ in asked]
    last_arrival = max(one.arrives for one in asked)
    turn = 0
    while turn <= last_arrival or any(answer.finished is None for answer in answers):
        for number, one in enumerate(asked):
            if one.arrives == turn:
                engine.core.add(FRONTEND_ID, _add(number, one, numbers), 0.0)
        if turn > last_arrival and not engine.core.has_work():
            assert grammars.woken.acquire(timeout=20), "it waits for nothing"
            continue
        cancelled = [number for number, one in enumerate(asked) if one.aborts == turn]

        def poll(cancelled: list[int] = cancelled) -> None:
            engine.core.abort(FRONTEND_ID, cancelled, 0.0)

        for output in engine.core.step(poll).values():
            _take(output, answers)
        engine.core.check_integrity()
        turn += 1
    assert not engine.core.has_work()
    engine.kv_manager.check_all_free()
    return answers


def _add(number: int, one: Asked, numbers: dict[Asked, int]) -> Add:
    return Add(
        request_id=number,
        epoch=EPOCH,
        token_ids=pack_ids(one.prompt),
        num_output_tokens=0,
        sampling=one.sampling,
        priority=one.priority,
        tenant=one.tenant,
        cache_salt=one.cache_salt,
        skip_prefix_cache=one.skip_prefix_cache,
        sample_index=one.sample_index,
        leader_id=None if one.leader is None else numbers.get(one.leader),
    )


def _take(output: StepOutput, answers: list[Answer]) -> None:
    for number, token_ids in rows_of(output):
        answers[number].ids += token_ids
    for logprobs in output.logprobs:
        answers[logprobs.request_id].output += logprobs.output
        answers[logprobs.request_id].prompt += logprobs.prompt
    for finished in output.finished:
        assert answers[finished.request_id].finished is None, "two outcomes"
        answers[finished.request_id].finished = finished
