"""What /metrics says, by name and by count."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from frontend.engine_stats import total_stats
from frontend.metrics import OTHER_TENANTS, Metrics
from pagewire.v1 import common_pb2
from tests.support.fake_engine import EOS, FakeEngine

if TYPE_CHECKING:
    from collections.abc import Callable

    from pagewire.wire.messages import StepStats
    from tests.frontend.conftest import Stack

LABELS = {"model_name": "fake", "engine": "0"}
NAMES = {
    "vllm:num_requests_running": "gauge",
    "vllm:num_requests_waiting": "gauge",
    "vllm:kv_cache_usage_perc": "gauge",
    "vllm:cache_config_info": "gauge",
    "vllm:prefix_cache_queries": "counter",
    "vllm:prefix_cache_hits": "counter",
    "vllm:external_prefix_cache_queries": "counter",
    "vllm:external_prefix_cache_hits": "counter",
    "pagewire_kv_blocks_offloaded": "counter",
    "pagewire_kv_blocks_restored": "counter",
    "pagewire_kv_offload_usage_perc": "gauge",
    "pagewire_mixed_prefill_tokens_max": "gauge",
    "vllm:num_preemptions": "counter",
    "vllm:prompt_tokens": "counter",
    "vllm:generation_tokens": "counter",
    "vllm:request_success": "counter",
    "vllm:admission_rejections": "counter",
    "vllm:time_to_first_token_seconds": "histogram",
    "vllm:inter_token_latency_seconds": "histogram",
    "vllm:e2e_request_latency_seconds": "histogram",
    "vllm:request_queue_time_seconds": "histogram",
    "vllm:request_prefill_time_seconds": "histogram",
    "vllm:request_decode_time_seconds": "histogram",
    "vllm:request_inference_time_seconds": "histogram",
    "vllm:request_prompt_tokens": "histogram",
    "vllm:request_generation_tokens": "histogram",
    "vllm:iteration_tokens_total": "histogram",
    "pagewire_inter_token_latency_seconds": "histogram",
    "pagewire_wire_lag_seconds": "histogram",
    "pagewire_tokenizer_batch_rows": "histogram",
    "pagewire_detokenize_seconds": "histogram",
    "pagewire_cancel_to_free_seconds": "histogram",
    "pagewire_abort_to_free_seconds": "histogram",
    "pagewire_tokenizer_queue": "gauge",
    "pagewire_tokenizer_calls": "gauge",
    "pagewire_requests_in_flight": "gauge",
    "pagewire_queued_tokens": "gauge",
    "pagewire_tenant_requests": "counter",
    "pagewire_tenant_prompt_tokens": "counter",
    "pagewire_tenant_generation_tokens": "counter",
    "pagewire_requests_refused": "counter",
    "pagewire_rpcs_handled": "counter",
}


class Scrape:
    def __init__(self, text: str) -> None:
        self.families = {f.name: f for f in text_string_to_metric_families(text)}
        self._samples = {
            (s.name, tuple(sorted(s.labels.items()))): s.value
            for f in self.families.values()
            for s in f.samples
        }

    def value(self, name: str, **labels: str) -> float:
        extra = {} if name.startswith(("pagewire_r", "pagewire_q")) else LABELS
        return self._samples[name, tuple(sorted((extra | labels).items()))]

    def samples(self) -> Any:
        return self._samples.items()


async def scrape(stack: Stack) -> Scrape:
    """As it is now: the page of /metrics may be 40 ms old. Lets the server go on, too."""
    await asyncio.sleep(0)
    return Scrape(stack.frontend.metrics.exposition().decode())


async def test_names_and_types(stack: Stack) -> None:
    await stack.stream(prompt="x", sampling_params=common_pb2.SamplingParams(max_tokens=2))
    await stack.fails(stack.open(prompt=""))
    async with httpx.AsyncClient(base_url=f"http://{stack.frontend.http_address}") as client:
        response = await client.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=")
    families = Scrape(response.text).families
    assert {n: families[n].type for n in NAMES if n in families} == NAMES


# vllm-project/vllm#31503, #55634
async def test_counts(make_stack: Callable[..., Stack]) -> None:
    """5 closed after the first delta, 3 stopped, 2 at their length, 1 lost by the engine."""
    stack = await make_stack(auto=False)
    sampling = common_pb2.SamplingParams(max_tokens=4)
    calls = [stack.open(prompt=f"{i:02}", sampling_params=sampling) for i in range(11)]
    requests = await stack.engine.wait_running(11)
    by_prompt = {int(bytes(r.prompt_ids)): r for r in requests}
    stack.engine.step()
    for call in calls:
        await call.read()
    for call in calls[:5]:
        call.cancel()
    await stack.engine.wait_for(lambda: len(stack.engine.aborted) == 5)
    stack.engine.emit({by_prompt[i].id: [EOS] for i in (5, 6, 7)})
    stack.engine.emit({by_prompt[i].id: [65, 66, 67] for i in (8, 9)})
    stack.engine.emit(errors={by_prompt[10].id: "lost"})
    for call in calls[5:10]:
        await stack.rest(call)
    await stack.fails(calls[10])
    await stack.until(lambda: not stack.frontend.dispatcher.engine_side.aborted)
    await stack.fails(stack.open(prompt="x", model="other"))
    got = await scrape(stack)
    outcome = {
        r: got.value("vllm:request_success_total", finished_reason=r)
        for r in ("stop", "length", "abort", "error")
    }
    assert outcome == {"stop": 3, "length": 2, "abort": 5, "error": 1}
    for histogram in (
        "vllm:e2e_request_latency_seconds",
        "vllm:time_to_first_token_seconds",
        "vllm:request_queue_time_seconds",
        "vllm:request_prefill_time_seconds",
        "vllm:request_decode_time_seconds",
        "vllm:request_prompt_tokens",
        "vllm:request_generation_tokens",
    ):
        assert got.value(f"{histogram}_count") == 11, histogram
        assert got.value(f"{histogram}_bucket", le="+Inf") == 11, histogram
    # Token counters agree with the histograms over requests.
    assert got.value("vllm:generation_tokens_total") == 11 + 3 + 6
    assert got.value("vllm:request_generation_tokens_sum") == 11 + 3 + 6
    assert got.value("vllm:prompt_tokens_total") == 22
    assert got.value("vllm:request_prompt_tokens_sum") == 22
    assert got.value("vllm:prefix_cache_queries_total") == 22
    assert got.value("vllm:prefix_cache_hits_total") == 11
    assert got.value("vllm:inter_token_latency_seconds_count") == 5
    assert got.value("pagewire_inter_token_latency_seconds_count") == 5
    assert got.value("pagewire_cancel_to_free_seconds_count") == 5
    assert got.value("pagewire_abort_to_free_seconds_count") >= 1
    assert got.value("vllm:cache_config_info", block_size="16", num_gpu_blocks="1000") == 1
    assert got.value("vllm:num_requests_running") == 0
    assert got.value("vllm:num_requests_waiting") == 0
    assert got.value("pagewire_requests_in_flight") == 0
    method = "/pagewire.v1.InferenceService/GenerateStream"
    assert got.value("pagewire_rpcs_handled_total", method=method, code="CANCELLED") == 5
    assert got.value("pagewire_rpcs_handled_total", method=method, code="OK") == 5
    assert got.value("pagewire_rpcs_handled_total", method=method, code="NOT_FOUND") == 1
    assert all(value >= 0 for _, value in got.samples())


async def test_tenants_have_figures_of_their_own(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many as there is room for; names are whatever callers say."""
    monkeypatch.setattr("frontend.metrics.MAX_TENANTS", 2)
    sampling = common_pb2.SamplingParams(max_tokens=2)
    for tenant in ("a", "b", "c", "a", "d"):
        await stack.stream(prompt="xyz", tenant=tenant, sampling_params=sampling)
    got = await scrape(stack)
    for tenant, times in {"a": 2, "b": 1, OTHER_TENANTS: 2}.items():
        of = {"tenant": tenant}
        done = got.value("pagewire_tenant_requests_total", finished_reason="length", **of)
        prompt = got.value("pagewire_tenant_prompt_tokens_total", **of)
        output = got.value("pagewire_tenant_generation_tokens_total", **of)
        assert (done, prompt, output) == (times, 3 * times, 2 * times), tenant
    tenants = {dict(labels)["tenant"] for (name, labels), _ in got.samples() if "tenant_r" in name}
    assert tenants == {"a", "b", OTHER_TENANTS}


async def test_gauges_follow_the_engine(make_stack: Callable[..., Stack]) -> None:
    stack = await make_stack(auto=False, max_num_seqs=2, config={"engine_restart_timeout": 0})
    calls = [stack.open(prompt="x") for _ in range(3)]
    await stack.engine.wait_running(3)
    stack.engine.step()
    await stack.until(lambda: stack.engine_client.last_step == 1)
    got = await scrape(stack)
    assert got.value("vllm:num_requests_running") == 2
    assert got.value("vllm:num_requests_waiting") == 1
    assert got.value("vllm:kv_cache_usage_perc") == pytest.approx(0.002)
    assert got.value("pagewire_requests_in_flight") == 3
    await stack.engine.kill()
    await stack.until(lambda: not stack.frontend.health.serving)
    got = await scrape(stack)
    assert got.value("vllm:num_requests_running") == 0
    assert got.value("vllm:num_requests_waiting") == 0
    assert got.value("vllm:request_success_total", finished_reason="error") == 3
    for call in calls:
        call.cancel()


async def test_admission_rejections_are_counted(make_stack: Callable[..., Stack]) -> None:
    stack = await make_stack(auto=False, config={"max_requests": 1})
    call = stack.open(prompt="x")
    await stack.engine.wait_running(1)
    await stack.fails(stack.open(prompt="x"))
    text = (await scrape(stack))._samples
    assert text["vllm:admission_rejections_total", (("reason", "max_num_queued_reqs"),)] == 1
    assert text["vllm:admission_rejections_total", (("reason", "max_num_queued_tokens"),)] == 0
    call.cancel()


def stats(**fields: Any) -> StepStats:
    engine = FakeEngine()
    return engine._stats(**fields)


def test_totals_of_a_new_epoch_start_from_zero() -> None:
    metrics = Metrics()
    model = metrics.engine_ready(FakeEngine().ready())
    model.engine_stats(stats(total_preemptions=5), epoch=1)
    model.engine_stats(stats(total_preemptions=7), epoch=1)
    model.engine_stats(stats(total_preemptions=2), epoch=2)
    got = Scrape(metrics.exposition().decode())
    assert got.value("vllm:num_preemptions_total") == 9


def test_guesses_are_counted_by_their_place_over_all_engines() -> None:
    metrics = Metrics()
    model = metrics.engine_ready(FakeEngine().ready())
    for epoch, per_position in ((1, (4, 2)), (1, (9, 3)), (2, (5, 1, 1))):
        accepted = sum(per_position)
        model.engine_stats(
            stats(
                total_drafts=10,
                total_draft_tokens=30,
                total_accepted_tokens=accepted,
                total_accepted_per_position=per_position,
            ),
            epoch=epoch,
        )
    got = Scrape(metrics.exposition().decode())
    assert got.value("vllm:spec_decode_num_drafts_total") == 20
    assert got.value("vllm:spec_decode_num_draft_tokens_total") == 60
    assert got.value("vllm:spec_decode_num_accepted_tokens_total") == 12 + 7
    by_place = [
        got.value("vllm:spec_decode_num_accepted_tokens_per_pos_total", position=str(at))
        for at in range(3)
    ]
    assert by_place == [14, 4, 1]


def test_several_engines_guesses_are_added_up() -> None:
    one = stats(total_drafts=1, total_accepted_per_position=(4, 2))
    other = stats(total_drafts=2, total_accepted_per_position=(5, 1, 1))
    total = total_stats([one, other])
    assert total is not None
    assert total.total_drafts == 3
    assert total.total_accepted_per_position == (9, 3, 1)


def test_the_host_tier_is_counted_by_itself() -> None:
    metrics = Metrics()
    model = metrics.engine_ready(FakeEngine().ready())
    tier = {"num_host_blocks": 8, "num_used_host_blocks": 2}
    for times in (1, 3):
        totals = {
            "prefix_cache_hits": 160 * times,
            "host_cache_queries": 64 * times,
            "host_cache_hits": 48 * times,
            "total_offloaded_blocks": 5 * times,
            "total_restored_blocks": 3 * times,
        }
        model.engine_stats(stats(**tier, **totals), epoch=1)
    got = Scrape(metrics.exposition().decode())
    assert got.value("vllm:prefix_cache_hits_total") == 480
    assert got.value("vllm:external_prefix_cache_queries_total") == 192
    assert got.value("vllm:external_prefix_cache_hits_total") == 144
    assert got.value("pagewire_kv_blocks_offloaded_total") == 15
    assert got.value("pagewire_kv_blocks_restored_total") == 9
    assert got.value("pagewire_kv_offload_usage_perc") == 0.25
    model.engine_gone(1)
    got = Scrape(metrics.exposition().decode())
    assert got.value("pagewire_kv_offload_usage_perc") == 0


def test_another_model_replaces_the_first() -> None:
    metrics = Metrics()
    metrics.engine_ready(FakeEngine().ready())
    metrics.engine_ready(FakeEngine().ready())
    metrics.engine_ready(FakeEngine(model_name="other").ready())
    text = metrics.exposition().decode()
    assert 'model_name="other"' in text
    assert 'model_name="fake"' not in text
