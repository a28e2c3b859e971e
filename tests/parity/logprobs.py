"""Asking an engine for logprobs, and holding them against transformers' log softmax."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from pagewire.types import FinishReason
from pagewire.wire.codec import pack_ids, unpack_ids, unpack_request_ids
from pagewire.wire.messages import Add
from tests.parity.harness import EPOCH, FRONTEND_ID, Engine

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pagewire.types import SamplingParams
    from pagewire.wire.messages import PositionLogprobs

TOLERANCE = 1e-4
_STEP_LIMIT = 5000


@dataclass
class Answer:
    prompt: list[int]
    sampling: SamplingParams
    ids: list[int] = field(default_factory=list)
    output: list[PositionLogprobs] = field(default_factory=list)
    prompts: list[tuple[PositionLogprobs, ...]] = field(default_factory=list)
    num_cached_tokens: int = -1


def ask(engine: Engine, requests: Sequence[tuple[Sequence[int], SamplingParams]]) -> list[Answer]:
    """All at once, to their ends."""
    answers = {i: Answer(list(prompt), sampling) for i, (prompt, sampling) in enumerate(requests)}
    for request_id, answer in answers.items():
        add = Add(request_id, EPOCH, pack_ids(answer.prompt), 0, answer.sampling)
        engine.core.add(FRONTEND_ID, add, received_at=0.0)
    for _ in range(_STEP_LIMIT):
        if not engine.core.has_work():
            engine.kv_manager.check_all_free()
            return list(answers.values())
        for output in engine.core.step(lambda: None).values():
            _take(output, answers)
    raise AssertionError(f"not finished after {_STEP_LIMIT} steps")


def _take(output: Any, answers: dict[int, Answer]) -> None:
    ids = unpack_request_ids(output.request_ids)
    for request_id, token_id in zip(ids, unpack_ids(output.token_ids), strict=True):
        answers[request_id].ids.append(token_id)
    for logprobs in output.logprobs:
        answers[logprobs.request_id].output += logprobs.output
        if logprobs.prompt:
            answers[logprobs.request_id].prompts.append(logprobs.prompt)
    for finished in output.finished:
        assert finished.reason in (FinishReason.LENGTH, FinishReason.STOP), finished
        answers[finished.request_id].num_cached_tokens = finished.num_cached_tokens


def check_against(model: Any, answer: Answer, tolerance: float = TOLERANCE) -> None:
    """That an answer has what it asked for, at every position, as transformers has it."""
    sampling = answer.sampling
    with torch.inference_mode():
        logits = model(torch.tensor([answer.prompt + answer.ids])).logits[0]
    # Row i is what the first i + 1 tokens say of the next.
    expected = torch.log_softmax(logits.float(), dim=-1)
    if sampling.logprobs is None:
        assert answer.output == []
    else:
        rows = expected[len(answer.prompt) - 1 : -1]
        check_positions(answer.output, answer.ids, rows, sampling.logprobs, tolerance)
    if sampling.prompt_logprobs is None:
        assert answer.prompts == []
    else:
        (positions,) = answer.prompts
        assert (positions[0].token_id, positions[0].top_ids) == (-1, ())
        rows = expected[: len(answer.prompt) - 1]
        check_positions(positions[1:], answer.prompt[1:], rows, sampling.prompt_logprobs, tolerance)


def check_positions(
    positions: Sequence[PositionLogprobs],
    token_ids: Sequence[int],
    expected: torch.Tensor,
    top: int,
    tolerance: float,
) -> None:
    """expected: [N, V]."""
    assert len(positions) == len(token_ids) == len(expected)
    for at, (position, token_id, row) in enumerate(
        zip(positions, token_ids, expected, strict=True)
    ):
        assert position.token_id == token_id, at
        assert abs(position.logprob - row[token_id].item()) < tolerance, at
        # Neighbours closer than the tolerance may change places.
        surely_likelier = int((row > row[token_id] + tolerance).sum())
        perhaps_likelier = int((row > row[token_id] - tolerance).sum())
        assert surely_likelier < position.rank <= max(perhaps_likelier, 1), at
        assert len(position.top_ids) == len(set(position.top_ids)) == top, at
        if top == 0:
            assert position.top_logprobs == (), at
            continue
        ours = torch.tensor(position.top_logprobs)
        assert ours.tolist() == sorted(position.top_logprobs, reverse=True), at
        assert (ours - row.topk(top).values).abs().max().item() < tolerance, at
        ids = torch.tensor(position.top_ids, dtype=torch.int64)
        assert (ours - row[ids]).abs().max().item() < tolerance, at
