"""Frames that are encoded by hand, against the protobuf library."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from frontend.convert.answers import delta_frame
from frontend.convert.frames import stream_frame
from frontend.stream import Delta, Queued
from pagewire.tools import ToolCall
from pagewire.v1 import inference_pb2
from pagewire.wire.messages import PositionLogprobs

IDS = st.integers(-(2**31), 2**31 - 1) | st.sampled_from(
    [0, 1, 127, 128, 2**14 - 1, 2**14, 2**21 - 1, 2**21, 2**28, -1]
)


@given(
    st.text(max_size=200),
    st.lists(IDS, max_size=60),
    st.sampled_from([0, 1, 127, 128, 2**31 - 1]),
)
def test_a_delta_is_what_protobuf_writes(text: str, ids: list[int], index: int) -> None:
    delta = Delta(text, ids, index=index)
    assert stream_frame(delta) == delta_frame(delta).SerializeToString()


@pytest.mark.parametrize("num_bytes", [120, 121, 122, 123, 124, 126, 127, 128, 16_383, 16_384])
def test_lengths_at_the_edges(num_bytes: int) -> None:
    delta = Delta("x" * num_bytes, [300])
    assert stream_frame(delta) == delta_frame(delta).SerializeToString()


@pytest.mark.parametrize(
    "delta",
    [
        Delta("a", [1], logprobs=[PositionLogprobs(1, -0.5, 1)]),
        Delta("a", [1], prompt_logprobs=[PositionLogprobs(1, -0.5, 1)]),
        Delta("", [], tool_calls=[ToolCall("id", "name", "{}")]),
    ],
)
def test_what_has_more_than_text_and_ids_loses_nothing(delta: Delta) -> None:
    frame = inference_pb2.GenerateStreamResponse.FromString(stream_frame(delta))
    assert frame == delta_frame(delta)


def test_a_place_in_the_queue() -> None:
    frame = inference_pb2.GenerateStreamResponse.FromString(stream_frame(Queued(3, 1.5)))
    assert frame.queued.position == 3
    assert frame.queued.estimated_wait.ToTimedelta().total_seconds() == 1.5
