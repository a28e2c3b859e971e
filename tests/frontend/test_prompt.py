"""The prompt: echoed, cut to what fits, and scored without an output."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from frontend.convert.calls import generate_call
from frontend.prompt import truncate
from frontend.validate import Limits, validate
from pagewire.errors import InvalidRequest
from pagewire.v1 import common_pb2, inference_pb2

if TYPE_CHECKING:
    from tests.frontend.conftest import Stack

LENGTH = common_pb2.FINISH_REASON_LENGTH
PARROT = "🦜".encode()


def sampling(**fields: Any) -> common_pb2.SamplingParams:
    return common_pb2.SamplingParams(**fields)


def token_ids(*ids: int) -> common_pb2.TokenIds:
    return common_pb2.TokenIds(ids=ids)


def job_of(**fields: Any) -> Any:
    limits = Limits("m", 100, 300, (256,), {}, has_chat_template=True)
    request = inference_pb2.GenerateRequest(**{"prompt": "x", **fields})
    return validate(generate_call(request), limits, "r1")


CHAT = common_pb2.ChatInput(messages=[common_pb2.ChatMessage(role="user", content="Hi")])


@pytest.mark.parametrize(
    ("prompt", "text"),
    [
        ({"prompt": "Hi 🦜"}, "Hi 🦜"),
        ({"prompt_token_ids": token_ids(*b"Hi ")}, "Hi "),
        ({"chat": CHAT}, "<user>Hi\n<assistant>"),
        # Ids that only the model has add no text, as in an output.
        ({"prompt_token_ids": token_ids(72, 299, 105)}, "Hi"),
    ],
)
async def test_the_text_begins_with_the_prompt(
    stack: Stack, prompt: dict[str, Any], text: str
) -> None:
    """In every sequence's first delta, and in the text of an answer; what counts tokens does
    not change."""
    params = sampling(max_tokens=3, n=2)
    plain = await stack.unary(sampling_params=params, **prompt)
    response = await stack.unary(echo=True, sampling_params=params, **prompt)
    collected = await stack.stream(echo=True, sampling_params=params, **prompt)
    for index in range(2):
        deltas = [delta.text for delta in collected.deltas if delta.index == index]
        assert deltas[0].startswith(text)
        assert "".join(deltas) == text + plain.outputs[index].text == response.outputs[index].text
    assert response.usage == plain.usage == collected.final.usage


async def test_a_character_that_the_output_completes_is_whole(make_stack: Any) -> None:
    stack = await make_stack(next_token=lambda request: PARROT[3])
    ids = token_ids(*b"hello ", *PARROT[:3])
    response = await stack.unary(
        prompt_token_ids=ids, echo=True, sampling_params=sampling(max_tokens=1)
    )
    assert response.outputs[0].text.startswith("hello ")
    request = stack.tokenizer.messages[-1]
    assert list(request.token_ids) == [PARROT[3]]
    alone = await stack.unary(
        prompt_token_ids=ids, echo=True, sampling_params=sampling(max_tokens=0)
    )
    assert alone.outputs[0].text == "hello "


async def test_a_stop_string_in_the_prompt_stops_nothing(stack: Stack) -> None:
    plain = await stack.unary(prompt="x", sampling_params=sampling(max_tokens=6))
    text = plain.outputs[0].text
    for prompt in (text, text[: len(text) // 2]):
        params = sampling(max_tokens=6, stop=[prompt[-1] + text[0], "absent"])
        response = await stack.unary(prompt=prompt, echo=True, sampling_params=params)
        assert response.outputs[0].text == prompt + text
        assert response.outputs[0].finish_reason == LENGTH


@pytest.mark.parametrize("n", [1, 3])
async def test_a_prompt_is_scored_without_an_output(stack: Stack, n: int) -> None:
    """vllm-project/vllm#6521."""
    params = sampling(max_tokens=0, logprobs=2, n=n)
    response = await stack.unary(prompt="alpha", echo=True, sampling_params=params)
    collected = await stack.stream(prompt="alpha", echo=True, sampling_params=params)
    for usage in (response.usage, collected.final.usage):
        assert (usage.prompt_tokens, usage.completion_tokens) == (5, 0)
    assert [o.text for o in response.outputs] == ["alpha"] * n
    assert [(d.index, d.text) for d in collected.deltas] == [(i, "alpha") for i in range(n)]
    for outputs in (response.outputs, collected.final.outputs):
        assert [o.finish_reason for o in outputs] == [LENGTH] * n
    assert not any(o.logprobs for o in response.outputs)
    # Asked for by logprobs, as the prompt is part of the text.
    first = collected.deltas[0].prompt_logprobs
    assert response.prompt_logprobs == first
    assert [p.token.token_id for p in first.positions] == [0, *b"lpha"]
    assert all(len(p.top) == 2 for p in first.positions[1:])
    await stack.until(lambda: not stack.engine.running)


async def test_prompt_logprobs_alone_are_reason_enough(stack: Stack) -> None:
    params = sampling(max_tokens=0, prompt_logprobs=0)
    response = await stack.unary(prompt="alpha", sampling_params=params)
    assert response.outputs[0].text == ""
    assert len(response.prompt_logprobs.positions) == 5
    collected = [
        frame.WhichOneof("frame")
        async for frame in stack.open(prompt="alpha", sampling_params=params)
    ]
    assert collected == ["delta", "final"]


async def test_a_request_without_output_outlives_its_engine(manual: Stack) -> None:
    call = manual.open(prompt="alpha", echo=True, sampling_params=sampling(max_tokens=0))
    await manual.engine.wait_running()
    await manual.engine.kill()
    await manual.restart_engine(auto=False)
    (request,) = await manual.engine.wait_running()
    assert request.add.num_output_tokens == 0
    manual.engine.step()
    frames = await manual.rest(call)
    assert [f.WhichOneof("frame") for f in frames] == ["delta", "final"]
    assert frames[0].delta.text == "alpha"


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"sampling_params": sampling(max_tokens=0)}, "max_tokens"),
        ({"sampling_params": sampling(max_tokens=-1), "echo": True}, "max_tokens"),
        ({"sampling_params": sampling(max_tokens=0, best_of=2), "echo": True}, "best_of"),
        ({"sampling_params": sampling(max_tokens=0, min_tokens=1), "echo": True}, "min_tokens"),
        ({"sampling_params": sampling(truncate_prompt_tokens=0)}, "truncate_prompt_tokens"),
        ({"sampling_params": sampling(truncate_prompt_tokens=-2)}, "truncate_prompt_tokens"),
        ({"sampling_params": sampling(truncate_prompt_tokens=101)}, "truncate_prompt_tokens"),
        (
            {
                "sampling_params": sampling(
                    max_tokens=0, beam_search=common_pb2.BeamSearch(beam_width=2)
                ),
                "echo": True,
            },
            "max_tokens",
        ),
    ],
)
def test_what_is_wrong_is_named(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        job_of(**fields)
    assert caught.value.field == f"sampling_params.{field}"


@pytest.mark.parametrize(
    ("keep", "max_tokens", "expected"),
    [
        (None, None, 150),
        (1, None, 1),
        (100, None, 100),
        (-1, None, 99),
        (-1, 0, 99),
        (-1, 30, 70),
        # Over the context by itself: the error that follows is about it.
        (-1, 500, 1),
    ],
)
def test_the_last_tokens_are_kept(keep: int | None, max_tokens: int | None, expected: int) -> None:
    job = job_of(
        echo=True,
        sampling_params=sampling(truncate_prompt_tokens=keep, max_tokens=max_tokens),
    )
    ids = list(range(150))
    assert truncate(job, ids, 100) == ids[150 - expected :]
    assert truncate(job, [7], 100) == [7]


@pytest.mark.parametrize(
    "prompt", [{"prompt": "alpha beta"}, {"prompt_token_ids": token_ids(*b"alpha beta")}]
)
async def test_what_is_cut_off_is_not_there(stack: Stack, prompt: dict[str, Any]) -> None:
    params = sampling(truncate_prompt_tokens=4, max_tokens=1)
    response = await stack.unary(echo=True, sampling_params=params, **prompt)
    assert response.outputs[0].text.startswith("beta")
    assert response.usage.prompt_tokens == 4
    plain = await stack.unary(sampling_params=params, **prompt)
    assert plain.usage.prompt_tokens == 4


async def test_a_prompt_far_over_the_context_can_be_cut(make_stack: Any) -> None:
    stack = await make_stack(max_model_len=8)
    text = "x" * (8 * 512 + 1)
    params = sampling(truncate_prompt_tokens=-1, max_tokens=3)
    response = await stack.unary(prompt=text, sampling_params=params)
    assert response.usage.prompt_tokens == 5
    failure = await stack.fails(stack.open(prompt=text, sampling_params=sampling(max_tokens=3)))
    assert failure.fields == ["prompt"]
