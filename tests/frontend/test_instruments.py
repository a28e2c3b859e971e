"""Our pages against those that prometheus_client writes of the same observations."""

from __future__ import annotations

import itertools
import random
from typing import TYPE_CHECKING, Any

import prometheus_client
import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.openmetrics import parser as openmetrics_parser
from prometheus_client.parser import text_string_to_metric_families

from frontend.instruments import Counter, Gauge, Histogram, Registry, WatchedGauge
from frontend.metrics import Metrics
from frontend.metrics_page import MAX_AGE_S, MetricsPage
from tests.support.fake_engine import FakeEngine

if TYPE_CHECKING:
    from collections.abc import Iterator

AWKWARD = 'a "quoted" \\ line\nof text'
BUCKETS = (0.0005, 0.01, 0.5, 1.0, 200_000.0)


@pytest.fixture
def no_created_lines() -> Iterator[None]:
    """We have no _created samples; theirs can be switched off."""
    prometheus_client.disable_created_metrics()
    yield
    prometheus_client.enable_created_metrics()


class Pair:
    """The same instruments, ours and theirs."""

    def __init__(self) -> None:
        self.ours, self.theirs = Registry(), CollectorRegistry(auto_describe=False)
        labels = ("zone", "method")
        self.counter = self._both(Counter, prometheus_client.Counter, "c", labels)
        self.gauge = self._both(Gauge, prometheus_client.Gauge, "g", ())
        self.histogram = self._both(
            Histogram, prometheus_client.Histogram, "vllm:h", labels, buckets=BUCKETS
        )
        self.alone = self._both(Histogram, prometheus_client.Histogram, "one", (), buckets=BUCKETS)
        self.value = 7.5
        self.ours.add(WatchedGauge("watched", AWKWARD, lambda: self.value))
        theirs = prometheus_client.Gauge("watched", AWKWARD, registry=self.theirs)
        theirs.set_function(lambda: self.value)

    def _both(self, ours: Any, theirs: Any, name: str, labels: Any, **more: Any) -> Any:
        made = self.ours.add(ours(name, AWKWARD, labels, **more))
        return made, theirs(name, AWKWARD, labels, registry=self.theirs, **more)

    def check(self) -> None:
        assert self.ours.page(openmetrics=False) == generate_latest(self.theirs)
        page = self.ours.page(openmetrics=True)
        # Without it, they write vllm_h for the samples of vllm:h.
        theirs = openmetrics.generate_latest(self.theirs, "allow-utf-8")
        # Theirs stamps exemplars itself.
        assert [it.rpartition(b"} ")[0] if b"# {" in it else it for it in page.splitlines()] == [
            it.rpartition(b"} ")[0] if b"# {" in it else it for it in theirs.splitlines()
        ]


def test_pages_are_prometheus_clients(no_created_lines: None) -> None:
    pair, random_ = Pair(), random.Random(1)
    pair.check()
    for zone, method in itertools.product(("b", AWKWARD, ""), ("x", "a")):
        for ours_or_theirs in pair.counter:
            ours_or_theirs.labels(zone, method).inc(3)
        value = random_.choice(BUCKETS) * random_.choice((0.3, 1, 1.7))
        for ours_or_theirs in pair.histogram:
            ours_or_theirs.labels(zone, method).observe(value)
        pair.check()
    pair.gauge[0].labels().set(-0.25)
    pair.gauge[1].set(-0.25)
    pair.alone[0].labels().observe(0.5, trace_id="ab12")
    pair.alone[1].observe(0.5, {"trace_id": "ab12"})
    pair.value = 0
    pair.check()


def test_many_equal_observations_are_one(no_created_lines: None) -> None:
    pair = Pair()
    pair.alone[0].labels().observe(0.02, 3)
    for _ in range(3):
        pair.alone[1].observe(0.02)
    pair.check()


def test_what_is_cleared_is_gone() -> None:
    registry = Registry()
    gauge = registry.add(Gauge("g", "", ("a",)))
    gauge.labels("1").set(1)
    assert b'g{a="1"} 1.0' in registry.page(openmetrics=False)
    gauge.clear()
    gauge.labels("2").set(2)
    assert registry.page(openmetrics=False) == b'# HELP g \n# TYPE g gauge\ng{a="2"} 2.0\n'
    registry.remove(gauge)
    assert registry.page(openmetrics=True) == b"# EOF\n"


def test_both_pages_can_be_read() -> None:
    metrics = Metrics()
    metrics.engine_ready(FakeEngine().ready()).token_gaps({0.004: 3})
    plain = text_string_to_metric_families(metrics.exposition().decode())
    # A strict reader: it refuses what the specification forbids.
    text = metrics.exposition(openmetrics=True).decode()
    strict = openmetrics_parser.text_string_to_metric_families(text)
    assert {it.name: it.type for it in plain} == {it.name: it.type for it in strict}


class Counted(Metrics):
    def __init__(self) -> None:
        super().__init__()
        self.made: list[bool] = []

    def exposition(self, *, openmetrics: bool = False) -> bytes:
        self.made.append(openmetrics)
        return super().exposition(openmetrics=openmetrics)


def test_pollers_share_a_page() -> None:
    now = [100.0]
    metrics = Counted()
    page = MetricsPage(metrics, clock=lambda: now[0])
    first = page.get("text/plain")
    metrics.engine_restarted()
    for _ in range(10):
        now[0] += MAX_AGE_S / 20
        assert page.get("*/*") == first
    assert metrics.made == [False]
    accept = "application/openmetrics-text;version=1.0.0;q=0.9,text/plain;version=0.0.4;q=0.1"
    for _ in range(2):
        body, content_type = page.get(accept)
        assert body.endswith(b"# EOF\n")
        assert content_type.startswith("application/openmetrics-text; version=1.0.0")
    assert metrics.made == [False, True]
    now[0] += MAX_AGE_S
    assert b"pagewire_engine_restarts_total 1.0" in page.get("").body
    assert metrics.made == [False, True, False]
    # A poller of every 50 ms has new figures each time.
    assert MAX_AGE_S < 0.05


def test_a_family_without_news_is_not_written_again(monkeypatch: pytest.MonkeyPatch) -> None:
    metrics = Metrics()
    model = metrics.engine_ready(FakeEngine().ready())
    metrics.exposition()
    written: list[str] = []
    real = Histogram._head

    def head(family: Histogram, *, openmetrics: bool) -> str:
        written.append(family.name)
        return real(family, openmetrics=openmetrics)

    monkeypatch.setattr(Histogram, "_head", head)
    metrics.exposition()
    assert written == []
    model.token_gaps({0.004: 1})
    metrics.exposition()
    assert set(written) == {
        "vllm:inter_token_latency_seconds",
        "pagewire_inter_token_latency_seconds",
    }
