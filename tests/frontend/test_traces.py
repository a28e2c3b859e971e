"""Spans as an OTLP receiver gets them, exemplars, and the trace in the logs."""

from __future__ import annotations

import asyncio
import io
import itertools
import json
import logging
import os
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import grpc
import httpx
import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span as OtlpSpan
from opentelemetry.proto.trace.v1.trace_pb2 import Status
from opentelemetry.semconv._incubating.attributes import gen_ai_attributes, rpc_attributes
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from frontend.call_trace import CallTracing, current_trace
from pagewire.errors import ConfigError
from pagewire.obs.logging import JsonFormatter
from pagewire.obs.traces import Tracer, find_endpoint, read_traceparent
from pagewire.v1 import common_pb2, tokenizer_pb2
from tests.support.otlp_receiver import OtlpReceiver, values

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from tests.frontend.conftest import Stack

TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = "b7ad6b7169203331"
SAMPLED = f"00-{TRACE}-{PARENT}-01"
UNSAMPLED = f"00-{TRACE}-{PARENT}-00"
STREAM = "pagewire.v1.InferenceService/GenerateStream"
STAGES = ["tokenize", "queue", "prefill", "decode", "detokenize"]


@pytest.fixture
async def receiver() -> AsyncIterator[OtlpReceiver]:
    receiver = OtlpReceiver()
    await receiver.start()
    yield receiver
    await receiver.close()


@pytest.fixture
async def traced(make_stack: Callable[..., Stack], receiver: OtlpReceiver) -> Stack:
    return await make_stack(auto=False, config={"otlp_endpoint": receiver.endpoint})


async def flush(stack: Stack) -> None:
    """Also the spans of calls that have ended for the client, but not yet for the server."""
    await stack.until(lambda: not stack.frontend.dispatcher.admission.requests)
    await asyncio.to_thread(stack.frontend.tracer.flush)  # type: ignore[union-attr]


async def arrived(stack: Stack, receiver: OtlpReceiver, name: str, count: int = 1) -> None:
    async with asyncio.timeout(60):
        while len(receiver.named(name)) < count:
            await flush(stack)


def tokens(number: int) -> common_pb2.SamplingParams:
    return common_pb2.SamplingParams(max_tokens=number)


def children(receiver: OtlpReceiver, parent: OtlpSpan) -> list[OtlpSpan]:
    found = [span for span in receiver.spans if span.parent_span_id == parent.span_id]
    return sorted(found, key=lambda span: span.start_time_unix_nano)


async def answered(stack: Stack, num_steps: int, **fields: Any) -> list[Any]:
    call = stack.open(**fields)
    await stack.engine.wait_running(1)
    for _ in range(num_steps):
        stack.engine.step()
    return await stack.rest(call)


async def test_a_request_is_a_tree_under_its_caller(traced: Stack, receiver: OtlpReceiver) -> None:
    begun = time.time_ns()
    await answered(
        traced,
        3,
        prompt="abc",
        request_id="r1",
        tenant="acme",
        sampling_params=common_pb2.SamplingParams(max_tokens=3, temperature=0.5, top_p=0.75),
        metadata=(("traceparent", SAMPLED), ("tracestate", "vendor=1")),
    )
    await arrived(traced, receiver, STREAM)
    ended = time.time_ns()
    call = receiver.one(STREAM)
    assert {span.trace_id.hex() for span in receiver.spans} == {TRACE}
    assert call.parent_span_id.hex() == PARENT
    assert call.trace_state == "vendor=1"
    assert call.kind == OtlpSpan.SPAN_KIND_SERVER
    assert call.status.code == Status.STATUS_CODE_UNSET
    assert values(call.attributes) == {
        rpc_attributes.RPC_SYSTEM_NAME: "grpc",
        rpc_attributes.RPC_METHOD: STREAM,
        rpc_attributes.RPC_RESPONSE_STATUS_CODE: "OK",
    }
    (inference,) = children(receiver, call)
    assert inference.name == "text_completion fake"
    stages = children(receiver, inference)
    assert [stage.name for stage in stages] == STAGES
    # One after the other inside the request, and it inside the call.
    times = [begun, call.start_time_unix_nano, inference.start_time_unix_nano]
    for stage in stages:
        times += [stage.start_time_unix_nano, stage.end_time_unix_nano]
    times += [inference.end_time_unix_nano, call.end_time_unix_nano, ended]
    # They are of two clocks, whose distance is measured once for each request.
    assert all(later - earlier > -1_000_000 for earlier, later in itertools.pairwise(times)), times
    told = values(inference.attributes)
    assert {k: v for k, v in told.items() if not k.startswith("gen_ai.latency.")} == {
        gen_ai_attributes.GEN_AI_OPERATION_NAME: "text_completion",
        gen_ai_attributes.GEN_AI_PROVIDER_NAME: "pagewire",
        gen_ai_attributes.GEN_AI_REQUEST_MODEL: "fake",
        gen_ai_attributes.GEN_AI_REQUEST_MAX_TOKENS: 3,
        gen_ai_attributes.GEN_AI_REQUEST_TEMPERATURE: 0.5,
        gen_ai_attributes.GEN_AI_REQUEST_TOP_P: 0.75,
        gen_ai_attributes.GEN_AI_REQUEST_TOP_K: 0,
        gen_ai_attributes.GEN_AI_REQUEST_FREQUENCY_PENALTY: 0.0,
        gen_ai_attributes.GEN_AI_REQUEST_PRESENCE_PENALTY: 0.0,
        gen_ai_attributes.GEN_AI_RESPONSE_ID: "r1",
        gen_ai_attributes.GEN_AI_RESPONSE_MODEL: "fake",
        gen_ai_attributes.GEN_AI_RESPONSE_FINISH_REASONS: ["length"],
        gen_ai_attributes.GEN_AI_USAGE_INPUT_TOKENS: 3,
        gen_ai_attributes.GEN_AI_USAGE_OUTPUT_TOKENS: 3,
        gen_ai_attributes.GEN_AI_USAGE_CACHE_READ_INPUT_TOKENS: 1,
        "gen_ai.request.id": "r1",
        "pagewire.tenant": "acme",
        "pagewire.engines": 1,
        "pagewire.preemptions": 0,
    }
    assert 0 < told["gen_ai.latency.time_to_first_token"] <= told["gen_ai.latency.e2e"]
    assert receiver.resource["service.name"] == "pagewire"


async def test_the_parents_flag_is_respected(traced: Stack, receiver: OtlpReceiver) -> None:
    for traceparent in (UNSAMPLED, SAMPLED):
        await answered(
            traced,
            1,
            prompt="x",
            sampling_params=tokens(1),
            metadata=(("traceparent", traceparent),),
        )
    await arrived(traced, receiver, STREAM)
    assert receiver.one(STREAM).parent_span_id.hex() == PARENT
    assert len(receiver.spans) == 2 + len(STAGES)


@pytest.mark.parametrize("traceparent", [None, "nonsense", f"00-{'0' * 32}-{PARENT}-01"])
async def test_without_a_parent_a_trace_begins_here(
    traced: Stack, receiver: OtlpReceiver, traceparent: str | None
) -> None:
    metadata = None if traceparent is None else (("traceparent", traceparent),)
    await answered(traced, 1, prompt="x", sampling_params=tokens(1), metadata=metadata)
    await arrived(traced, receiver, STREAM)
    call = receiver.one(STREAM)
    assert call.parent_span_id == b""
    assert call.trace_id.hex() not in (TRACE, "0" * 32)


async def test_spans_across_a_replay(traced: Stack, receiver: OtlpReceiver) -> None:
    """The engine is killed after the first token; another one goes on."""
    call = traced.open(prompt="abc", sampling_params=tokens(3))
    await traced.engine.wait_running(1)
    traced.engine.step()
    await call.read()
    await traced.engine.kill()
    await traced.until(lambda: not traced.frontend.health.serving)
    await traced.restart_engine(auto=False)
    await traced.engine.wait_running(1)
    traced.engine.step()
    traced.engine.step()
    frames = await traced.rest(call)
    assert frames[-1].final.usage.completion_tokens == 3
    await arrived(traced, receiver, STREAM)
    inference = receiver.one("text_completion fake")
    stages = children(receiver, inference)
    lives = ["tokenize", "queue", "prefill", "decode", "wait_for_engine", "queue", "resume"]
    assert [stage.name for stage in stages] == [*lives, "detokenize"]
    for earlier, later in itertools.pairwise(stages):
        assert earlier.end_time_unix_nano <= later.start_time_unix_nano + 1000, later.name
    assert [event.name for event in inference.events] == ["replay"]
    assert values(inference.attributes)["pagewire.engines"] == 2
    assert inference.status.code == Status.STATUS_CODE_UNSET


async def test_a_lost_request_is_an_error(
    make_stack: Callable[..., Stack], receiver: OtlpReceiver
) -> None:
    config = {"otlp_endpoint": receiver.endpoint, "engine_restart_timeout": 0}
    stack = await make_stack(auto=False, config=config)
    call = stack.open(prompt="abc", sampling_params=tokens(3))
    await stack.engine.wait_running(1)
    stack.engine.step()
    await call.read()
    await stack.engine.kill()
    assert (await stack.fails(call)).code is grpc.StatusCode.UNAVAILABLE
    await arrived(stack, receiver, STREAM)
    for span in (receiver.one(STREAM), receiver.one("text_completion fake")):
        assert span.status.code == Status.STATUS_CODE_ERROR, span.name
    assert values(receiver.one(STREAM).attributes)["error.type"] == "UNAVAILABLE"
    told = values(receiver.one("text_completion fake").attributes)
    assert told["error.type"] == "unavailable"
    assert told["gen_ai.usage.output_tokens"] == 1
    assert "decode" in [span.name for span in receiver.spans]


async def test_the_callers_mistakes_are_no_errors_of_the_server(
    traced: Stack, receiver: OtlpReceiver
) -> None:
    await traced.fails(traced.open(prompt=""))
    call = traced.open(prompt="x")
    await traced.engine.wait_running(1)
    call.cancel()
    await arrived(traced, receiver, STREAM, 2)
    refused, cancelled = receiver.named(STREAM)
    told = [values(span.attributes)["rpc.response.status_code"] for span in (refused, cancelled)]
    assert told == ["INVALID_ARGUMENT", "CANCELLED"]
    for span in (refused, cancelled):
        assert span.status.code == Status.STATUS_CODE_UNSET
    assert not children(receiver, refused), "it was not admitted"
    (inference,) = children(receiver, cancelled)
    assert values(inference.attributes)["error.type"] == "cancelled"
    assert [span.name for span in children(receiver, inference)] == ["tokenize", "queue"]


async def test_each_prompt_of_an_http_request_has_its_own(
    traced: Stack, receiver: OtlpReceiver
) -> None:
    body = {"model": "fake", "prompt": ["a", "b"], "max_tokens": 1}
    headers = {"traceparent": SAMPLED}
    url = f"http://{traced.frontend.http_address}/v1/completions"
    async with httpx.AsyncClient() as client:
        work = asyncio.ensure_future(client.post(url, json=body, headers=headers))
        await traced.engine.wait_running(2)
        traced.engine.step()
        assert (await work).status_code == 200
        refused = await client.post(url, json={**body, "prompt": ""}, headers=headers)
    assert refused.status_code == 400
    await arrived(traced, receiver, "POST /v1/completions", 2)
    call, failed = receiver.named("POST /v1/completions")
    assert call.parent_span_id.hex() == failed.parent_span_id.hex() == PARENT
    assert [span.name for span in children(receiver, call)] == ["text_completion fake"] * 2
    assert values(call.attributes) == {
        "http.request.method": "POST",
        "http.route": "/v1/completions",
        "http.response.status_code": 200,
        "url.scheme": "http",
    }
    assert values(failed.attributes)["http.response.status_code"] == 400


async def test_the_tokenizer_is_told_of_the_trace(traced: Stack, receiver: OtlpReceiver) -> None:
    request = tokenizer_pb2.TokenizeRequest(text="x")
    await traced.tokens.Tokenize(request, metadata=(("traceparent", SAMPLED),))
    name = "pagewire.v1.TokenizerService/Tokenize"
    await arrived(traced, receiver, name)
    told = read_traceparent(traced.tokenizer.metadata[-1]["traceparent"])
    assert told == (TRACE, receiver.one(name).span_id.hex(), True)


async def test_exemplars_name_the_trace(make_stack: Callable[..., Stack]) -> None:
    """Without a receiver too: the caller's trace is recorded by the caller."""
    stack = await make_stack(step_s=0.001)
    for traceparent in (UNSAMPLED, None):
        metadata = None if traceparent is None else (("traceparent", traceparent),)
        await stack.stream(prompt="x", sampling_params=tokens(2), metadata=metadata)
    page = stack.frontend.metrics.exposition(openmetrics=True).decode()
    assert "trace_id" not in page
    await stack.stream(prompt="x", sampling_params=tokens(2), metadata=(("traceparent", SAMPLED),))
    async with httpx.AsyncClient(base_url=f"http://{stack.frontend.http_address}") as client:
        accept = "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5"
        response = await client.get("/metrics", headers={"accept": accept})
        plain = await client.get("/metrics")
    assert response.headers["content-type"].startswith("application/openmetrics-text; version=1")
    found = {
        family.name: sample.exemplar
        for family in text_string_to_metric_families(response.text)
        for sample in family.samples
        if sample.exemplar is not None
    }
    assert set(found) == {"vllm:time_to_first_token_seconds", "vllm:e2e_request_latency_seconds"}
    for exemplar in found.values():
        assert exemplar.labels == {"trace_id": TRACE}
        assert 0 < exemplar.value < 10
    assert "trace_id" not in plain.text


async def test_the_log_names_the_trace(
    traced: Stack, receiver: OtlpReceiver, caplog: pytest.LogCaptureFixture
) -> None:
    """Also one that begins here."""
    written = io.StringIO()
    handler = logging.StreamHandler(written)
    handler.setFormatter(JsonFormatter("frontend"))
    logger = logging.getLogger("frontend.request_log")
    logger.addHandler(handler)
    try:
        with caplog.at_level(logging.INFO, logger=logger.name):
            await answered(traced, 1, prompt="x", sampling_params=tokens(1))
            await arrived(traced, receiver, STREAM)
    finally:
        logger.removeHandler(handler)
    (line,) = written.getvalue().splitlines()
    assert json.loads(line)["trace_id"] == receiver.one(STREAM).trace_id.hex()


async def test_a_receiver_that_is_not_there_costs_nothing_but_its_spans(
    make_stack: Callable[..., Stack],
) -> None:
    stack = await make_stack(step_s=0.001, config={"otlp_endpoint": "http://127.0.0.1:1"})
    got = await stack.stream(prompt="x", sampling_params=tokens(2))
    assert got.final.usage.completion_tokens == 2
    async with asyncio.timeout(8):
        await stack.frontend.close()


@pytest.mark.parametrize(
    ("header", "parent"),
    [
        (SAMPLED, (TRACE, PARENT, True)),
        (UNSAMPLED, (TRACE, PARENT, False)),
        (f"00-{TRACE}-{PARENT}-03", (TRACE, PARENT, True)),
        (f"01-{TRACE}-{PARENT}-01-more", (TRACE, PARENT, True)),
        (f"00-{TRACE}-{PARENT}-01-more", None),
        (f"ff-{TRACE}-{PARENT}-01", None),
        (f"00-{TRACE.upper()}-{PARENT}-01", None),
        (f"00-{'0' * 32}-{PARENT}-01", None),
        (f"00-{TRACE}-{'0' * 16}-01", None),
        (f"00-{TRACE}-{PARENT}", None),
        (SAMPLED + "\n", None),
        (b"", None),
        (None, None),
    ],
)
def test_traceparent(header: object, parent: tuple[str, str, bool] | None) -> None:
    assert read_traceparent(header) == parent


def test_bad_settings_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for endpoint in ("collector:4317", "ftp://x:1", "http://"):
        with pytest.raises(ConfigError, match=r"--otlp-endpoint: .*no URL"):
            Tracer(endpoint)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf")
    with pytest.raises(ConfigError, match="OTEL_EXPORTER_OTLP_PROTOCOL: 'http/protobuf'"):
        Tracer("http://127.0.0.1:4317")


def test_where_the_receiver_is(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT"):
        monkeypatch.delenv(variable, raising=False)
    assert find_endpoint(None) is None
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://a:1")
    assert find_endpoint(None) == ("http://a:1", "OTEL_EXPORTER_OTLP_ENDPOINT")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "http://b:1")
    assert find_endpoint(None) == ("http://b:1", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
    assert find_endpoint("http://c:1") == ("http://c:1", "--otlp-endpoint")


def test_the_sdk_is_an_extra() -> None:
    """Off, nothing of it is imported; asked for where it is not, the flag is named."""
    program = """
import sys
import frontend.server
assert not [name for name in sys.modules if name.startswith("opentelemetry")]
sys.modules["opentelemetry"] = None
from pagewire.errors import ConfigError
from pagewire.obs.logging import JsonFormatter
from pagewire.obs.traces import Tracer
try:
    Tracer("http://127.0.0.1:4317")
except ConfigError as error:
    print(error)
"""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("OTEL_")}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=environment, check=True
    )
    assert done.stdout.startswith("--otlp-endpoint: needs the OpenTelemetry SDK"), done.stderr
    assert "pip install 'pagewire[otlp]'" in done.stdout


def test_off_and_without_a_parent_there_is_nothing() -> None:
    tracing = CallTracing(None)
    assert tracing.rpc("/x/y", {}) is None
    assert tracing.http("GET", "/x", {"traceparent": "nonsense"}) is None
    assert current_trace() is None
