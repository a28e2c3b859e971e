"""Streams and unary calls that end well."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from pagewire.v1 import common_pb2, model_pb2, tokenizer_pb2
from tests.support.fake_engine import EOS, TEXT, FakeRequest, letters

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.frontend.conftest import Stack


def sampling(**fields: object) -> common_pb2.SamplingParams:
    return common_pb2.SamplingParams(**fields)  # type: ignore[arg-type]


async def test_stream_has_deltas_then_one_final(stack: Stack) -> None:
    got = await stack.stream(
        request_id="mine", prompt="hello", sampling_params=sampling(max_tokens=30, seed=7)
    )
    assert got.text == TEXT[:30]
    assert got.ids == []
    final = got.final
    assert (final.request_id, final.model, final.seed) == ("mine", "fake", 7)
    assert len(final.outputs) == 1
    assert final.outputs[0].finish_reason == common_pb2.FINISH_REASON_LENGTH
    assert not final.outputs[0].HasField("stop_match")
    usage = final.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens) == (5, 30, 1)
    timings = final.timings
    assert timings.queue.nanos == 250_000_000
    assert timings.prefill.nanos == 500_000_000
    assert (timings.decode.seconds, timings.decode.nanos) == (1, 500_000_000)


async def test_unary_equals_stream(stack: Stack) -> None:
    params = sampling(max_tokens=50, stop=["fox j"], seed=1)
    got = await stack.stream(prompt="hello", sampling_params=params, return_token_ids=True)
    one = await stack.unary(prompt="hello", sampling_params=params, return_token_ids=True)
    output = one.outputs[0]
    assert output.text == got.text == "the quick brown "
    assert list(output.token_ids) == got.ids == list(b"the quick brown fox j")
    assert output.stop_match.stop_string == "fox j"
    assert output.finish_reason == common_pb2.FINISH_REASON_STOP
    assert output.stop_match == got.final.outputs[0].stop_match
    assert one.usage == got.final.usage
    assert one.usage.completion_tokens == len("the quick brown fox j")


async def test_stop_string_aborts_the_engine_at_once(manual: Stack) -> None:
    call = manual.open(prompt="x", sampling_params=sampling(stop=["ick"], max_tokens=100))
    (request,) = await manual.engine.wait_running()
    manual.engine.emit({request.id: list(b"the quick brown")})
    frames = [frame async for frame in call]
    assert "".join(f.delta.text for f in frames[:-1]) == "the qu"
    # The tokens after the match are not the caller's.
    assert frames[-1].final.usage.completion_tokens == len("the quick")
    await manual.engine.wait_for(lambda: manual.engine.aborted == [request.id])


async def test_include_stop_str_in_output(stack: Stack) -> None:
    got = await stack.stream(
        prompt="x",
        sampling_params=sampling(stop=["ick"], max_tokens=40, include_stop_str_in_output=True),
    )
    assert got.text == "the quick"


async def test_eos_and_stop_token_are_told_apart(make_stack: Callable[..., Stack]) -> None:
    def eos_at_five(request: FakeRequest) -> int:
        return EOS if len(request.output) == 4 else letters(request)

    stack = await make_stack(next_token=eos_at_five)
    got = await stack.stream(prompt="x", sampling_params=sampling(max_tokens=10))
    assert got.final.outputs[0].stop_match.eos_token_id == EOS
    assert got.final.usage.completion_tokens == 5
    assert got.text == TEXT[:4]
    got = await stack.stream(
        prompt="x", sampling_params=sampling(max_tokens=10, stop_token_ids=[ord("h")])
    )
    assert got.final.outputs[0].stop_match.stop_token_id == ord("h")
    got = await stack.stream(
        prompt="x", sampling_params=sampling(max_tokens=10, stop_token_ids=[EOS])
    )
    assert got.final.outputs[0].stop_match.stop_token_id == EOS


async def test_split_characters_wait_and_the_rest_is_flushed(manual: Stack) -> None:
    call = manual.open(prompt="x", sampling_params=sampling(max_tokens=5), return_token_ids=True)
    (request,) = await manual.engine.wait_running()
    euro = list("€".encode())
    manual.engine.emit({request.id: euro[:2]})
    first = (await call.read()).delta
    assert (first.text, list(first.token_ids)) == ("", euro[:2])
    manual.engine.emit({request.id: [*euro[2:], *euro[:2]]})
    second = (await call.read()).delta
    # max_tokens ended it within a character: the flush makes it one U+FFFD.
    assert second.text == "€\ufffd"
    assert (await call.read()).final.usage.completion_tokens == 5


async def test_ids_in_ids_out_without_the_tokenizer(stack: Stack) -> None:
    got = await stack.stream(
        prompt_token_ids=common_pb2.TokenIds(ids=[1, 2, 3]),
        sampling_params=sampling(max_tokens=4),
        return_token_ids=True,
    )
    assert got.ids == list(TEXT[:4].encode())
    assert got.final.usage.prompt_tokens == 3


async def test_chat_goes_through_the_template(manual: Stack) -> None:
    chat = common_pb2.ChatInput(messages=[common_pb2.ChatMessage(role="user", content="hi")])
    chat.template_kwargs.update({"think": False})
    call = manual.open(chat=chat, sampling_params=sampling(max_tokens=1))
    (request,) = await manual.engine.wait_running()
    assert bytes(request.prompt_ids) == b"<user>hi\n<assistant>"
    manual.engine.step()
    assert len([frame async for frame in call]) == 2


async def test_what_the_engine_gets(make_stack: Callable[..., Stack]) -> None:
    stack = await make_stack(
        auto=False, max_model_len=100, default_sampling={"temperature": 0.6, "top_p": 0.9}
    )
    calls = [
        stack.open(prompt="abc", cache_salt="s", priority=-3, deadline_s=9),
        stack.open(
            prompt="abc",
            sampling_params=sampling(
                temperature=0, top_k=-1, seed=5, max_tokens=9, ignore_eos=True, stop_token_ids=[8]
            ),
        ),
    ]
    requests = await stack.engine.wait_running(2)
    default, given = sorted(requests, key=lambda r: r.add.sampling.ignore_eos)
    assert default.add.epoch == stack.engine.epoch
    assert (default.add.cache_salt, default.add.priority) == ("s", -3)
    assert default.add.deadline_ms is not None
    assert 5_000 < default.add.deadline_ms <= 9_500  # gRPC rounds a timeout up
    assert default.add.sampling.temperature == 0.6
    assert default.add.sampling.top_p == 0.9
    assert default.add.sampling.max_tokens == 97
    assert default.add.sampling.seed != given.add.sampling.seed
    wire = given.add.sampling
    assert (wire.temperature, wire.top_k, wire.seed, wire.max_tokens) == (0, 0, 5, 9)
    assert (wire.top_p, wire.ignore_eos, wire.stop_token_ids) == (0.9, True, (8,))
    for call in calls:
        call.cancel()


async def test_one_step_is_one_message_to_the_tokenizer(manual: Stack) -> None:
    calls = [manual.open(prompt="x", sampling_params=sampling(max_tokens=2)) for _ in range(20)]
    requests = await manual.engine.wait_running(20)
    manual.engine.step()
    await manual.tokenizer.wait_for(lambda: len(manual.tokenizer.messages) == 2)
    message = manual.tokenizer.messages[-1]
    assert sorted(message.sequences) == sorted(r.id for r in requests)
    assert list(message.counts) == [1] * 20
    assert len(message.opens) == 20
    manual.engine.step()
    for call in calls:
        frames = [frame async for frame in call]
        assert "".join(f.delta.text for f in frames[:-1]) == TEXT[:2]


async def test_concurrent_streams_do_not_mix(stack: Stack) -> None:
    lengths = [1 + i % 40 for i in range(60)]
    results = await asyncio.gather(
        *(
            stack.stream(prompt=f"p{i}", sampling_params=sampling(max_tokens=n))
            for i, n in enumerate(lengths)
        )
    )
    assert [r.text for r in results] == [(TEXT * 2)[:n] for n in lengths]
    assert stack.frontend.dispatcher.admission.requests == 0
    assert stack.frontend.dispatcher.admission.queued_tokens == 0


async def test_models(stack: Stack) -> None:
    listed = (await stack.models.ListModels(model_pb2.ListModelsRequest())).models
    assert [m.name for m in listed] == ["fake"]
    got = (await stack.models.GetModel(model_pb2.GetModelRequest(name="fake"))).model
    assert got == listed[0]
    assert (got.max_model_len, got.vocab_size, got.block_size) == (4096, 300, 16)
    assert list(got.eos_token_ids) == [EOS]
    assert got.has_chat_template


async def test_tokenizer_is_proxied(stack: Stack) -> None:
    ids = (await stack.tokens.Tokenize(tokenizer_pb2.TokenizeRequest(text="héllo"))).token_ids
    assert list(ids) == list("héllo".encode())
    response = await stack.tokens.Detokenize(
        tokenizer_pb2.DetokenizeRequest(token_ids=ids, model="fake")
    )
    assert response.text == "héllo"
    chat = common_pb2.ChatInput(messages=[common_pb2.ChatMessage(role="user", content="hi")])
    rendered = await stack.tokens.ApplyChatTemplate(
        tokenizer_pb2.ApplyChatTemplateRequest(chat=chat)
    )
    assert rendered.text == "<user>hi\n<assistant>"


async def test_tokenize_errors_keep_their_field(stack: Stack) -> None:
    failure = await stack.fails(
        stack.tokens.Detokenize(tokenizer_pb2.DetokenizeRequest(token_ids=[400]))
    )
    assert failure.fields == ["token_ids"]
    failure = await stack.fails(
        stack.tokens.Tokenize(tokenizer_pb2.TokenizeRequest(text="x", model="other"))
    )
    assert failure.code.name == "NOT_FOUND"
    assert failure.fields == ["model"]
