"""The engine protocol of vLLM's gRPC server, by the stubs of the package that defines it."""

from __future__ import annotations

import importlib.util
import json
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from smg_grpc_proto import vllm_engine_pb2 as pb
from smg_grpc_proto import vllm_engine_pb2_grpc
from smg_grpc_proto.generated import common_pb2

from frontend.server import Frontend
from frontend.vllm_engine.protocol import SERVICE
from pagewire.config import FrontendConfig
from pagewire.errors import ConfigError
from pagewire.types import FinishReason
from pagewire.wire.messages import Add
from tests.support.fake_engine import EOS, TEXT, VOCAB_SIZE, FakeRequest, fake_position, letters

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.frontend.conftest import Stack

ON = {"vllm_protocol": True}
WAIT_S = 60.0
# A field that this server obeys, and a value of it beside which a request still stands. Those
# that are missing here are refused; test_every_field_is_obeyed_or_refused enumerates them.
OBEYED: dict[str, Any] = {
    "temperature": 0.5,
    "top_p": 0.5,
    "top_k": 5,
    "min_p": 0.25,
    "frequency_penalty": 0.5,
    "presence_penalty": -0.5,
    "repetition_penalty": 1.5,
    "max_tokens": 9,
    "min_tokens": 2,
    "stop": ["zz"],
    "stop_token_ids": [255],
    "skip_special_tokens": True,
    "spaces_between_special_tokens": True,
    "ignore_eos": True,
    "n": 2,
    "logprobs": 3,
    "prompt_logprobs": 1,
    "seed": 7,
    "include_stop_str_in_output": True,
    "logit_bias": {5: 2.0},
    "truncate_prompt_tokens": 4,
    "grammar_from_first_token": True,
    "json_schema": '{"type": "object"}',
    "regex": "[a-z]+",
    "grammar": 'start: "a"',
    "json_object": True,
    "choice": pb.ChoiceConstraint(choices=["a", "b"]),
}
REFUSED_SAMPLING: dict[str, Any] = {"structural_tag": "{}"}
OBEYED_REQUEST = {
    "request_id",
    "tokenized",
    "text",
    "sampling_params",
    "stream",
    "data_parallel_rank",
}
REFUSED_REQUEST: dict[str, Any] = {
    "kv_transfer_params": pb.KvTransferParams(remote_host="h"),
    "kv_transfer_params_json": "{}",
    "mm_inputs": pb.MultimodalInputs(),
    "extra_mm_inputs": [pb.MultimodalInputs()],
    "media_refs": pb.MediaRefs(),
}


def request(ids: bytes = b"hello", *, stream: bool = False, **fields: Any) -> pb.GenerateRequest:
    sampling = fields.pop("sampling", {"max_tokens": 6})
    return pb.GenerateRequest(
        tokenized=pb.TokenizedInput(input_ids=ids),
        sampling_params=pb.SamplingParams(**sampling),
        stream=stream,
        **fields,
    )


def client(stack: Stack) -> Any:
    return vllm_engine_pb2_grpc.VllmEngineStub(stack.channel)


async def generate(stack: Stack, message: pb.GenerateRequest) -> list[Any]:
    return [response async for response in client(stack).Generate(message, timeout=WAIT_S)]


def adds(stack: Stack) -> list[Add]:
    return [command for command in stack.engine.commands if isinstance(command, Add)]


@pytest.fixture
async def stack(make_stack: Callable[..., Any]) -> Stack:
    made: Stack = await make_stack(
        step_s=0.002, config=ON, default_sampling={"temperature": 0.25, "top_k": 50}
    )
    return made


async def test_a_whole_answer_is_one_message(stack: Stack) -> None:
    (response,) = await generate(stack, request(request_id="r-1"))
    got = response.complete
    assert bytes(got.output_ids) == TEXT[:6].encode()
    assert got.finish_reason == "length"
    assert (got.prompt_tokens, got.completion_tokens, got.cached_tokens) == (5, 6, 1)
    assert got.WhichOneof("matched_stop") is None
    assert adds(stack)[-1].token_ids == bytes(b for i in b"hello" for b in i.to_bytes(4, "little"))


async def test_a_stream_has_new_ids_only_and_then_the_outcome(stack: Stack) -> None:
    responses = await generate(stack, request(stream=True, sampling={"max_tokens": 20}))
    chunks = [response.chunk for response in responses[:-1]]
    assert len(chunks) > 1
    assert bytes(i for chunk in chunks for i in chunk.token_ids) == TEXT[:20].encode()
    assert all(chunk.completion_tokens == len(chunk.token_ids) > 0 for chunk in chunks)
    assert {(chunk.prompt_tokens, chunk.cached_tokens) for chunk in chunks} == {(5, 1)}
    final = responses[-1].complete
    assert (final.finish_reason, final.completion_tokens) == ("length", 20)
    assert not final.output_ids


async def test_text_is_tokenized_here(stack: Stack) -> None:
    message = pb.GenerateRequest(text="hey", sampling_params=pb.SamplingParams(max_tokens=2))
    (response,) = await generate(stack, message)
    assert response.complete.prompt_tokens == 3


@pytest.mark.parametrize("stream", [False, True])
async def test_each_sequence_has_its_index(stack: Stack, stream: bool) -> None:
    sampling = {"max_tokens": 5, "n": 3}
    responses = await generate(stack, request(stream=stream, sampling=sampling))
    finals = [r.complete for r in responses if r.WhichOneof("response") == "complete"]
    assert [final.index for final in finals] == [0, 1, 2]
    for index in range(3):
        ids = [
            i
            for r in responses
            if r.WhichOneof("response") == "chunk" and r.chunk.index == index
            for i in r.chunk.token_ids
        ]
        assert bytes(ids if stream else finals[index].output_ids) == TEXT[:5].encode()


async def test_what_stopped_it_is_told(make_stack: Callable[..., Stack]) -> None:
    def eos_at_five(running: FakeRequest) -> int:
        return EOS if len(running.output) == 4 else letters(running)

    stack = await make_stack(next_token=eos_at_five, config=ON)
    (by_eos,) = await generate(stack, request())
    assert by_eos.complete.finish_reason == "stop"
    assert by_eos.complete.WhichOneof("matched_stop") is None
    assert list(by_eos.complete.output_ids) == [*TEXT[:4].encode(), EOS]
    (by_id,) = await generate(stack, request(sampling={"stop_token_ids": [ord("h")]}))
    assert by_id.complete.matched_token_id == ord("h")
    (by_text,) = await generate(stack, request(sampling={"stop": ["e "]}))
    assert by_text.complete.matched_stop_str == "e "


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("top", [0, 3])
async def test_logprobs_of_output_and_prompt(stack: Stack, stream: bool, top: int) -> None:
    sampling = {"max_tokens": 4, "logprobs": top, "prompt_logprobs": top}
    responses = await generate(stack, request(stream=stream, sampling=sampling))
    parts = [getattr(r, r.WhichOneof("response")) for r in responses]
    output = [p.output_logprobs for p in parts if p.HasField("output_logprobs")]
    said = [fake_position(i, at, top) for at, i in enumerate(TEXT[:4].encode())]
    assert [i for part in output for i in part.token_ids] == [it.token_id for it in said]
    assert [v for part in output for v in part.token_logprobs] == [it.logprob for it in said]
    tops = [(*t.token_ids,) for part in output for t in part.top_logprobs]
    assert tops == ([it.top_ids for it in said] if top else [])
    (prompt,) = [p.input_logprobs for p in parts if p.HasField("input_logprobs")]
    assert bytes(prompt.token_ids) == b"hello"
    assert [v.HasField("value") for v in prompt.token_logprobs] == [False, *[True] * 4]
    assert len(prompt.top_logprobs) == (5 if top else 0)


async def test_sampling_is_what_the_engine_gets(stack: Stack) -> None:
    await generate(stack, request())
    # Unset is neutral here: the gateway adds the model's defaults, or leaves them out.
    unset = adds(stack)[-1].sampling
    assert (unset.temperature, unset.top_p, unset.top_k) == (1.0, 1.0, 0)
    assert (unset.repetition_penalty, unset.ignore_eos, unset.structured_output) == (
        1.0,
        False,
        None,
    )
    constraints = ("json_schema", "regex", "grammar", "json_object", "choice")
    for constraint in constraints:
        dropped = {*constraints, "ignore_eos"} - {constraint}
        given = {name: value for name, value in OBEYED.items() if name not in dropped}
        await generate(stack, request(b"hello world", sampling=given))
        got = adds(stack)[-2].sampling
        assert got.structured_output is not None
        assert got.structured_output.kind == constraint
    assert (got.temperature, got.top_p, got.top_k, got.min_p) == (0.5, 0.5, 5, 0.25)
    assert (got.frequency_penalty, got.presence_penalty) == (0.5, -0.5)
    assert (got.repetition_penalty, got.max_tokens, got.min_tokens, got.seed) == (1.5, 9, 2, 7)
    assert got.stop_token_ids == (255,)
    assert (got.logprobs, got.prompt_logprobs) == (3, 1)
    assert len(adds(stack)[-2].token_ids) == 4 * 4, "truncated"
    await generate(stack, request(sampling={"max_tokens": 1, "seed": -2, "ignore_eos": True}))
    assert adds(stack)[-1].sampling.seed == 2**64 - 2
    assert adds(stack)[-1].sampling.ignore_eos


def test_every_field_is_obeyed_or_refused() -> None:
    """One that a new version of the protocol brings has to be looked at."""
    sampling = {field.name for field in pb.SamplingParams.DESCRIPTOR.fields}
    assert sampling == {*OBEYED, *REFUSED_SAMPLING}
    fields = {field.name for field in pb.GenerateRequest.DESCRIPTOR.fields}
    assert fields == OBEYED_REQUEST | REFUSED_REQUEST.keys()


REFUSED: tuple[tuple[dict[str, Any], str], ...] = (
    *(({name: value}, name) for name, value in REFUSED_REQUEST.items()),
    ({"data_parallel_rank": 1}, "data_parallel_rank"),
    *(({"sampling": {n: v}}, f"sampling_params.{n}") for n, v in REFUSED_SAMPLING.items()),
    ({"sampling": {"temperature": -1.0}}, "sampling_params.temperature"),
    ({"sampling": {"top_p": 2.0}}, "sampling_params.top_p"),
    ({"sampling": {"logprobs": -1}}, "sampling_params.logprobs"),
    ({"sampling": {"max_tokens": 5000}}, "sampling_params.max_tokens"),
    ({"sampling": {"json_object": False}}, "sampling_params.json_object"),
    ({"sampling": {"choice": pb.ChoiceConstraint(choices=[""])}}, "sampling_params.choice[0]"),
    ({"ids": b""}, "tokenized.input_ids"),
    ({"request_id": "a b"}, "request_id"),
)


async def test_what_cannot_be_done_is_refused_by_name(stack: Stack) -> None:
    for fields, field in REFUSED:
        call = client(stack).Generate(request(**fields), timeout=WAIT_S)
        failure = await stack.fails(call)
        assert (failure.code, failure.fields) == (grpc.StatusCode.INVALID_ARGUMENT, [field])
        assert failure.initial == {}  # Trailers-Only
    assert not adds(stack)


async def test_ids_outside_the_vocabulary_and_no_input(stack: Stack) -> None:
    message = pb.GenerateRequest(tokenized=pb.TokenizedInput(input_ids=[5, VOCAB_SIZE]))
    failure = await stack.fails(client(stack).Generate(message, timeout=WAIT_S))
    assert failure.fields == ["tokenized.input_ids"]
    failure = await stack.fails(client(stack).Generate(pb.GenerateRequest(), timeout=WAIT_S))
    assert failure.fields == ["input"]


async def test_abort_ends_what_runs_and_forgives_what_does_not(
    make_stack: Callable[..., Stack],
) -> None:
    stack = await make_stack(auto=False, config=ON)
    call = client(stack).Generate(request(stream=True, request_id="r-1"), timeout=WAIT_S)
    (running,) = await stack.engine.wait_running()
    same = client(stack).Generate(request(stream=True, request_id="r-1"), timeout=WAIT_S)
    assert (await stack.fails(same)).code is grpc.StatusCode.ALREADY_EXISTS
    await client(stack).Abort(pb.AbortRequest(request_ids=["gone", "r-1"]), timeout=WAIT_S)
    assert (await stack.fails(call)).code is grpc.StatusCode.CANCELLED
    await stack.engine.wait_for(lambda: stack.engine.aborted == [running.id])
    await client(stack).Abort(pb.AbortRequest(request_ids=["r-1"]), timeout=WAIT_S)


async def test_a_client_that_leaves_frees_the_engine(make_stack: Callable[..., Stack]) -> None:
    stack = await make_stack(auto=False, config=ON)
    call = client(stack).Generate(request(stream=True), timeout=WAIT_S)
    (running,) = await stack.engine.wait_running()
    stack.engine.step()
    assert (await call.read()).chunk.token_ids
    call.cancel()
    await stack.engine.wait_for(lambda: stack.engine.aborted == [running.id])
    await stack.until(lambda: stack.frontend.dispatcher.admission.requests == 0)


async def test_admission_and_drain_hold_for_it(make_stack: Callable[..., Stack]) -> None:
    stack = await make_stack(auto=False, config={**ON, "max_requests": 1})
    first = client(stack).Generate(request(sampling={"max_tokens": 1}), timeout=WAIT_S)
    await stack.engine.wait_running()
    refused = await stack.fails(client(stack).Generate(request(), timeout=WAIT_S))
    assert (refused.code, refused.info.reason) == (
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        "QUEUE_FULL",
    )
    stack.frontend.dispatcher.drain()
    refused = await stack.fails(client(stack).Generate(request(), timeout=WAIT_S))
    assert (refused.code, refused.info.reason) == (grpc.StatusCode.UNAVAILABLE, "DRAINING")
    health = await client(stack).HealthCheck(pb.HealthCheckRequest(), timeout=WAIT_S)
    assert not health.healthy
    stack.engine.step()
    assert (await first.read()).complete.finish_reason == "length"
    exposition = stack.frontend.metrics.exposition().decode()
    told = 'pagewire_rpcs_handled_total{code="RESOURCE_EXHAUSTED",method="/%s/Generate"} 1'
    assert told % SERVICE in exposition


async def test_what_gateways_ask_of_a_worker(stack: Stack) -> None:
    asked = client(stack)
    assert (await asked.HealthCheck(pb.HealthCheckRequest(), timeout=WAIT_S)).healthy
    assert await stack.check(SERVICE) == 1
    model = await asked.GetModelInfo(pb.GetModelInfoRequest(), timeout=WAIT_S)
    assert (model.served_model_name, model.vocab_size) == ("fake", VOCAB_SIZE)
    assert (model.max_context_length, model.max_req_input_len) == (4096, 4095)
    assert list(model.eos_token_ids) == [EOS]
    assert list(model.architectures) == ["FakeForCausalLM"]
    assert json.loads(model.default_sampling_params_json) == {"temperature": 0.25, "top_k": 50}
    await generate(stack, request())
    server = await asked.GetServerInfo(pb.GetServerInfoRequest(), timeout=WAIT_S)
    assert (server.max_num_seqs, server.block_size, server.data_parallel_size) == (256, 16, 1)
    assert server.last_receive_timestamp > 1e9
    assert server.uptime_seconds > 0
    load = (await asked.GetLoads(pb.GetLoadsRequest(), timeout=WAIT_S)).loads[0]
    assert (load.max_total_num_tokens, load.num_used_tokens) == (16_000, 0)
    assert load.cache_hit_rate == pytest.approx(2 / 5)
    other = await asked.GetLoads(pb.GetLoadsRequest(dp_rank=1), timeout=WAIT_S)
    assert not other.loads
    flushed = await asked.FlushCache(common_pb2.FlushCacheRequest(), timeout=WAIT_S)
    assert flushed.success
    assert flushed.message.startswith("7 blocks")


async def test_load_is_told_while_it_lasts(make_stack: Callable[..., Stack]) -> None:
    stack = await make_stack(auto=False, config=ON)
    call = client(stack).Generate(request(stream=True), timeout=WAIT_S)
    (running,) = await stack.engine.wait_running()
    stack.engine.heartbeat()

    def seen() -> bool:
        stats = stack.frontend.dispatcher.stats().engine
        return stats is not None and stats.num_running == 1

    await stack.until(seen)
    load = (await client(stack).GetLoads(pb.GetLoadsRequest(), timeout=WAIT_S)).loads[0]
    assert (load.num_running_reqs, load.num_total_reqs) == (1, 1)
    assert (load.num_used_tokens, load.num_waiting_uncached_tokens) == (16, 5)
    stack.engine._end(running.id, FinishReason.LENGTH)
    stack.engine.emit()
    assert (await stack.rest(call))[-1].complete.finish_reason == "length"


@pytest.mark.parametrize("method", ["Embed", "StartProfile", "StopProfile", "SubscribeKvEvents"])
async def test_what_there_is_not_is_unimplemented(stack: Stack, method: str) -> None:
    messages = {"Embed": pb.EmbedRequest, "SubscribeKvEvents": common_pb2.SubscribeKvEventsRequest}
    message = messages.get(method) or getattr(common_pb2, f"{method}Request")
    failure = await stack.fails(getattr(client(stack), method)(message(), timeout=WAIT_S))
    assert (failure.code, failure.info.reason) == (
        grpc.StatusCode.UNIMPLEMENTED,
        "UNIMPLEMENTED",
    )


async def test_it_is_off_unless_asked_for(make_stack: Callable[..., Stack]) -> None:
    stack = await make_stack()
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await client(stack).HealthCheck(pb.HealthCheckRequest(), timeout=WAIT_S)
    assert error.value.code() is grpc.StatusCode.UNIMPLEMENTED


def test_the_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "smg_grpc_proto" else find(name)
    )
    with pytest.raises(ConfigError, match=r"--vllm-protocol: .* pip install"):
        Frontend(FrontendConfig(**ON))  # type: ignore[arg-type]
