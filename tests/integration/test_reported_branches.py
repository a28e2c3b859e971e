"""Public bug reports on n > 1, over the whole stack on the embedded model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from pagewire.v1 import common_pb2, inference_pb2
from tests.integration.test_reported_sampling import ask

if TYPE_CHECKING:
    from tests.support.stack import Api

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

PROMPT = "A lamp stood on"


# sgl-project/sglang#8417
async def test_each_choice_finishes_once(api: Api) -> None:
    asked: dict[str, Any] = {
        "n": 3,
        "temperature": 1,
        "seed": 9,
        "max_tokens": 4,
        "ignore_eos": True,
    }
    unary = await ask(api, PROMPT, **asked)
    request = inference_pb2.GenerateStreamRequest(
        prompt=PROMPT, sampling_params=common_pb2.SamplingParams(**asked)
    )
    frames = [frame async for frame in api.inference.GenerateStream(request)]
    assert [frame.WhichOneof("frame") for frame in frames[:-1]] == ["delta"] * (len(frames) - 1)
    final = frames[-1].final
    assert [(o.index, o.finish_reason) for o in final.outputs] == [
        (index, common_pb2.FINISH_REASON_LENGTH) for index in range(3)
    ]
    joined = [
        "".join(f.delta.text for f in frames[:-1] if f.delta.index == index) for index in range(3)
    ]
    assert joined == [output.text for output in unary.outputs]
    assert len(set(joined)) > 1
    single = await ask(api, PROMPT, max_tokens=1)
    for usage in (unary.usage, final.usage):
        assert usage.completion_tokens == 12
        assert usage.prompt_tokens == single.usage.prompt_tokens
    # The first is what it is alone.
    alone = await ask(api, PROMPT, **(asked | {"n": 1}))
    assert alone.outputs[0] == unary.outputs[0]
    await api.at_rest()


async def test_best_of_finds_the_likeliest(api: Api) -> None:
    asked: dict[str, Any] = {
        "temperature": 1,
        "seed": 3,
        "max_tokens": 6,
        "ignore_eos": True,
        "logprobs": 0,
    }
    drawn = (await ask(api, PROMPT, n=6, **asked)).outputs
    best = (await ask(api, PROMPT, n=2, best_of=6, **asked)).outputs
    sums = [sum(position.token.logprob for position in output.logprobs) for output in drawn]
    order = sorted(range(6), key=lambda index: -sums[index])
    assert [list(o.token_ids) for o in best] == [list(drawn[i].token_ids) for i in order[:2]]
    assert [output.index for output in best] == [0, 1]
    await api.at_rest()
