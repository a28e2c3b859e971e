"""Where a client can go on: frontend/transcript.py by itself."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from frontend.request import IdsPrompt, Job, Received
from frontend.stream import Delta, Finish, SequenceEnd
from frontend.transcript import Transcript
from pagewire.errors import Cancelled, InvalidRequest
from pagewire.tools import ToolCall
from pagewire.types import FinishReason, SamplingParams, Timings, Usage
from pagewire.wire.messages import PositionLogprobs

FINISH = Finish(
    "r", "m", (SequenceEnd(0, FinishReason.STOP, 1),), Usage(1, 1, 0), Timings(0, 0, 0), 0
)
TOP = PositionLogprobs(1, -1.0, 1)


def transcript(*, ids: bool = True, n: int = 1) -> Transcript:
    sampling = SamplingParams(max_tokens=9)
    job = Job("r", "m", IdsPrompt([1]), sampling, None, return_token_ids=ids, n=n)
    return Transcript(job)


def tokens(count: int, index: int = 0) -> Received:
    return Received(index, count, None)


def chars(count: int, index: int = 0) -> Received:
    return Received(index, None, count)


async def rest(script: Transcript) -> list[tuple[int, str, list[int]]]:
    """What is pending, in frames."""
    found = []
    while script._pending:
        item = await script.take()
        assert isinstance(item, Delta)
        found.append((item.index, item.text, item.token_ids))
    return found


async def test_everywhere_a_frame_can_end() -> None:
    script = transcript()
    script.put("abc", [1])
    assert await rest(script) == [(0, "abc", [1])]
    script.put("", [2])
    script.put("de", [3, 4])
    for place, left in (
        ((), [(0, "abcde", [1, 2, 3, 4])]),
        ((tokens(0),), [(0, "abcde", [1, 2, 3, 4])]),
        ((tokens(1),), [(0, "de", [2, 3, 4])]),
        ((tokens(2),), [(0, "de", [3, 4])]),
        ((tokens(4),), []),
        ((chars(0),), [(0, "abcde", [1, 2, 3, 4])]),
        ((chars(5),), []),
    ):
        script.rewind(place)
        assert await rest(script) == left
    script.rewind((tokens(4),))
    script.put("f", [5])
    assert await rest(script) == [(0, "f", [5])]


@pytest.mark.parametrize(
    ("place", "field"),
    [
        (tokens(3), "num_tokens"),
        (tokens(5), "num_tokens"),
        (tokens(-1), "num_tokens"),
        (chars(3), "num_chars"),
        (chars(4), "num_chars"),
        (chars(6), "num_chars"),
        (chars(-1), "num_chars"),
        (Received(0, None, None), "received"),
        (tokens(0, index=1), "index"),
        (tokens(0, index=-1), "index"),
    ],
)
async def test_where_nobody_can_stand(place: Received, field: str) -> None:
    script = transcript()
    script.put("abc", [1])
    script.put("", [2])
    script.put("de", [3, 4])
    with pytest.raises(InvalidRequest) as raised:
        script.check((place,))
    assert raised.value.field == f"resume_from.sequences[0].{field}"
    assert await rest(script) == [(0, "abcde", [1, 2, 3, 4])], "nothing has changed"


def test_the_same_sequence_twice() -> None:
    with pytest.raises(InvalidRequest) as raised:
        transcript(n=2).check((tokens(0), tokens(0)))
    assert raised.value.field == "resume_from.sequences[1].index"


async def test_text_alone_can_be_cut_anywhere() -> None:
    script = transcript(ids=False)
    script.put("ab")
    script.put("c\u00e9\U0001f600")
    for count, left in ((1, "bc\u00e9\U0001f600"), (2, "c\u00e9\U0001f600"), (4, "\U0001f600")):
        script.rewind((chars(count),))
        assert await rest(script) == [(0, left, [])]
    script.rewind((chars(5),))
    assert await rest(script) == []
    with pytest.raises(InvalidRequest, match="use num_chars"):
        script.check((tokens(1),))


async def test_each_sequence_has_its_own_place() -> None:
    script = transcript(n=3)
    script.put("ab", [1], index=0)
    script.put("xy", [7], index=2)
    script.put("cd", [2], index=0)
    script.rewind((tokens(1, index=2), tokens(1)))
    assert await rest(script) == [(0, "cd", [2])]
    script.rewind((tokens(2),))
    assert await rest(script) == [(2, "xy", [7])]


async def test_logprobs_count_tokens() -> None:
    job = Job("r", "m", IdsPrompt([1]), SamplingParams(max_tokens=9, logprobs=0), None)
    script = Transcript(job)
    script.put("a", (), [TOP], [TOP, TOP])
    script.put("", (), [TOP])
    script.put("b", (), [TOP])
    script.rewind((tokens(2),))
    item = await script.take()
    assert isinstance(item, Delta)
    assert (item.text, item.logprobs, list(item.prompt_logprobs)) == ("b", [TOP], [])
    script.rewind(())
    item = await script.take()
    assert isinstance(item, Delta)
    assert (item.text, item.logprobs) == ("ab", [TOP] * 3)
    assert list(item.prompt_logprobs) == [TOP, TOP]


async def test_tool_calls_are_not_lost() -> None:
    script = transcript()
    call = ToolCall("call-1", "f", "{}")
    script.put("a", [1])
    script.put("", [2], tool_calls=[call])
    script.put("tail")
    for place, count, text in (
        (tokens(0), 1, "atail"),
        (tokens(1), 1, "tail"),
        (tokens(2), 0, "tail"),
    ):
        script.rewind((place,))
        item = await script.take()
        assert isinstance(item, Delta)
        assert (len(item.tool_calls), item.text) == (count, text)
    script.rewind((chars(5),))
    assert await rest(script) == []


async def test_the_end_comes_again() -> None:
    script = transcript()
    script.put("a", [1])
    script.finish(FINISH)
    for _ in range(2):
        script.rewind(())
        assert isinstance(await script.take(), Delta)
        assert await script.take() is FINISH


async def test_whoever_waits_is_evicted_and_takes_nothing() -> None:
    script = transcript()
    first = asyncio.ensure_future(script.take())
    await asyncio.sleep(0)
    script.evict(Cancelled("gone"))
    second = asyncio.ensure_future(script.take())
    script.put("a", [1])
    with pytest.raises(Cancelled, match="gone"):
        await first
    item = await second
    assert isinstance(item, Delta)
    assert item.text == "a"
    # The wake-up was on its way when the other came.
    third = asyncio.ensure_future(script.take())
    await asyncio.sleep(0)
    script.put("b", [2])
    script.evict(Cancelled("gone too"))
    script.rewind(())
    with pytest.raises(Cancelled, match="gone too"):
        await third
    assert await rest(script) == [(0, "ab", [1, 2])]


PIECES = st.lists(
    st.tuples(st.text("ab\u00e9", max_size=3), st.lists(st.integers(0, 9), max_size=2)),
    max_size=12,
)


@given(pieces=PIECES, reads=st.lists(st.integers(0, 12), max_size=4))
def test_any_losses_at_any_time(pieces: list[tuple[str, list[int]]], reads: list[int]) -> None:
    """Frames that got lost come again, and what the client has in the end is the whole."""

    async def run() -> None:
        script = transcript()
        text, ids = "", list[int]()
        for number, (piece, new) in enumerate(pieces):
            new = new or [0]
            script.put(piece, new)
            if number in reads:
                got = await rest(script)
                text += "".join(it for _, it, _ in got)
                ids += [token for _, _, them in got for token in them]
            else:
                await rest(script)  # written, and never received
                script.rewind((tokens(len(ids)),))
        got = await rest(script)
        text += "".join(it for _, it, _ in got)
        ids += [token for _, _, them in got for token in them]
        assert text == "".join(piece for piece, _ in pieces)
        assert ids == [token for _, new in pieces for token in (new or [0])]

    asyncio.run(run())
