"""min_tokens, penalties, bias, bad words and allowed ids: what is refused, what is sent."""

from __future__ import annotations

import asyncio
import math
from typing import TYPE_CHECKING, Any

import grpc
import pytest

from frontend.bad_words import variants
from frontend.logits_params import check_drawable
from frontend.request import GenerateCall, IdsPrompt, SamplingCall
from frontend.validate import Limits, fit_context, validate
from pagewire.errors import InvalidRequest
from pagewire.types import FinishReason, SamplingParams
from pagewire.v1 import common_pb2
from pagewire.wire.messages import Add
from tests.support.fake_tokenizer import ZERO

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.frontend.conftest import Stack

LIMITS = Limits(
    model="m",
    max_model_len=100,
    vocab_size=50,
    eos_token_ids=(2,),
    default_sampling={"repetition_penalty": 1.1},
    has_chat_template=False,
)
NAN, INF = math.nan, math.inf

REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"min_tokens": -1}, "min_tokens", "min_tokens is -1"),
    ({"min_tokens": 5, "max_tokens": 4}, "min_tokens", "min_tokens is 5, above max_tokens 4"),
    ({"repetition_penalty": 0.0}, "repetition_penalty", "repetition_penalty is 0"),
    ({"repetition_penalty": -1.0}, "repetition_penalty", "repetition_penalty is -1"),
    ({"repetition_penalty": NAN}, "repetition_penalty", "repetition_penalty is nan"),
    ({"repetition_penalty": INF}, "repetition_penalty", "repetition_penalty is inf"),
    ({"presence_penalty": NAN}, "presence_penalty", "presence_penalty is nan"),
    ({"presence_penalty": 2.01}, "presence_penalty", "must be in [-2, 2]"),
    ({"presence_penalty": -INF}, "presence_penalty", "presence_penalty is -inf"),
    ({"frequency_penalty": NAN}, "frequency_penalty", "frequency_penalty is nan"),
    ({"frequency_penalty": -2.01}, "frequency_penalty", "must be in [-2, 2]"),
    ({"logit_bias": ((50, 1.0),)}, "logit_bias", "token id 50 is outside the vocabulary of 50"),
    ({"logit_bias": ((-1, 1.0),)}, "logit_bias", "token id -1"),
    ({"logit_bias": ((3, NAN),)}, "logit_bias", "the bias of token id 3 is nan"),
    ({"logit_bias": ((3, 100.5),)}, "logit_bias", "must be in [-100, 100]"),
    ({"logit_bias": ((1, 0.0),) * 1025}, "logit_bias", "at most 1024"),
    ({"bad_words": ("a", "")}, "bad_words[1]", "a bad word has 0 characters"),
    ({"bad_words": ("a" * 257,)}, "bad_words[0]", "a bad word has 257 characters"),
    ({"bad_words": ("a",) * 65}, "bad_words", "at most 64"),
    ({"allowed_token_ids": ()}, "allowed_token_ids", "is empty"),
    ({"allowed_token_ids": (3, 50)}, "allowed_token_ids", "token id 50 at position 1"),
    ({"allowed_token_ids": (-3,)}, "allowed_token_ids", "token id -3"),
    ({"allowed_token_ids": (3,) * 51}, "allowed_token_ids", "the vocabulary has only 50"),
]


def job(**sampling: Any) -> Any:
    return validate(GenerateCall(IdsPrompt([1] * 90), SamplingCall(**sampling)), LIMITS, "r")


@pytest.mark.parametrize(("sampling", "field", "message"), REFUSED)
def test_refused(sampling: dict[str, Any], field: str, message: str) -> None:
    with pytest.raises(InvalidRequest) as raised:
        job(**sampling)
    assert raised.value.field == f"sampling_params.{field}"
    assert message in raised.value.message


def test_the_edges_are_accepted() -> None:
    sampling = job(
        min_tokens=4,
        max_tokens=4,
        repetition_penalty=1e-30,
        presence_penalty=-2.0,
        frequency_penalty=2.0,
        logit_bias=tuple((i, -100.0) for i in range(50)),
        bad_words=("a" * 256,) * 64,
        allowed_token_ids=tuple(range(50)),
    ).sampling
    assert sampling.allowed_token_ids == tuple(range(50))
    assert (sampling.min_tokens, sampling.repetition_penalty) == (4, 1e-30)


def test_the_models_own_repetition_penalty_is_the_default() -> None:
    assert job().sampling.repetition_penalty == 1.1
    assert job(repetition_penalty=1.0).sampling.repetition_penalty == 1.0


def test_min_tokens_must_fit_the_context() -> None:
    assert fit_context(job(min_tokens=10), 90, 100).max_tokens == 10
    with pytest.raises(InvalidRequest) as raised:
        fit_context(job(min_tokens=11), 90, 100)
    assert raised.value.field == "sampling_params.min_tokens"
    assert "room for 10 after the prompt of 90 tokens" in raised.value.message


@pytest.mark.parametrize(
    ("sampling", "drawable"),
    [
        ({"allowed_token_ids": (3, 2)}, True),
        ({"allowed_token_ids": (3, 2), "bad_words": ((3,),)}, True),
        ({"allowed_token_ids": (3, 2), "bad_words": ((3,),), "min_tokens": 1}, False),
        ({"allowed_token_ids": (3, 9), "stop_token_ids": (3, 9), "min_tokens": 1}, False),
        ({"allowed_token_ids": (3,), "bad_words": ((3, 4), (4, 3))}, True),
        ({"allowed_token_ids": (3,), "bad_words": ((4,), (3,))}, False),
    ],
)
def test_allowed_ids_that_are_all_banned(sampling: dict[str, Any], drawable: bool) -> None:
    params = SamplingParams(8, **sampling)
    if drawable:
        check_drawable(params, (2,))
        return
    with pytest.raises(InvalidRequest) as raised:
        check_drawable(params, (2,))
    assert raised.value.field == "sampling_params.allowed_token_ids"


@pytest.mark.parametrize(
    ("word", "texts"),
    [
        ("gorgeous", ["gorgeous", " gorgeous"]),
        (" gorgeous", ["gorgeous", " gorgeous"]),
        ("  two words", ["two words", " two words", "  two words"]),
        ("\n", ["\n", " \n"]),
        (" ", [" "]),
    ],
)
def test_variants_of_a_bad_word(word: str, texts: list[str]) -> None:
    assert variants(word) == texts


async def test_everything_reaches_the_engine(manual: Stack) -> None:
    params = common_pb2.SamplingParams(
        max_tokens=9,
        min_tokens=3,
        repetition_penalty=1.5,
        presence_penalty=-0.5,
        frequency_penalty=0.25,
        logit_bias={7: 1.5, 200: -100.0},
        bad_words=["ab", "c"],
        allowed_token_ids=common_pb2.TokenIds(ids=[65, 66]),
    )
    call = manual.open(prompt="x", sampling_params=params)
    [request] = await manual.engine.wait_running()
    sent = request.add.sampling
    assert (sent.min_tokens, sent.repetition_penalty) == (3, 1.5)
    assert (sent.presence_penalty, sent.frequency_penalty) == (-0.5, 0.25)
    assert dict(sent.logit_bias) == {7: 1.5, 200: -100.0}
    assert sent.bad_words == ((97, 98), (32, 97, 98), (99,), (32, 99))
    assert sent.allowed_token_ids == (65, 66)
    call.cancel()


@pytest.mark.parametrize(
    "prompt", [{"prompt": "x"}, {"prompt_token_ids": common_pb2.TokenIds(ids=[120])}]
)
async def test_bad_words_are_tokenized_beside_the_prompt(
    manual: Stack, prompt: dict[str, Any]
) -> None:
    tokenizer = manual.tokenizer
    tokenizer.gate = asyncio.Event()
    params = common_pb2.SamplingParams(bad_words=["a", "b", "c"])
    call = manual.open(**prompt, sampling_params=params)
    await tokenizer.wait_for(lambda: tokenizer.num_tokenizing == 3 + ("prompt" in prompt))
    tokenizer.gate.set()
    [request] = await manual.engine.wait_running()
    assert len(request.add.sampling.bad_words) == 6
    call.cancel()


async def test_a_cancel_ends_the_wait_for_bad_words(manual: Stack) -> None:
    tokenizer = manual.tokenizer
    tokenizer.gate = asyncio.Event()
    call = manual.open(prompt="x", sampling_params=common_pb2.SamplingParams(bad_words=["a"]))
    await tokenizer.wait_for(lambda: tokenizer.num_tokenizing == 2)
    call.cancel()
    await tokenizer.wait_for(lambda: tokenizer.num_tokenizing == 0)
    await manual.until(lambda: manual.frontend.dispatcher.admission.requests == 0)
    assert not any(isinstance(command, Add) for command in manual.engine.commands)


@pytest.mark.parametrize(
    ("params", "field"),
    [
        ({"bad_words": ["a", ZERO]}, "sampling_params.bad_words[1]"),
        (
            {"bad_words": ["a"], "allowed_token_ids": common_pb2.TokenIds(ids=[97])},
            "sampling_params.allowed_token_ids",
        ),
        ({"min_tokens": 64}, "sampling_params.min_tokens"),
        ({"presence_penalty": NAN}, "sampling_params.presence_penalty"),
        ({"logit_bias": {300: 1.0}}, "sampling_params.logit_bias"),
    ],
)
async def test_a_refused_field_is_named(
    make_stack: Callable[..., Any], params: dict[str, Any], field: str
) -> None:
    stack = await make_stack(max_model_len=64)
    asked = common_pb2.SamplingParams(**params)
    for call in (
        stack.open(prompt="x", sampling_params=asked),
        stack.unary(prompt="x", sampling_params=asked),
    ):
        failure = await stack.fails(call)
        assert failure.code is grpc.StatusCode.INVALID_ARGUMENT
        assert failure.fields == [field]
    assert not any(isinstance(command, Add) for command in stack.engine.commands)
    assert (await stack.unary(prompt="x")).outputs[0].text


async def test_a_dead_end_is_the_callers_after_the_text_so_far(manual: Stack) -> None:
    engine = manual.engine
    call = manual.open(prompt="x", return_token_ids=True)
    [request] = await engine.wait_running()
    engine.emit({request.id: [97]})
    first = await call.read()
    assert first.delta.text == "a"
    engine._end(request.id, FinishReason.ERROR, error="nothing left", field="sampling_params")
    engine.emit()
    failure = await manual.fails(call)
    assert failure.code is grpc.StatusCode.INVALID_ARGUMENT
    assert (failure.message, failure.fields) == ("nothing left", ["sampling_params"])


async def test_min_tokens_reaches_the_detokenizer(manual: Stack) -> None:
    params = common_pb2.SamplingParams(min_tokens=3, stop=["a"])
    call = manual.open(prompt="x", sampling_params=params)
    [request] = await manual.engine.wait_running()
    manual.engine.emit({request.id: [98]})
    await call.read()
    assert [o.min_tokens for m in manual.tokenizer.messages for o in m.opens] == [3]
    call.cancel()
