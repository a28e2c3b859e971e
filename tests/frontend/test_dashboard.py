"""The dashboard and the alerts ask for metrics and labels that there are."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support.promql import dashboard_queries, rule_queries, selections

if TYPE_CHECKING:
    from tests.frontend.conftest import Stack

ROOT = Path(__file__).resolve().parents[2]
DASHBOARD = ROOT / "deploy/grafana/dashboards/pagewire.json"
ALERTS = ROOT / "deploy/prometheus/alerts.yml"
SUFFIXES = {"counter": ["_total"], "gauge": [""], "histogram": ["_bucket", "_sum", "_count"]}
BY_PROMETHEUS = {"instance", "job"}


async def test_every_metric_and_label_exists(stack: Stack) -> None:
    exported: dict[str, set[str]] = {"up": set()}
    for family in stack.frontend.metrics.registry:
        for suffix in SUFFIXES[family.kind]:
            labels = {*family.label_names} | ({"le"} if suffix == "_bucket" else set())
            exported[family.name + suffix] = labels
    queries = [*dashboard_queries(DASHBOARD), *rule_queries(ALERTS)]
    assert len(queries) > 40
    used: set[str] = set()
    for query in queries:
        for selection in selections(query):
            assert selection.metric in exported, query
            known = exported[selection.metric] | BY_PROMETHEUS
            assert selection.labels <= known, query
            used.add(selection.metric)
    # Whatever the dashboard is to show, by part of its name.
    for part in (
        "running", "waiting", "kv_cache_usage", "generation_tokens", "first_token", "inter_token",
        "e2e", "prefix_cache_hits", "preemptions", "rpcs_handled", "tenant", "engine_restarts",
        "tokenizer", "kv_offload_usage",
    ):  # fmt: skip
        assert any(part in metric for metric in used), part


def test_the_dashboard_is_whole() -> None:
    dashboard = json.loads(DASHBOARD.read_text())
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    source = (ROOT / "deploy/grafana/provisioning/datasources/prometheus.yaml").read_text()
    for panel in panels:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24, panel["title"]
        for target in panel.get("targets", ()):
            assert f"uid: {target['datasource']['uid']}\n" in source
    variables = {variable["name"] for variable in dashboard["templating"]["list"]}
    used = set(re.findall(r"\$(\w+)", " ".join(dashboard_queries(DASHBOARD))))
    assert used == variables | {"__rate_interval"}


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_promtool_accepts_the_configuration() -> None:
    config = ROOT / "deploy/prometheus/prometheus.yml"
    done = subprocess.run(["promtool", "check", "config", config], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "rules found" in done.stdout
