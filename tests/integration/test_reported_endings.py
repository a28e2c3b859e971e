"""Public bug reports on how requests and servers end, with servers of a tiny model."""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
import urllib.request
from typing import TYPE_CHECKING, Any

import grpc.aio
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from prometheus_client.parser import text_string_to_metric_families

from frontend.metrics_page import MAX_AGE_S
from pagewire.v1 import common_pb2, inference_pb2
from tests.support.stack import connect, read_stream, running_stack
from tests.support.unharmed import unharmed

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.support.stack import Api, Stack

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

FLAGS = ("--device=cpu", "--dtype=float32", "--kv-cache-memory=64MiB", "--cpu-threads=1")
LONG = common_pb2.SamplingParams(max_tokens=4000, ignore_eos=True)
NUM_ROWS = 8
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


@pytest.fixture(scope="module")
def small(tiny_model: Path) -> Iterator[Stack]:
    """Runs eight sequences at once; the others wait. Long streams are long: guesses would end
    them before what waits for its deadline."""
    flags = (*FLAGS, f"--max-num-seqs={NUM_ROWS}", "--speculative-method=none")
    with running_stack(f"--model={tiny_model}", *flags) as stack:
        yield stack


def open_stream(api: Api, deadline_s: float | None = None, **fields: Any) -> Any:
    fields = {"prompt": "x", "sampling_params": LONG} | fields
    return api.inference.GenerateStream(
        inference_pb2.GenerateStreamRequest(**fields), timeout=deadline_s
    )


async def first_delta(call: Any) -> None:
    response = await call.read()
    assert response is not grpc.aio.EOF
    assert response.WhichOneof("frame") == "delta"


async def failure_of(call: Any) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        while await call.read() is not grpc.aio.EOF:
            pass
    return raised.value


async def counters(stack: Stack) -> dict[tuple[str, str], float]:
    """Of /metrics: (name, finished_reason or nothing) -> value."""

    def get() -> str:
        with urllib.request.urlopen(f"http://{stack.http_address}/metrics", timeout=30) as answer:
            return str(answer.read().decode())

    await asyncio.sleep(2 * MAX_AGE_S)  # a page may be so old
    text = await asyncio.to_thread(get)
    return {
        (sample.name, sample.labels.get("finished_reason", "")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def gained(
    before: dict[tuple[str, str], float], after: dict[tuple[str, str], float], *key: str
) -> float:
    name, reason = (*key, "")[:2]
    return after[name, reason] - before[name, reason]


# ROCm/ATOM#1562
async def test_unary_clients_that_hang_up_free_everything(small: Stack) -> None:
    async with connect(small) as api, unharmed(api):
        before = await counters(small)
        request = inference_pb2.GenerateRequest(prompt="x", sampling_params=LONG)
        for number in range(10):
            options = [("grpc.use_local_subchannel_pool", 1)]
            channel = grpc.aio.insecure_channel(small.address, options)
            raw = channel.unary_unary("/pagewire.v1.InferenceService/Generate")
            call = asyncio.ensure_future(raw(request.SerializeToString()))
            await api.eventually(lambda stats: stats.num_requests_running == 1)
            if number % 2:
                await channel.close(None)
            else:
                call.cancel()
            await api.at_rest()
            await asyncio.gather(call, return_exceptions=True)
            await channel.close()
        after = await counters(small)
        assert gained(before, after, "vllm:request_success_total", "abort") == 10
        # Nothing goes on in secret.
        again = await counters(small)
        assert gained(after, again, "vllm:generation_tokens_total") == 0


# triton-inference-server/server#6920
async def test_a_deadline_ends_what_runs_and_what_waits(small: Stack) -> None:
    async with connect(small) as api, unharmed(api):
        before = await counters(small)
        calls = [open_stream(api) for _ in range(NUM_ROWS)]
        for call in calls:
            await first_delta(call)
        running = await counters(small)
        short = common_pb2.SamplingParams(max_tokens=9)
        queued = open_stream(api, deadline_s=1.5, prompt="never read", sampling_params=short)
        assert (await failure_of(queued)).code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await api.eventually(lambda stats: not stats.num_requests_waiting)
        after = await counters(small)
        assert gained(running, after, "vllm:prompt_tokens_total") == 0
        for call in calls:
            call.cancel()
        await api.at_rest()
        timed = open_stream(api, deadline_s=1.5)
        assert (await failure_of(timed)).code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await api.at_rest()
        after = await counters(small)
        assert gained(before, after, "vllm:request_success_total", "abort") == NUM_ROWS + 2


# bojand/ghz#226, #254: what a load tester does with server streams.
async def test_200_streams_20_at_a_time_and_then_cut_off(small: Stack) -> None:
    async def ask(places: asyncio.Semaphore, index: int, most: int | None) -> str:
        async with places:
            call = open_stream(
                api,
                deadline_s=60,
                prompt=f"{index}",
                sampling_params=common_pb2.SamplingParams(
                    # The second kind must not end by itself, however late the cancel comes.
                    max_tokens=32 if most is None else 4000,
                    ignore_eos=True,
                    seed=index,
                ),
            )
            if most is None:
                assert (await read_stream(call)).final.usage.completion_tokens == 32
            else:
                for _ in range(most):
                    await first_delta(call)
                call.cancel()
            return str((await call.code()).name)

    async with connect(small) as api, unharmed(api):
        before = await counters(small)
        places = asyncio.Semaphore(20)
        assert set(await asyncio.gather(*(ask(places, i, None) for i in range(200)))) == {"OK"}
        assert set(await asyncio.gather(*(ask(places, i, 4) for i in range(200)))) == {"CANCELLED"}
        await api.at_rest()
        after = await counters(small)
        assert gained(before, after, "vllm:request_success_total", "length") == 200
        assert gained(before, after, "vllm:request_success_total", "abort") == 200
        assert gained(before, after, "vllm:e2e_request_latency_seconds_count") == 400


# vllm-project/vllm#16832
async def test_what_a_preempted_stream_says_is_whole(tiny_model: Path) -> None:
    """Sixteen blocks of sixteen for four requests that need eight each."""
    blocks = ("--kv-cache-memory=52224", "--max-model-len=256")
    sampling = common_pb2.SamplingParams(temperature=0, max_tokens=96, ignore_eos=True)
    prompts = [common_pb2.TokenIds(ids=range(5 + i, 37 + i)) for i in range(4)]
    with running_stack(f"--model={tiny_model}", *FLAGS, *blocks) as stack:
        async with connect(stack) as api, unharmed(api):
            assert (await api.stats()).num_blocks == 16

            async def ask(ids: common_pb2.TokenIds) -> tuple[list[int], str]:
                call = open_stream(
                    api, prompt=None, prompt_token_ids=ids, sampling_params=sampling,
                    return_token_ids=True, skip_prefix_cache=True,
                )  # fmt: skip
                frames = [frame async for frame in call]
                usage = frames.pop().final.usage
                assert (usage.prompt_tokens, usage.completion_tokens) == (32, 96)
                token_ids = [i for frame in frames for i in frame.delta.token_ids]
                return token_ids, "".join(frame.delta.text for frame in frames)

            alone = [await ask(ids) for ids in prompts]
            before = await counters(stack)
            assert await asyncio.gather(*map(ask, prompts)) == alone
            after = await counters(stack)
            assert all(len(token_ids) == 96 for token_ids, _ in alone)
            assert gained(before, after, "vllm:num_preemptions_total") >= 1


# vllm-project/vllm#19881, #24897, #34730, #24885, #36964, #7222
async def test_two_impatient_servers_from_death_to_death(tiny_model: Path) -> None:
    """Without replay the engine's death ends the streams. A launcher that is killed leaves
    nothing that holds up the next one, on the same ports. A drain that is too short ends
    the streams, and leaves nothing on the host."""
    with tempfile.TemporaryDirectory(prefix="pw") as base:
        environment = {"XDG_RUNTIME_DIR": base}
        flags = [f"--model={tiny_model}", *FLAGS, "--engine-restart-timeout=0", "--drain-timeout=1"]
        with running_stack(*flags, environment=environment) as stack:
            family = _family(stack)
            async with connect(stack) as api, grpc.aio.insecure_channel(stack.address) as channel:
                await _kill_the_engine(api, health_pb2_grpc.HealthStub(channel))
                async with unharmed(api):
                    pass
                calls = await _streams(api, 4)
                family += _family(stack)
                stack.process.kill()
                for call in calls:
                    assert (await failure_of(call)).code() is grpc.StatusCode.UNAVAILABLE
                assert await asyncio.to_thread(stack.process.wait, 60) == -signal.SIGKILL
        left = os.listdir(base)
        assert len(left) == 1
        ports = zip(
            ("--port", "--admin-port", "--http-port"),
            (stack.address, stack.admin_address, stack.http_address),
            strict=True,
        )
        flags += [f"{flag}={address.rpartition(':')[2]}" for flag, address in ports]
        with running_stack(*flags, environment=environment) as stack:
            assert len(os.listdir(base)) == 1
            assert os.listdir(base) != left
            family += _family(stack)
            async with connect(stack) as api, grpc.aio.insecure_channel(stack.address) as channel:
                async with unharmed(api):
                    pass
                await _drain_too_short(stack, api, health_pb2_grpc.HealthStub(channel))
        psutil.wait_procs(family, timeout=60)
        assert [process for process in family if process.is_running()] == []
        assert os.listdir(base) == []


async def _streams(api: Api, count: int) -> list[Any]:
    """Each with text already."""
    calls = [open_stream(api) for _ in range(count)]
    for call in calls:
        await first_delta(call)
    return calls


async def _kill_the_engine(api: Api, health: Any) -> None:
    watch = health.Watch(health_pb2.HealthCheckRequest())
    assert (await watch.read()).status == SERVING
    calls = await _streams(api, 8)
    psutil.Process((await api.stats()).engine_pid).kill()
    errors = await asyncio.wait_for(asyncio.gather(*map(failure_of, calls)), 60)
    assert {error.code() for error in errors} == {grpc.StatusCode.UNAVAILABLE}
    assert (await watch.read()).status == NOT_SERVING
    assert (await watch.read()).status == SERVING  # the next engine
    watch.cancel()


async def _drain_too_short(stack: Stack, api: Api, health: Any) -> None:
    calls = await _streams(api, 4)
    stack.process.send_signal(signal.SIGTERM)
    await api.eventually(lambda stats: stats.draining)
    assert (await health.Check(health_pb2.HealthCheckRequest())).status == NOT_SERVING
    refused = await failure_of(open_stream(api))
    assert refused.code() is grpc.StatusCode.UNAVAILABLE
    for error in await asyncio.gather(*map(failure_of, calls)):
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        assert "shut down" in str(error.details())
    assert await asyncio.to_thread(stack.process.wait, 60) == 0


def _family(stack: Stack) -> list[psutil.Process]:
    return psutil.Process(stack.process.pid).children(recursive=True)
