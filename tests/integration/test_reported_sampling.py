"""Public bug reports on penalties, bad words, stop ids and forced tokens, over the whole
stack on the embedded model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import grpc
import pytest
import torch

from pagewire.v1 import common_pb2, inference_pb2
from tests.support.smollm2 import load_with_transformers
from tests.support.stack import read_stream

if TYPE_CHECKING:
    from tests.support.stack import Api, Streamed

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

COPPER = [16827, 456, 8548, 8548, 8548]
BETA, GORGEOUS, TABLE, EOS = 11345, 35702, 3252, 2


async def ask(api: Api, prompt: str | list[int], **sampling: Any) -> Any:
    """Greedily, with the ids."""
    given: dict[str, Any] = {"prompt": prompt}
    if isinstance(prompt, list):
        given = {"prompt_token_ids": common_pb2.TokenIds(ids=prompt)}
    params = common_pb2.SamplingParams(**{"temperature": 0, **sampling})
    return await api.inference.Generate(
        inference_pb2.GenerateRequest(**given, sampling_params=params, return_token_ids=True)
    )


async def ask_stream(api: Api, prompt: str | list[int], **sampling: Any) -> Streamed:
    given: dict[str, Any] = {"prompt": prompt}
    if isinstance(prompt, list):
        given = {"prompt_token_ids": common_pb2.TokenIds(ids=prompt)}
    params = common_pb2.SamplingParams(**{"temperature": 0, **sampling})
    return await read_stream(
        api.inference.GenerateStream(
            inference_pb2.GenerateStreamRequest(**given, sampling_params=params)
        )
    )


def ids_of(response: Any) -> list[int]:
    return list(response.outputs[0].token_ids)


# vllm-project/vllm-metal#69
async def test_repetition_penalty_counts_the_prompt(api: Api) -> None:
    model = load_with_transformers()
    with torch.inference_mode():
        expected = model.generate(
            torch.tensor([COPPER]), do_sample=False, repetition_penalty=1.3, max_new_tokens=12
        )[0, len(COPPER) :].tolist()
    response = await ask(api, "copper copper copper copper", max_tokens=12, repetition_penalty=1.3)
    assert response.usage.prompt_tokens == len(COPPER)
    assert ids_of(response) == expected


# vllm-project/vllm-metal#69
async def test_presence_and_frequency_penalties_count_the_output_only(api: Api) -> None:
    model = load_with_transformers()
    expected: list[int] = []
    for _ in range(12):
        with torch.no_grad():
            logits = model(torch.tensor([[*COPPER, *expected]])).logits[0, -1]
        for token_id in set(expected):
            logits[token_id] -= 2 + 2 * expected.count(token_id)
        expected.append(int(logits.argmax()))
    penalized = await ask(api, COPPER, max_tokens=12, presence_penalty=2, frequency_penalty=2)
    plain = await ask(api, COPPER, max_tokens=1)
    assert ids_of(penalized) == expected
    assert ids_of(plain) == expected[:1]


# vllm-project/vllm#23886, NVIDIA/TensorRT-LLM#15706
@pytest.mark.parametrize(("word", "spaced"), [("gorgeous", GORGEOUS), ("table", TABLE)])
async def test_a_bad_word_does_not_slip_through_with_a_space(
    api: Api, word: str, spaced: int
) -> None:
    forced = {spaced: 100.0}
    free = await ask(api, "The room had a", max_tokens=4, logit_bias=forced)
    assert ids_of(free) == [spaced] * 4
    banned = await ask(api, "The room had a", max_tokens=4, logit_bias=forced, bad_words=[word])
    assert spaced not in ids_of(banned)
    assert word not in banned.outputs[0].text


async def test_the_last_piece_of_a_bad_word_stays_possible(api: Api) -> None:
    """488 is "eous", the end of 87, 4609, 488."""
    asked: dict[str, Any] = {"max_tokens": 1, "logit_bias": {488: 100}, "bad_words": ["gorgeous"]}
    assert ids_of(await ask(api, [8548, 4609], **asked)) == [488]
    assert ids_of(await ask(api, [87, 4609], **asked)) != [488]


# vllm-project/vllm#54195, gonka-ai/gonka#1170
@pytest.mark.parametrize("min_tokens", [0, 1])
@pytest.mark.parametrize("bad", [49152, -1, 151645])
async def test_stop_ids_outside_the_vocabulary(api: Api, bad: int, min_tokens: int) -> None:
    pid = (await api.stats()).engine_pid
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await ask(api, "Hello", max_tokens=2, stop_token_ids=[bad], min_tokens=min_tokens)
    assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert str(bad) in str(raised.value.details())
    assert len(ids_of(await ask(api, "Hello", max_tokens=2))) == 2
    assert (await api.at_rest()).engine_pid == pid


async def test_min_tokens_holds_the_end_off(api: Api) -> None:
    response = await ask(api, "Hello", max_tokens=9, min_tokens=5, logit_bias={EOS: 100})
    [output] = response.outputs
    assert (len(output.token_ids), output.stop_match.eos_token_id) == (6, EOS)
    response = await ask(
        api, "Say it:", max_tokens=9, min_tokens=3, stop=["beta"], logit_bias={BETA: 100}
    )
    [output] = response.outputs
    assert (output.text, len(output.token_ids)) == (" beta beta beta ", 4)
    assert output.stop_match.stop_string == "beta"


# vllm-project/vllm#3574
@pytest.mark.parametrize(("include", "text"), [(False, " "), (True, " beta b")])
async def test_nothing_of_a_stop_string_is_sent(api: Api, include: bool, text: str) -> None:
    asked: dict[str, Any] = {
        "max_tokens": 8,
        "logit_bias": {BETA: 100},
        "stop": ["beta b"],
        "include_stop_str_in_output": include,
    }
    unary = await ask(api, "Say it:", **asked)
    streamed = await ask_stream(api, "Say it:", **asked)
    assert streamed.text == unary.outputs[0].text == text
    for match, usage in (
        (unary.outputs[0].stop_match, unary.usage),
        (streamed.final.outputs[0].stop_match, streamed.final.usage),
    ):
        assert (match.stop_string, usage.completion_tokens) == ("beta b", 2)


# vllm-project/vllm#48853: 246 completes the parrot that the prompt began.
@pytest.mark.parametrize(("max_tokens", "text"), [(1, "🦜"), (3, "🦜\ufffd\ufffd")])
async def test_a_character_begun_by_the_prompt(api: Api, max_tokens: int, text: str) -> None:
    prompt = [28120, 15107, 116]
    asked: dict[str, Any] = {"max_tokens": max_tokens, "logit_bias": {246: 100}}
    unary = await ask(api, prompt, **asked)
    assert unary.outputs[0].text == text
    assert unary.usage.completion_tokens == max_tokens
    assert (await ask_stream(api, prompt, **asked)).text == text


# huggingface/transformers#24511, huggingface/tokenizers#1513
@pytest.mark.parametrize("skip", [False, True])
async def test_special_tokens_are_kept_or_skipped_without_spaces(api: Api, skip: bool) -> None:
    asked: dict[str, Any] = {
        "max_tokens": 3,
        "logit_bias": {3: 100},
        "ignore_eos": True,
        "skip_special_tokens": skip,
    }
    streamed = await ask_stream(api, "Hello", **asked)
    assert streamed.text == ("" if skip else "<repo_name>" * 3)
    assert streamed.final.usage.completion_tokens == 3
    assert streamed.final.outputs[0].finish_reason == common_pb2.FINISH_REASON_LENGTH


async def test_a_dead_end_hurts_nobody_else(api: Api) -> None:
    """Only " beta" is allowed, and never twice in a row."""
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await ask(
            api,
            "Say it:",
            max_tokens=8,
            allowed_token_ids=common_pb2.TokenIds(ids=[BETA]),
            bad_words=[" beta beta"],
        )
    assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "leave no token to draw" in str(raised.value.details())
    await api.at_rest()
    assert len(ids_of(await ask(api, "Hello", max_tokens=2))) == 2


# sgl-project/sglang#31599, vllm-project/vllm#47616: several tokens come per step.
@pytest.mark.parametrize(
    ("max_tokens", "reason", "num_tokens", "text"),
    [
        (4, common_pb2.FINISH_REASON_STOP, 3, ""),
        (2, common_pb2.FINISH_REASON_LENGTH, 2, " beta beta"),
    ],
)
async def test_an_end_within_guessed_tokens(
    api: Api, max_tokens: int, reason: int, num_tokens: int, text: str
) -> None:
    response = await ask(
        api,
        " beta beta beta beta beta beta",
        max_tokens=max_tokens,
        logit_bias={BETA: 100},
        stop=[" beta beta beta"],
        logprobs=1,
    )
    (output,) = response.outputs
    assert output.text == text
    assert output.finish_reason == reason
    assert list(output.token_ids) == [BETA] * num_tokens
    assert [position.token.token_id for position in output.logprobs] == [BETA] * num_tokens
    assert response.usage.completion_tokens == num_tokens
