"""What Prometheus sees: vLLM's names for what vLLM has, pagewire_ for the rest.

The vllm: names and buckets let routers and dashboards made for vLLM read this
server (https://docs.vllm.ai/en/latest/usage/metrics.html). Children are bound to
their labels once, when the model is known. The engine has no metrics of its own:
its totals arrive as StepStats and are added here as differences.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from frontend.branches import branches_of
from frontend.engine_stats import counted_totals, kv_cache_usage, total_stats
from frontend.instruments import Counter, Gauge, Histogram, Registry, WatchedGauge

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from frontend.admission import RejectReason
    from frontend.instruments import Distribution, F, Family, Value
    from frontend.request import RequestState
    from pagewire.wire.messages import Ready, StepStats

FINISHED_REASONS = ("stop", "length", "abort", "error")
ENGINE = "0"
_LABELS = ("model_name", "engine")
_MAX_LAG_S = 60.0
_MAX_OUT_OF_REACH = 64
MAX_TENANTS = 64
"""Callers may make up names: those beyond have their figures in common."""
OTHER_TENANTS = "other"

_TTFT = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_ITL = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
_FINE_ITL = (
    *(0.0005, 0.001, 0.0015, 0.002, 0.003, 0.004, 0.005, 0.006, 0.008, 0.01, 0.0125, 0.015),
    *(0.02, 0.025, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 5.0),
)
_REQUEST = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
_TOKENS = (*(d * 10**e for e in range(5) for d in (1, 2, 5)), 100_000, 200_000)
_ITERATION = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
_LAG = (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 1.0)
_FREE = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)
_BATCH = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


class Bucketed(msgspec.Struct):
    """A histogram since the start: `counts[i]` observations of at most `bounds[i]` seconds
    and above the bound before; the last count is of those beyond all bounds."""

    bounds: tuple[float, ...] = ()
    counts: tuple[int, ...] = (0,)


class Latencies(NamedTuple):
    ttft: Bucketed
    itl: Bucketed
    e2e: Bucketed


class ServedTotals(msgspec.Struct):
    """Since the start, over all engines there were."""

    prompt_tokens: int = 0
    output_tokens: int = 0
    prefix_cache_queries: int = 0
    """Prompt tokens looked up."""
    prefix_cache_hits: int = 0
    preemptions: int = 0


class Metrics:
    """All instruments of one frontend; its own registry, so tests can have many."""

    def __init__(self) -> None:
        self.registry = Registry()
        self.model: ModelMetrics | None = None
        """None until an engine has said what it serves."""
        self._rejections = self._counter(
            "vllm:admission_rejections",
            "Requests turned away by an admission bound.",
            ("reason",),
        )
        self._refused = self._counter(
            "pagewire_requests_refused",
            "Generate calls that ended before the engine was given them, by error code.",
            ("code",),
        )
        self._rpcs = self._counter(
            "pagewire_rpcs_handled",
            "RPCs by method and status code.",
            ("method", "code"),
        )
        self._given_up = self._counter(
            "pagewire_deadlines_given_up",
            "Requests dropped in the engine's queue for their deadline.",
        )
        self._replayed = self._counter(
            "pagewire_requests_replayed",
            "Running requests that were given to an engine again.",
        )
        self._restarts = self._counter(
            "pagewire_engine_restarts",
            "Engines that came in the place of one that died.",
        )
        for reason in ("max_num_queued_reqs", "max_num_queued_tokens"):
            self._rejections.labels(reason)

    def deadline_given_up(self) -> None:
        self._given_up.labels().inc()

    def watch(self, name: str, documentation: str, read: Callable[[], float]) -> None:
        """A gauge that is read when it is scraped."""
        self.registry.add(WatchedGauge(name, documentation, read))

    def exposition(self, *, openmetrics: bool = False) -> bytes:
        """The text format, version 0.0.4, or OpenMetrics, which has the exemplars."""
        return self.registry.page(openmetrics=openmetrics)

    def latencies(self) -> Latencies:
        """Empty until an engine has said what it serves."""
        if self.model is None:
            return Latencies(Bucketed(), Bucketed(), Bucketed())
        return self.model.latencies()

    def served_totals(self) -> ServedTotals:
        return ServedTotals() if self.model is None else self.model.served_totals()

    def engine_ready(self, ready: Ready) -> ModelMetrics:
        if self.model is None or self.model.name != ready.model_name:
            if self.model is not None:
                self.model.unregister()
            self.model = ModelMetrics(self.registry, ready.model_name)
        self.model.engine_ready(ready)
        return self.model

    def admission_rejected(self, reason: RejectReason) -> None:
        self._rejections.labels(reason).inc()

    def refused(self, code: str) -> None:
        self._refused.labels(code).inc()

    def request_replayed(self) -> None:
        self._replayed.labels().inc()

    def engine_restarted(self) -> None:
        self._restarts.labels().inc()

    def rpc_handled(self, method: str, code: str) -> None:
        self._rpcs.labels(method, code).inc()

    def _counter(self, name: str, documentation: str, labels: tuple[str, ...] = ()) -> Counter:
        return self.registry.add(Counter(name, documentation, labels))


class ModelMetrics:
    """The instruments that carry the model's name, bound to their labels once."""

    def __init__(self, registry: Registry, name: str) -> None:
        self.name = name
        self._registry = registry
        self._labels = (name, ENGINE)
        self._families: list[Family[Value] | Family[Distribution]] = []
        self._readies: dict[int, Ready] = {}
        """The engines that are there, by epoch; their figures are added up."""
        self._stats: dict[int, StepStats] = {}
        """Their last ones."""
        self._counted: OrderedDict[int, tuple[int, ...]] = OrderedDict()
        """Of engines that are out of reach: what is in the counters already."""
        self._init_engine()
        self._init_requests()
        self._init_steps()

    def _init_engine(self) -> None:
        self._running = self._gauge("vllm:num_requests_running", "Requests in the running batch.")
        self._waiting = self._gauge("vllm:num_requests_waiting", "Requests waiting for the engine.")
        self._kv_usage = self._gauge("vllm:kv_cache_usage_perc", "Used KV blocks, 0 to 1.")
        self._mixed_prefill = self._gauge(
            "pagewire_mixed_prefill_tokens_max",
            "Most prompt tokens of a step with decodes; 0 is no limit.",
        )
        self._cache_config = self._add(
            Gauge(
                "vllm:cache_config_info",
                "The KV cache's shape.",
                (*_LABELS, "block_size", "num_gpu_blocks"),
            )
        )
        self._preemptions = self._counter("vllm:num_preemptions", "Preemptions.")
        self._prefix_queries = self._counter(
            "vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache."
        )
        self._prefix_hits = self._counter(
            "vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache."
        )
        self._external_queries = self._counter(
            "vllm:external_prefix_cache_queries",
            "Prompt tokens not on the device that were looked up in host memory.",
        )
        self._external_hits = self._counter(
            "vllm:external_prefix_cache_hits", "Prompt tokens restored from host memory."
        )
        self._offloaded = self._counter(
            "pagewire_kv_blocks_offloaded", "KV blocks copied to host memory."
        )
        self._restored = self._counter(
            "pagewire_kv_blocks_restored", "KV blocks copied back from host memory."
        )
        self._drafts = self._counter("vllm:spec_decode_num_drafts", "Guesses verified.")
        self._draft_tokens = self._counter("vllm:spec_decode_num_draft_tokens", "Their tokens.")
        self._accepted = self._counter(
            "vllm:spec_decode_num_accepted_tokens", "Draft tokens that were right."
        )
        self._accepted_per_position = self._add(
            Counter(
                "vllm:spec_decode_num_accepted_tokens_per_pos",
                "The same by their place in the guess.",
                (*_LABELS, "position"),
            )
        )
        self._host_usage = self._gauge(
            "pagewire_kv_offload_usage_perc", "KV blocks of host memory in use, 0 to 1."
        )
        self._generation = self._counter("vllm:generation_tokens", "Output tokens.")

    def _init_requests(self) -> None:
        self._prompt = self._counter("vllm:prompt_tokens", "Prompt tokens of started requests.")
        self._prompt_cached = self._counter(
            "vllm:prompt_tokens_cached", "Prompt tokens whose KV was cached."
        )
        success = self._add(
            Counter("vllm:request_success", "Requests by outcome.", (*_LABELS, "finished_reason"))
        )
        self._outcomes = {r: success.labels(*self._labels, r) for r in FINISHED_REASONS}
        self._tenants: set[str] = set()
        """Those with labels of their own."""
        self._tenant_requests = self._add(
            Counter(
                "pagewire_tenant_requests",
                "Requests by tenant and outcome.",
                (*_LABELS, "tenant", "finished_reason"),
            )
        )
        self._tenant_prompt = self._add(
            Counter(
                "pagewire_tenant_prompt_tokens", "Prompt tokens by tenant.", (*_LABELS, "tenant")
            )
        )
        self._tenant_generation = self._add(
            Counter(
                "pagewire_tenant_generation_tokens",
                "Output tokens by tenant.",
                (*_LABELS, "tenant"),
            )
        )
        self._ttft = self._histogram(
            "vllm:time_to_first_token_seconds", "Arrival to first token.", _TTFT
        )
        self._e2e = self._histogram(
            "vllm:e2e_request_latency_seconds", "Arrival to outcome.", _REQUEST
        )
        self._queue = self._histogram(
            "vllm:request_queue_time_seconds", "Time waiting in the engine.", _REQUEST
        )
        self._prefill = self._histogram(
            "vllm:request_prefill_time_seconds", "Start to first token.", _REQUEST
        )
        self._decode = self._histogram(
            "vllm:request_decode_time_seconds", "First token to last.", _REQUEST
        )
        self._inference = self._histogram(
            "vllm:request_inference_time_seconds", "Start to last token.", _REQUEST
        )
        self._request_prompt = self._histogram(
            "vllm:request_prompt_tokens", "Prompt tokens of a request.", _TOKENS
        )
        self._request_generation = self._histogram(
            "vllm:request_generation_tokens", "Output tokens of a request.", _TOKENS
        )
        self._max_tokens = self._histogram(
            "vllm:request_params_max_tokens", "max_tokens of a request.", _TOKENS
        )

    def _init_steps(self) -> None:
        self._itl = self._histogram(
            "vllm:inter_token_latency_seconds", "Between a request's tokens.", _ITL
        )
        self._fine_itl = self._histogram(
            "pagewire_inter_token_latency_seconds", "The same in finer buckets.", _FINE_ITL
        )
        self._iteration = self._histogram(
            "vllm:iteration_tokens_total", "Tokens computed in a step.", _ITERATION
        )
        self._wire_lag = self._histogram(
            "pagewire_wire_lag_seconds", "Engine's send to frontend's receive, one host.", _LAG
        )
        self._batch = self._histogram(
            "pagewire_tokenizer_batch_rows", "Requests in a detokenize message.", _BATCH
        )
        self._detokenize = self._histogram(
            "pagewire_detokenize_seconds", "A step's ids out to its text back.", _LAG
        )
        self._cancel_to_free = self._histogram(
            "pagewire_cancel_to_free_seconds", "Abort sent to the engine's answer.", _FREE
        )
        self._abort_to_free = self._histogram(
            "pagewire_abort_to_free_seconds", "Abort at the engine to blocks free.", _FREE
        )

    def unregister(self) -> None:
        for family in self._families:
            self._registry.remove(family)

    def latencies(self) -> Latencies:
        return Latencies(*map(_bucketed, (self._ttft, self._fine_itl, self._e2e)))

    def served_totals(self) -> ServedTotals:
        return ServedTotals(
            prompt_tokens=int(self._prompt.value),
            output_tokens=int(self._generation.value),
            prefix_cache_queries=int(self._prefix_queries.value),
            prefix_cache_hits=int(self._prefix_hits.value),
            preemptions=int(self._preemptions.value),
        )

    # The engine's side.

    def engine_ready(self, ready: Ready) -> None:
        self._readies[ready.epoch] = ready
        self._set_cache_config()

    def engine_gone(self, epoch: int) -> None:
        self._readies.pop(epoch, None)
        last = self._stats.pop(epoch, None)
        if last is not None:
            self._counted[epoch] = counted_totals(last)
            if len(self._counted) > _MAX_OUT_OF_REACH:
                self._counted.popitem(last=False)
        if self._readies:
            self._set_cache_config()
        self._set_gauges()

    def _set_cache_config(self) -> None:
        block_size = next(iter(self._readies.values())).block_size
        num_blocks = sum(ready.num_blocks for ready in self._readies.values())
        self._cache_config.clear()
        self._cache_config.labels(*self._labels, str(block_size), str(num_blocks)).set(1)

    def _set_gauges(self) -> None:
        stats = total_stats(self._stats.values())
        if stats is None:
            for gauge in (
                *(self._running, self._waiting, self._kv_usage, self._host_usage),
                self._mixed_prefill,
            ):
                gauge.set(0)
            return
        self._running.set(stats.num_running)
        self._waiting.set(stats.num_waiting)
        self._kv_usage.set(kv_cache_usage(stats))
        self._mixed_prefill.set(stats.max_mixed_prefill_tokens)
        if stats.num_host_blocks:
            self._host_usage.set(stats.num_used_host_blocks / stats.num_host_blocks)

    def engine_stats(self, stats: StepStats, epoch: int) -> None:
        before = self._stats.get(epoch)
        totals = counted_totals(stats)
        nothing = (0,) * len(totals)
        last = self._counted.pop(epoch, nothing) if before is None else counted_totals(before)
        self._stats[epoch] = stats
        self._set_gauges()
        if totals != last:
            counters = (
                self._preemptions,
                self._prefix_queries,
                self._prefix_hits,
                self._external_queries,
                self._external_hits,
                self._offloaded,
                self._restored,
                self._drafts,
                self._draft_tokens,
                self._accepted,
                *(
                    self._accepted_per_position.labels(*self._labels, str(position))
                    for position in range(len(stats.total_accepted_per_position))
                ),
            )
            for counter, new, old in zip(counters, totals, last, strict=True):
                counter.inc(max(0, new - old))

    def engine_step(self, stats: StepStats, num_output_tokens: int, lag_s: float) -> None:
        if stats.num_batched_tokens:
            self._iteration.observe(stats.num_batched_tokens)
        if num_output_tokens:
            self._generation.inc(num_output_tokens)
        if 0 <= lag_s < _MAX_LAG_S:
            self._wire_lag.observe(lag_s)
        for seconds in stats.abort_to_free_s:
            self._abort_to_free.observe(seconds)

    def token_gaps(self, gaps: dict[float, int]) -> None:
        """Gap in seconds -> number of requests whose token came after it."""
        for gap, times in gaps.items():
            self._itl.observe(gap, times)
            self._fine_itl.observe(gap, times)

    def abort_answered(self, seconds: float) -> None:
        self._cancel_to_free.observe(seconds)

    def batch_answered(self, num_rows: int, seconds: float) -> None:
        self._batch.observe(num_rows)
        self._detokenize.observe(seconds)

    # A request's life.

    def started(self, state: RequestState) -> None:
        self._prompt.inc(len(state.prompt_ids))
        self._prompt_cached.inc(state.num_cached_tokens)

    def first_token(self, state: RequestState, now: float) -> None:
        self._ttft.observe(now - state.arrived_at, trace_id=state.trace_id)

    def settled(self, state: RequestState, now: float) -> None:
        """Once for each request that was admitted and not refused."""
        self._outcomes[state.outcome].inc()
        self._e2e.observe(now - state.arrived_at, trace_id=state.trace_id)
        self._request_prompt.observe(len(state.prompt_ids))
        num_output = sum(len(branch.output_ids) for branch in branches_of(state))
        self._request_generation.observe(num_output)
        self._settled_of_tenant(state, num_output)
        if state.sampling is not None:
            self._max_tokens.observe(state.sampling.max_tokens)
        if state.started:
            self._queue.observe(state.queue_s)
        if state.first_token_at:
            self._prefill.observe(state.prefill_s)
            self._decode.observe(state.decode_s)
            self._inference.observe(state.prefill_s + state.decode_s)

    def _settled_of_tenant(self, state: RequestState, num_output: int) -> None:
        tenant = state.job.tenant
        if tenant not in self._tenants:
            if len(self._tenants) < MAX_TENANTS:
                self._tenants.add(tenant)
            else:
                tenant = OTHER_TENANTS
        labels = (*self._labels, tenant)
        self._tenant_requests.labels(*labels, state.outcome).inc()
        self._tenant_prompt.labels(*labels).inc(len(state.prompt_ids) if state.started else 0)
        self._tenant_generation.labels(*labels).inc(num_output)

    # Construction.

    def _gauge(self, name: str, documentation: str) -> Value:
        return self._add(Gauge(name, documentation, _LABELS)).labels(*self._labels)

    def _counter(self, name: str, documentation: str) -> Value:
        return self._add(Counter(name, documentation, _LABELS)).labels(*self._labels)

    def _histogram(self, name: str, documentation: str, buckets: Sequence[float]) -> Distribution:
        family = Histogram(name, documentation, _LABELS, buckets=buckets)
        return self._add(family).labels(*self._labels)

    def _add(self, family: F) -> F:
        self._families.append(family)
        return self._registry.add(family)


def _bucketed(distribution: Distribution) -> Bucketed:
    return Bucketed(distribution.bounds, distribution.counts)
