"""Public bug reports on beam search, over the whole stack on the embedded model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import grpc
import pytest

from pagewire.v1 import common_pb2, inference_pb2
from tests.integration.test_reported_sampling import ask

if TYPE_CHECKING:
    from tests.support.stack import Api

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

PROMPT = "Ladder rungs: one, two, three,"
FIVE = 2531  # " five"
SEARCH = common_pb2.BeamSearch(
    beam_width=3, early_stopping=common_pb2.BeamSearch.EARLY_STOPPING_TRUE
)


# vllm-project/vllm#9264: stop strings and stop tokens did not stop a beam.
async def test_beams_stop_at_a_stop_string_and_at_a_stop_token(api: Api) -> None:
    asked: dict[str, Any] = {"beam_search": SEARCH, "n": 3, "max_tokens": 40}
    by_string = await ask(api, PROMPT, stop=["five"], **asked)
    # What transformers finds with a stopping criterion that looks for "five".
    assert [output.text for output in by_string.outputs] == [" four, ", " four, and ", " "]
    scores = [output.beam_score for output in by_string.outputs]
    assert scores == pytest.approx([-0.459331, -1.026218, -3.260060], abs=1e-4)
    assert [output.stop_match.stop_string for output in by_string.outputs] == ["five"] * 3
    assert by_string.usage.completion_tokens == 3 + 4 + 1
    by_token = await ask(api, PROMPT, stop_token_ids=[FIVE], **asked)
    assert [output.stop_match.stop_token_id for output in by_token.outputs] == [FIVE] * 3
    assert [output.beam_score for output in by_token.outputs] == pytest.approx(scores, abs=1e-6)
    assert by_token.outputs[0].text.startswith(" four,")
    request = inference_pb2.GenerateStreamRequest(
        prompt=PROMPT, sampling_params=common_pb2.SamplingParams(stop=["five"], **asked)
    )
    *deltas, last = [frame async for frame in api.inference.GenerateStream(request)]
    assert sorted((frame.delta.index, frame.delta.text) for frame in deltas) == [
        (index, output.text) for index, output in enumerate(by_string.outputs)
    ]
    assert [output.beam_score for output in last.final.outputs] == pytest.approx(scores, abs=1e-6)
    await api.at_rest()


async def test_a_search_that_does_not_fit_is_refused_with_figures(api: Api) -> None:
    wide = common_pb2.BeamSearch(beam_width=16)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await ask(api, PROMPT, beam_search=wide)
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "KV blocks" in (refused.value.details() or "")
    await api.at_rest()
