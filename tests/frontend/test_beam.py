"""Beam search at the door: what may be asked, and how beams become sequences."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import grpc

from pagewire.types import BeamParams, FinishReason
from pagewire.v1 import common_pb2, inference_pb2
from pagewire.wire.codec import pack_ids
from pagewire.wire.messages import Add, Beam
from tests.frontend.test_metrics import scrape
from tests.support.fake_engine import EOS, fake_position
from tests.support.fake_tokenizer import FakeTokenizer

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.frontend.conftest import Stack

LENGTH, STOP = common_pb2.FINISH_REASON_LENGTH, common_pb2.FINISH_REASON_STOP
SEARCH = common_pb2.BeamSearch(beam_width=3)


def sampling(**fields: Any) -> common_pb2.SamplingParams:
    return common_pb2.SamplingParams(**{"beam_search": SEARCH, "max_tokens": 8, **fields})


def beam(text: bytes, score: float, *end: int, **fields: Any) -> Beam:
    ids = [*text, *end]
    stop = end[0] if end else None
    reason = FinishReason.STOP if end else FinishReason.LENGTH
    return Beam(pack_ids(ids), score, fields.pop("reason", reason), stop, **fields)


async def add_of(stack: Stack) -> Add:
    (request,) = await stack.engine.wait_running(1)
    return request.add


async def test_what_the_engine_gets(manual: Stack) -> None:
    search = common_pb2.BeamSearch(
        beam_width=4,
        length_penalty=-0.5,
        early_stopping=common_pb2.BeamSearch.EARLY_STOPPING_NEVER,
    )
    params = sampling(beam_search=search, n=2, stop=["x", "yz"], logprobs=3, seed=7)
    call = manual.open(prompt="hello", sampling_params=params)
    add = await add_of(manual)
    assert add.sampling.beam == BeamParams(4, 2, -0.5, "never", ("x", "yz"))
    assert (add.sampling.max_tokens, add.sampling.logprobs) == (8, 3)
    assert (add.sample_index, add.leader_id) == (0, None)
    manual.engine.end_search(add.request_id, beam(b"a", -1.0, EOS), beam(b"b", -2.0, EOS))
    (*_, final) = [frame async for frame in call]
    assert final.final.seed == 7


async def test_the_models_own_defaults_do_not_apply(make_stack: Callable[..., Any]) -> None:
    stack = await make_stack(
        auto=False, default_sampling={"temperature": 0.6, "repetition_penalty": 1.3, "top_p": 0.9}
    )
    call = stack.open(prompt="hello", sampling_params=sampling())
    params = (await add_of(stack)).sampling
    assert (params.repetition_penalty, params.top_p) == (1.0, 1.0)
    assert params.beam == BeamParams(3, 1)
    call.cancel()


async def test_a_stream_sends_each_sequence_once_and_whole(manual: Stack) -> None:
    params = sampling(n=3, stop=["ick"], stop_token_ids=[ord("!")])
    call = manual.open(prompt="hello", sampling_params=params, return_token_ids=True)
    add = await add_of(manual)
    manual.engine.end_search(
        add.request_id,
        beam(b"a quick", -0.5, reason=FinishReason.STOP),
        beam(b"the end", -0.75, EOS),
        beam(b"so long", -1.25),
    )
    frames = [frame async for frame in call]
    deltas, final = [frame.delta for frame in frames[:-1]], frames[-1].final
    assert sorted((d.index, d.text) for d in deltas) == [
        (0, "a qu"),
        (1, "the end"),
        (2, "so long"),
    ]
    assert [list(d.token_ids) for d in deltas if d.index == 1] == [[*b"the end", EOS]]
    assert [o.finish_reason for o in final.outputs] == [STOP, STOP, LENGTH]
    assert [o.beam_score for o in final.outputs] == [-0.5, -0.75, -1.25]
    assert [o.index for o in final.outputs] == [0, 1, 2]
    assert final.outputs[0].stop_match.stop_string == "ick"
    assert final.outputs[1].stop_match.eos_token_id == EOS
    assert not final.outputs[2].HasField("stop_match")
    assert (final.usage.prompt_tokens, final.usage.completion_tokens) == (5, 7 + 8 + 7)
    await manual.until(lambda: manual.frontend.dispatcher.admission.requests == 0)
    assert not manual.frontend.dispatcher.engine_side.live
    assert not manual.frontend.dispatcher.text_stream._live
    assert not manual.engine.aborted
    page = await scrape(manual)
    assert page.value("vllm:request_success_total", finished_reason="length") == 1
    assert page.value("vllm:request_generation_tokens_sum") == 22


async def test_unary_with_logprobs_and_the_stop_string_kept(manual: Stack) -> None:
    params = sampling(n=2, stop=["k b"], include_stop_str_in_output=True, logprobs=2)
    request = inference_pb2.GenerateRequest(prompt="hello", sampling_params=params)
    call = manual.inference.Generate(request, timeout=60)
    add = await add_of(manual)
    told = [tuple(fake_position(t, i, 2) for i, t in enumerate(text)) for text in (b"ok b", b"no")]
    manual.engine.end_search(
        add.request_id,
        beam(b"ok b", -1.0, reason=FinishReason.STOP, logprobs=told[0]),
        beam(b"no", -3.0, logprobs=told[1]),
    )
    answer = await call
    assert [output.text for output in answer.outputs] == ["ok b", "no"]
    assert [output.beam_score for output in answer.outputs] == [-1.0, -3.0]
    for output, text in zip(answer.outputs, (b"ok b", b"no"), strict=True):
        assert [position.token.token_id for position in output.logprobs] == list(text)
        assert [len(position.top) for position in output.logprobs] == [2] * len(text)
    assert answer.usage.completion_tokens == 6


async def test_sampled_sequences_have_no_score(stack: Stack) -> None:
    plain = common_pb2.SamplingParams(max_tokens=2)
    answer = await stack.unary(prompt="hello", sampling_params=plain)
    assert not answer.outputs[0].HasField("beam_score")


REFUSED: tuple[tuple[str, dict[str, Any]], ...] = (
    ("beam_search.beam_width", {"beam_search": common_pb2.BeamSearch(beam_width=0)}),
    ("beam_search.beam_width", {"beam_search": common_pb2.BeamSearch(beam_width=17)}),
    (
        "beam_search.length_penalty",
        {"beam_search": common_pb2.BeamSearch(beam_width=2, length_penalty=float("nan"))},
    ),
    (
        "beam_search.early_stopping",
        {"beam_search": common_pb2.BeamSearch(beam_width=2, early_stopping=9)},  # type: ignore[arg-type]
    ),
    ("n", {"n": 4}),
    ("temperature", {"temperature": 0.5}),
    ("top_p", {"top_p": 0.9}),
    ("top_k", {"top_k": 5}),
    ("min_p", {"min_p": 0.1}),
    ("best_of", {"best_of": 1}),
    ("repetition_penalty", {"repetition_penalty": 1.1}),
    ("presence_penalty", {"presence_penalty": 0.5}),
    ("frequency_penalty", {"frequency_penalty": 0.5}),
    ("logit_bias", {"logit_bias": {3: 1.0}}),
    ("bad_words", {"bad_words": ["x"]}),
    ("allowed_token_ids", {"allowed_token_ids": common_pb2.TokenIds(ids=[3])}),
    ("min_tokens", {"min_tokens": 1}),
    ("prompt_logprobs", {"prompt_logprobs": 0}),
    ("structured_output", {"structured_output": common_pb2.StructuredOutput(regex="a")}),
    ("max_tokens", {"max_tokens": 4000}),
)


async def test_what_is_refused_names_its_field(manual: Stack) -> None:
    for field, fields in REFUSED:
        wide = {"beam_search": common_pb2.BeamSearch(beam_width=8)} if field == "max_tokens" else {}
        params = sampling(**wide, **fields)
        failure = await manual.fails(manual.open(prompt="hello", sampling_params=params))
        assert failure.code is grpc.StatusCode.INVALID_ARGUMENT
        assert failure.fields == [f"sampling_params.{field}"]
    assert not any(isinstance(command, Add) for command in manual.engine.commands)


async def test_neutral_values_are_no_draws(manual: Stack) -> None:
    params = sampling(temperature=0, top_p=1, top_k=-1, min_p=0, repetition_penalty=1)
    call = manual.open(prompt="hello", sampling_params=params)
    assert (await add_of(manual)).sampling.beam is not None
    call.cancel()


async def test_an_engine_with_too_few_rows(make_stack: Callable[..., Any]) -> None:
    stack = await make_stack(auto=False, max_num_seqs=2)
    failure = await stack.fails(stack.open(prompt="hello", sampling_params=sampling()))
    assert failure.fields == ["sampling_params.beam_search.beam_width"]
    assert "beam_width is 3, and the engine runs 2 sequences at once" in failure.message


async def test_cancel_ends_the_search(manual: Stack) -> None:
    call = manual.open(request_id="r", prompt="x", sampling_params=sampling(n=3))
    add = await add_of(manual)
    await manual.inference.Cancel(inference_pb2.CancelRequest(request_id="r"))
    failure = await manual.fails(call)
    assert failure.code is grpc.StatusCode.CANCELLED
    await manual.engine.wait_for(lambda: manual.engine.aborted == [add.request_id])


async def test_it_starts_over_on_the_next_engine(manual: Stack) -> None:
    call = manual.open(prompt="x", sampling_params=sampling(n=2))
    first = await add_of(manual)
    await manual.engine.kill()
    await manual.restart_engine(auto=False)
    again = await add_of(manual)
    assert again.token_ids == first.token_ids
    assert again.num_output_tokens == 0
    assert again.sampling == first.sampling
    manual.engine.end_search(again.request_id, beam(b"one", -1.0, EOS), beam(b"two", -2.0))
    frames = await manual.rest(call)
    assert sorted(frame.delta.text for frame in frames[:-1]) == ["one", "two"]
    assert [o.beam_score for o in frames[-1].final.outputs] == [-1.0, -2.0]


async def test_the_next_engine_may_have_too_few_rows(manual: Stack) -> None:
    call = manual.open(prompt="x", sampling_params=sampling(n=2))
    await add_of(manual)
    await manual.engine.kill()
    await manual.restart_engine(auto=False, max_num_seqs=2)
    failure = await manual.fails(call)
    assert failure.code is grpc.StatusCode.UNAVAILABLE
    assert "the engine that came back has no room for its 3 beams" in failure.message
    assert not manual.engine.running


async def test_a_client_that_was_away_gets_the_whole(make_stack: Callable[..., Any]) -> None:
    stack = await make_stack(auto=False, config={"resume_ttl": 30.0})
    for number, when_lost in enumerate(("WHEN_LOST_RUN_ON", "WHEN_LOST_PAUSE")):
        name = f"r{number}"
        options = inference_pb2.ResumeOptions(when_lost=when_lost)
        call = stack.open(
            request_id=name, prompt="x", sampling_params=sampling(n=2), resumable=options
        )
        add = await add_of(stack)
        call.cancel()
        held = stack.frontend.resumables._held[name]
        await stack.until(lambda held=held: held.reader is None)
        if when_lost == "WHEN_LOST_PAUSE":
            await stack.engine.wait_for(lambda: not stack.engine.running)
            back = stack.open(request_id=name, resume_from=inference_pb2.ResumePoint())
            add = await add_of(stack)
        else:
            back = stack.open(request_id=name, resume_from=inference_pb2.ResumePoint())
        stack.engine.end_search(add.request_id, beam(b"one", -1.0, EOS), beam(b"two", -2.0))
        frames = await stack.rest(back)
        assert sorted(frame.delta.text for frame in frames[:-1]) == ["one", "two"]
        assert [o.beam_score for o in frames[-1].final.outputs] == [-1.0, -2.0]


async def test_text_outlives_the_tokenizer(manual: Stack) -> None:
    """The sequences of a search are opened again like any other's."""
    call = manual.open(prompt="x", sampling_params=sampling(n=2), return_token_ids=True)
    add = await add_of(manual)
    address = manual.tokenizer.address
    gate = manual.tokenizer.reply_gate = asyncio.Event()
    manual.engine.end_search(add.request_id, beam(b"one", -1.0, EOS), beam(b"two", -2.0))
    await manual.tokenizer.wait_for(lambda: len(manual.tokenizer.messages) == 2)
    await manual.tokenizer.close()
    gate.set()
    manual.tokenizer = FakeTokenizer(address=address)
    await manual.tokenizer.start()
    frames = [frame async for frame in call]
    assert sorted(frame.delta.text for frame in frames[:-1]) == ["one", "two"]
