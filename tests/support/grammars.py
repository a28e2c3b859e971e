"""Grammars over the embedded model's vocabulary, and texts drawn from random logits."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import numpy as np
import torch

from engine_core.grammar.compiler import GrammarCompiler
from engine_core.grammar.vocabulary import Vocabulary, read_vocabulary
from engine_core.runner.rows import Rows
from engine_core.runner.structured import StructuredOutputs
from engine_core.sched.plan import NewSeq, StepPlan
from pagewire.config import EMBEDDED_MODEL
from pagewire.model_source import resolve_model
from pagewire.types import SamplingParams, StructuredOutput

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from engine_core.grammar.grammar import Grammar

VOCAB_SIZE = 49152
EOS = 2


@cache
def vocabulary() -> Vocabulary:
    return read_vocabulary(resolve_model(EMBEDDED_MODEL), VOCAB_SIZE)


@cache
def compiler() -> GrammarCompiler:
    return GrammarCompiler(vocabulary, (EOS,))


def choice(*texts: str) -> StructuredOutput:
    return StructuredOutput("choice", json.dumps(texts))


def schema(of: object) -> StructuredOutput:
    return StructuredOutput("json_schema", json.dumps(of))


@dataclass
class Drawn:
    ids: list[int]
    """Without the end of sequence."""
    ended: bool

    @property
    def text(self) -> str:
        return b"".join(vocabulary().tokens[token_id] for token_id in self.ids).decode()


def draw(
    grammar: Grammar,
    seeds: Sequence[int],
    *,
    max_tokens: int = 200,
    bias: Mapping[int, float] | None = None,
) -> list[Drawn]:
    """One sequence for each seed, in one batch, from logits of the standard Gumbel
    distribution (all allowed tokens are equally likely) plus bias."""
    rows = Rows(len(seeds), max_tokens + 2, 16)
    processor = StructuredOutputs(rows, ())
    new = tuple(
        NewSeq(row, (5, 6), 2, SamplingParams(max_tokens), None, grammar)
        for row in range(len(seeds))
    )
    rows.apply(StepPlan(1, (), new, ()))
    assert all([processor.admit(seq) for seq in new])  # noqa: C419
    generators = [np.random.default_rng(seed) for seed in seeds]
    drawn = [Drawn([], ended=False) for _ in seeds]
    running = list(range(len(seeds)))
    for _ in range(max_tokens):
        logits = torch.from_numpy(
            np.stack([generators[row].gumbel(size=VOCAB_SIZE) for row in running])
        ).float()
        for token_id, value in (bias or {}).items():
            logits[:, token_id] += value
        processor.apply(logits, running)
        best, ids = logits.max(dim=1)
        assert best.isfinite().all(), "nothing may follow"
        for row, token_id in zip(running, ids.tolist(), strict=True):
            if token_id == EOS:
                drawn[row].ended = True
                continue
            drawn[row].ids.append(token_id)
            rows.token_ids[row, rows.num_tokens[row]] = token_id
            rows.num_tokens[row] += 1
        running = [row for row in running if not drawn[row].ended]
        if not running:
            break
    return drawn
