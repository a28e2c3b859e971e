"""Parts that need no socket: outbox, admission, the status table, validation."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from frontend import status
from frontend.admission import Admission
from frontend.request import (
    ChatMessage,
    ChatPrompt,
    GenerateCall,
    IdsPrompt,
    SamplingCall,
    TextPrompt,
)
from frontend.stream import Delta, Finish, Outbox, SequenceEnd
from frontend.validate import GREEDY_BELOW, Limits, estimate_tokens, fit_context, validate
from pagewire import errors
from pagewire.errors import InvalidRequest, QueueFull, Unavailable
from pagewire.types import FinishReason, Timings, Usage

FINISH = Finish(
    request_id="r",
    model="m",
    outputs=(SequenceEnd(0, FinishReason.STOP, 1),),
    usage=Usage(1, 1, 0),
    timings=Timings(0, 0, 0),
    seed=0,
)
LIMITS = Limits(
    model="m",
    max_model_len=100,
    vocab_size=50,
    eos_token_ids=(2,),
    default_sampling={"temperature": 0.6, "top_k": 20},
    has_chat_template=True,
)


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


# Outbox.


async def test_outbox_merges_what_is_not_taken() -> None:
    outbox = Outbox()
    outbox.put("a", [1])
    outbox.put("", [2])
    outbox.put("bc", [])
    outbox.put("", [])
    assert await outbox.take() == Delta("abc", [1, 2])
    outbox.put("d")
    outbox.finish(FINISH)
    assert await outbox.take() == Delta("d", [])
    assert await outbox.take() is FINISH


async def test_outbox_wakes_its_reader() -> None:
    outbox = Outbox()
    reader = asyncio.ensure_future(outbox.take())
    await asyncio.sleep(0)
    outbox.put("", ())
    await asyncio.sleep(0)
    assert not reader.done()
    outbox.put("x")
    outbox.put("y")
    assert await reader == Delta("xy", [])


async def test_outbox_gives_the_rest_before_the_error() -> None:
    outbox = Outbox()
    outbox.put("x")
    outbox.fail(Unavailable("engine_dead", "gone"))
    outbox.fail(errors.Cancelled("later"))
    assert await outbox.take() == Delta("x", [])
    with pytest.raises(Unavailable):
        await outbox.take()


async def test_outbox_whole() -> None:
    outbox = Outbox()
    reader = asyncio.ensure_future(outbox.take_all())
    for text in "abc":
        outbox.put(text, [ord(text)])
        await asyncio.sleep(0)
    outbox.finish(FINISH)
    assert await reader == ([Delta("abc", [97, 98, 99])], FINISH)


# Admission.


def test_admission_bounds_requests() -> None:
    admission = Admission(2, 1000, clock=Clock())
    first = admission.reserve(10)
    admission.reserve(10)
    with pytest.raises(QueueFull) as raised:
        admission.reserve(1)
    assert raised.value.queue_depth == 2
    first.release()
    first.release()
    assert (admission.requests, admission.queued_tokens) == (1, 10)
    admission.reserve(1)


def test_admission_bounds_tokens_until_first_output() -> None:
    rejected: list[str] = []
    admission = Admission(100, 50, clock=Clock(), on_reject=rejected.append)
    first = admission.reserve(30)
    with pytest.raises(QueueFull):
        admission.reserve(21)
    first.correct(40)
    with pytest.raises(QueueFull):
        admission.reserve(11)
    first.first_output()
    second = admission.reserve(50)
    first.correct(99)
    first.release()
    second.release()
    second.correct(7)
    assert (admission.requests, admission.queued_tokens) == (0, 0)
    assert rejected == ["max_num_queued_tokens"] * 2


def test_a_prompt_over_the_bound_enters_alone() -> None:
    admission = Admission(100, 50, clock=Clock())
    big = admission.reserve(80)
    with pytest.raises(QueueFull):
        admission.reserve(1)
    big.release()
    admission.reserve(80)


def test_retry_after_follows_the_measured_rate() -> None:
    clock = Clock()
    admission = Admission(64, 10_000, clock=clock)
    assert admission.retry_after() == 1.0
    for _ in range(32):
        admission.reserve(1).release(completed=True)
        clock.now += 0.5
    assert admission.retry_after() == pytest.approx(0.5)
    held = [admission.reserve(1) for _ in range(64)]
    with pytest.raises(QueueFull) as raised:
        admission.reserve(1)
    # An eighth of 64 requests at two a second.
    assert raised.value.retry_after == pytest.approx(4.0)
    clock.now += 1000
    assert admission.retry_after() == 1.0
    for reservation in held:
        reservation.release()


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 60)), max_size=60))
def test_admission_never_overshoots_nor_leaks(moves: list[tuple[int, int]]) -> None:
    admission = Admission(5, 100, clock=Clock())
    held = []
    for move, tokens in moves:
        if move <= 1:
            before = admission.queued_tokens
            try:
                held.append(admission.reserve(tokens))
            except QueueFull:
                assert admission.requests == 5 or before + tokens > 100
            else:
                assert before == 0 or admission.queued_tokens <= 100
        elif held and move == 2:
            held.pop(tokens % len(held)).release()
        elif held:
            held[tokens % len(held)].first_output()
        assert 0 <= admission.requests <= 5
        assert admission.queued_tokens >= 0
    for reservation in held:
        reservation.release()
    assert (admission.requests, admission.queued_tokens) == (0, 0)


# Status.


def test_every_error_has_a_status() -> None:
    classes = [
        c
        for c in vars(errors).values()
        if isinstance(c, type) and issubclass(c, errors.PagewireError)
    ]
    assert {c.code for c in classes} == set(status.STATUS)
    assert grpc.StatusCode.UNKNOWN not in status.STATUS.values()


def test_trailers_stay_small() -> None:
    error = InvalidRequest("prompt", "é" * 100_000)
    rich = status.rich_status(error, "id")
    assert len(rich.message.encode()) + sum(len(v) for _, v in rich.trailing_metadata) < 8000


def test_unavailable_without_a_retry_says_nothing_of_one() -> None:
    rich = status.rich_status(Unavailable("draining", "bye"))
    assert [key for key, _ in rich.trailing_metadata] == [status.DETAILS_KEY]


# Validation.


def job(**fields: object) -> object:
    call = GenerateCall(prompt=TextPrompt("x"), sampling=SamplingCall(**fields))  # type: ignore[arg-type]
    return validate(call, LIMITS, "default").sampling


def test_defaults_come_from_the_model() -> None:
    sampling = validate(GenerateCall(prompt=TextPrompt("x")), LIMITS, "default").sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p) == (0.6, 20, 1.0)


# vllm-project/vllm#17553
@pytest.mark.parametrize("default", [0.0, -1.0])
def test_top_k_may_be_off_in_the_models_defaults(default: float) -> None:
    limits = replace(LIMITS, default_sampling={"top_k": default})
    assert validate(GenerateCall(prompt=TextPrompt("x")), limits, "default").sampling.top_k == 0


# vllm-project/vllm#2937, NVIDIA/TensorRT-LLM#16222
def test_a_tiny_temperature_is_greedy() -> None:
    assert job(temperature=GREEDY_BELOW / 2).temperature == 0  # type: ignore[attr-defined]
    assert job(temperature=GREEDY_BELOW * 2).temperature > 0  # type: ignore[attr-defined]


def test_max_tokens_fills_the_context() -> None:
    made = validate(GenerateCall(prompt=IdsPrompt([1] * 99)), LIMITS, "default")
    assert fit_context(made, 99, 100).max_tokens == 1
    with pytest.raises(InvalidRequest):
        fit_context(made, 100, 100)


def test_estimates() -> None:
    assert estimate_tokens(TextPrompt("x" * 80), 1000) == 21
    assert estimate_tokens(TextPrompt("x" * 8000), 1000) == 1000
    assert estimate_tokens(IdsPrompt([1, 2]), 1000) == 2
    chat = ChatPrompt((ChatMessage("user", "x" * 40), ChatMessage("user", "")))
    assert estimate_tokens(chat, 1000) == 26
