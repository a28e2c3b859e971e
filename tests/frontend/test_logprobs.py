"""Logprobs between the engine and the client: one entry a token, aligned with the ids."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from frontend.stream import Outbox
from pagewire.v1 import common_pb2
from pagewire.wire.messages import Add
from tests.support.fake_engine import TEXT, fake_position

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tests.frontend.conftest import Stack


def sampling(**fields: Any) -> common_pb2.SamplingParams:
    return common_pb2.SamplingParams(**fields)


def expected(token_id: int, index: int, top: int) -> common_pb2.PositionLogprobs:
    said = fake_position(token_id, index, top)
    message = common_pb2.PositionLogprobs()
    message.token.token_id, message.token.rank = said.token_id, said.rank
    message.token.logprob = said.logprob
    # The first two of the likeliest are equally likely.
    for place, token in enumerate(said.top_ids):
        message.top.add(
            token_id=token, logprob=said.top_logprobs[place], rank=1 if place < 2 else place + 1
        )
    return message


def check(positions: Sequence[Any], ids: Sequence[int], top: int, begin: int = 0) -> None:
    assert list(positions) == [expected(t, i, top) for i, t in enumerate(ids, begin)]


@pytest.mark.parametrize("top", [0, 1, 20])
async def test_one_entry_a_token_in_stream_and_unary(stack: Stack, top: int) -> None:
    params = sampling(max_tokens=12, logprobs=top)
    got = await stack.stream(prompt="hello", sampling_params=params)
    check([p for d in got.deltas for p in d.logprobs], TEXT[:12].encode(), top)
    assert got.ids == []  # whether or not the ids are asked for
    assert not any(d.HasField("prompt_logprobs") for d in got.deltas)
    one = await stack.unary(prompt="hello", sampling_params=params, return_token_ids=True)
    check(one.outputs[0].logprobs, TEXT[:12].encode(), top)
    assert len(one.outputs[0].token_ids) == 12
    assert not one.HasField("prompt_logprobs")


async def test_nobody_else_gets_any(manual: Stack) -> None:
    asks = manual.open(prompt="x", sampling_params=sampling(max_tokens=2, logprobs=1))
    (first,) = await manual.engine.wait_running()
    others = manual.open(prompt="x", sampling_params=sampling(max_tokens=2))
    await manual.engine.wait_running(2)
    manual.engine.step()
    manual.engine.step()
    got = [frame async for frame in asks]
    assert first.add.sampling.logprobs == 1
    assert sum(len(frame.delta.logprobs) for frame in got) == 2
    assert all(not frame.delta.logprobs for frame in [frame async for frame in others])


async def test_prompt_logprobs_come_once_with_the_first_delta(manual: Stack) -> None:
    call = manual.open(prompt="hello", sampling_params=sampling(max_tokens=9, prompt_logprobs=2))
    (request,) = await manual.engine.wait_running()
    manual.engine.emit({request.id: list(b"the")})
    first = (await call.read()).delta
    assert first.text == "the"
    positions = first.prompt_logprobs.positions
    assert positions[0] == common_pb2.PositionLogprobs()
    check(positions[1:], b"ello", 2, begin=1)
    assert not first.logprobs
    manual.engine.emit({request.id: list(b" quick")})
    rest = await manual.rest(call)
    assert not any(frame.delta.HasField("prompt_logprobs") for frame in rest)
    assert rest[-1].HasField("final")


async def test_prompt_logprobs_of_a_unary_call(stack: Stack) -> None:
    answer = await stack.unary(
        prompt="hello", sampling_params=sampling(max_tokens=3, prompt_logprobs=0)
    )
    assert len(answer.prompt_logprobs.positions) == 5
    assert answer.prompt_logprobs.positions[0] == common_pb2.PositionLogprobs()
    check(answer.prompt_logprobs.positions[1:], b"ello", 0, begin=1)
    assert not answer.outputs[0].logprobs


async def test_a_stop_string_trims_them_together_with_the_ids(manual: Stack) -> None:
    """sgl-project/sglang#31599: ids and logprobs beyond the stop stayed."""
    call = manual.open(
        prompt="x",
        sampling_params=sampling(stop=["ick"], max_tokens=100, logprobs=1),
        return_token_ids=True,
    )
    (request,) = await manual.engine.wait_running()
    manual.engine.emit({request.id: list(b"the qu")})
    manual.engine.emit({request.id: list(b"ick brown")})
    frames = [frame async for frame in call]
    deltas = [frame.delta for frame in frames[:-1]]
    assert "".join(d.text for d in deltas) == "the qu"
    check([p for d in deltas for p in d.logprobs], b"the quick", 1)
    assert [t for d in deltas for t in d.token_ids] == list(b"the quick")
    for delta in deltas:
        assert [p.token.token_id for p in delta.logprobs] == list(delta.token_ids)
    assert frames[-1].final.usage.completion_tokens == len("the quick")


async def test_they_come_though_the_text_is_held_back(manual: Stack) -> None:
    call = manual.open(prompt="x", sampling_params=sampling(max_tokens=5, logprobs=0))
    (request,) = await manual.engine.wait_running()
    euro = list("€".encode())
    manual.engine.emit({request.id: euro[:2]})
    first = (await call.read()).delta
    assert first.text == ""
    check(first.logprobs, euro[:2], 0)
    manual.engine.emit({request.id: [*euro[2:], *euro[:2]]})
    second = (await call.read()).delta
    assert second.text == "€\ufffd"
    check(second.logprobs, [*euro[2:], *euro[:2]], 0, begin=2)


async def test_deltas_that_merge_merge_their_logprobs() -> None:
    outbox = Outbox()
    prompt = [fake_position(1, 0, 0)]
    a, b, c = (fake_position(t, t, 0) for t in range(3))
    outbox.put("", (), [a], prompt)
    outbox.put("xy", (), [b])
    outbox.put("z", (), [c])
    delta: Any = await outbox.take()
    assert (delta.text, delta.logprobs, delta.prompt_logprobs) == ("xyz", [a, b, c], prompt)
    outbox.put("", (), [a])
    delta = await outbox.take()
    assert (delta.text, delta.logprobs, delta.prompt_logprobs) == ("", [a], ())


async def test_an_engine_lost_in_mid_stream_leaves_no_gap(manual: Stack) -> None:
    call = manual.open(
        prompt="hello", sampling_params=sampling(max_tokens=9, logprobs=1, prompt_logprobs=1)
    )
    (request,) = await manual.engine.wait_running()
    manual.engine.emit({request.id: list(TEXT[:4].encode())})
    first = (await call.read()).delta
    await manual.engine.kill()
    await manual.restart_engine(auto=False)
    (again,) = await manual.engine.wait_running()
    assert again.add.num_output_tokens == 4
    assert again.add.sampling.prompt_logprobs is None
    manual.engine.emit({again.id: list(TEXT[4:9].encode())})
    rest = await manual.rest(call)
    deltas = [first, *(frame.delta for frame in rest[:-1])]
    check([p for d in deltas for p in d.logprobs], TEXT[:9].encode(), 1)
    assert [d.HasField("prompt_logprobs") for d in deltas] == [True] + [False] * (len(deltas) - 1)


async def test_what_the_engine_gets(make_stack: Callable[..., Stack]) -> None:
    stack = await make_stack()
    params = sampling(max_tokens=1, logprobs=0, prompt_logprobs=20)
    await stack.unary(prompt="a", sampling_params=params, skip_prefix_cache=True)
    await stack.unary(prompt="a", sampling_params=sampling(max_tokens=1))
    asked, plain = (c for c in stack.engine.commands if isinstance(c, Add))
    assert (asked.sampling.logprobs, asked.sampling.prompt_logprobs) == (0, 20)
    assert (plain.sampling.logprobs, plain.sampling.prompt_logprobs) == (None, None)
    assert (asked.skip_prefix_cache, plain.skip_prefix_cache) == (True, False)
