"""Prompts that are echoed and scored, and special tokens in the text, over the whole stack
on the embedded model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from pagewire.v1 import common_pb2, inference_pb2, tokenizer_pb2
from tests.support.smollm2 import load_with_transformers
from tests.support.stack import read_stream

if TYPE_CHECKING:
    from tests.support.stack import Api

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

GREEK = "alpha beta gamma delta"
GREEK_IDS = [13433, 11345, 16439, 15184]
LENGTH = common_pb2.FINISH_REASON_LENGTH
TOLERANCE = 1e-3


def request(**fields: Any) -> inference_pb2.GenerateRequest:
    sampling = common_pb2.SamplingParams(**{"temperature": 0, **fields.pop("sampling", {})})
    return inference_pb2.GenerateRequest(sampling_params=sampling, **fields)


def expected_logprobs(ids: list[int]) -> list[float]:
    """Of each id after the first, by transformers in float32."""
    with torch.inference_mode():
        logprobs = load_with_transformers()(torch.tensor([ids])).logits[0].log_softmax(-1)
    return [float(logprobs[i, token_id]) for i, token_id in enumerate(ids[1:])]


# vllm-project/vllm#6521
@pytest.mark.parametrize("max_tokens", [0, 1])
@pytest.mark.parametrize("as_ids", [False, True])
async def test_echo_with_logprobs(api: Api, max_tokens: int, as_ids: bool) -> None:
    prompt: dict[str, Any] = {"prompt": GREEK}
    if as_ids:
        prompt = {"prompt_token_ids": common_pb2.TokenIds(ids=GREEK_IDS)}
    asked = request(echo=True, sampling={"logprobs": 1, "max_tokens": max_tokens}, **prompt)
    for _ in range(2):  # the second time the prompt is in the prefix cache
        response = await api.inference.Generate(asked)
        (output,) = response.outputs
        assert output.text.startswith(GREEK)
        assert (output.text == GREEK) == (max_tokens == 0)
        assert output.finish_reason == LENGTH
        assert response.usage.prompt_tokens == 4
        assert response.usage.completion_tokens == max_tokens == len(output.logprobs)
        first, *rest = response.prompt_logprobs.positions
        assert not first.HasField("token")
        assert [position.token.token_id for position in rest] == GREEK_IDS[1:]
        told = [position.token.logprob for position in rest]
        assert told == pytest.approx(expected_logprobs(GREEK_IDS), abs=TOLERANCE)


# huggingface/transformers#24511, huggingface/tokenizers#1513
@pytest.mark.parametrize("spaces", [None, True, False])
async def test_no_spaces_around_special_tokens(api: Api, spaces: bool | None) -> None:
    """<repo_name>, three times: with the text, and without."""
    for skip in (False, True):
        asked = inference_pb2.GenerateStreamRequest(
            prompt="Hi",
            sampling_params=common_pb2.SamplingParams(
                temperature=0,
                max_tokens=3,
                ignore_eos=True,
                logit_bias={3: 100},
                skip_special_tokens=skip,
                spaces_between_special_tokens=spaces,
            ),
        )
        streamed = await read_stream(api.inference.GenerateStream(asked))
        assert streamed.text == ("" if skip else "<repo_name>" * 3)
        assert streamed.final.usage.completion_tokens == 3
        assert streamed.final.outputs[0].finish_reason == LENGTH


async def test_a_chat_is_echoed_as_it_was_rendered(api: Api) -> None:
    chat = common_pb2.ChatInput(messages=[common_pb2.ChatMessage(role="user", content="Hi 🦜")])
    rendered = await api.tokens.ApplyChatTemplate(tokenizer_pb2.ApplyChatTemplateRequest(chat=chat))
    plain = await api.inference.Generate(request(chat=chat, sampling={"max_tokens": 4}))
    echoed = await api.inference.Generate(request(chat=chat, echo=True, sampling={"max_tokens": 4}))
    assert echoed.outputs[0].text == rendered.text + plain.outputs[0].text


async def test_the_last_tokens_of_a_prompt(api: Api) -> None:
    cut = await api.inference.Generate(
        request(
            prompt="alpha beta gamma delta",
            echo=True,
            sampling={"max_tokens": 4, "truncate_prompt_tokens": 2},
        )
    )
    assert cut.usage.prompt_tokens == 2
    assert cut.outputs[0].text.startswith(" gamma delta")
    alone = await api.inference.Generate(
        request(prompt_token_ids=common_pb2.TokenIds(ids=GREEK_IDS[2:]), sampling={"max_tokens": 4})
    )
    assert cut.outputs[0].text == " gamma delta" + alone.outputs[0].text
