"""A real Prometheus scrapes the server under load: each query of the dashboard has data."""

from __future__ import annotations

import asyncio
import math
import shutil
import socket
import subprocess
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from tests.support.promql import dashboard_queries, rule_queries
from tests.support.stack import running_stack

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parents[2]
DASHBOARD = ROOT / "deploy/grafana/dashboards/pagewire.json"
ALERTS = ROOT / "deploy/prometheus/alerts.yml"
TRACE = "0af7651916cd43dd8448eb211c80319c"
LIMIT_S = 60.0

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("prometheus") is None, reason="prometheus is not installed"),
]


@contextmanager
def prometheus(target: str, directory: Path) -> Iterator[str]:
    """Its address; it scrapes `target` every second and has our rules."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    config = directory / "prometheus.yml"
    config.write_text(
        f"global: {{scrape_interval: 1s, evaluation_interval: 1s}}\n"
        f"rule_files: [{ALERTS}]\n"
        f"scrape_configs:\n"
        f"  - job_name: pagewire\n"
        f"    static_configs: [{{targets: ['{target}']}}]\n"
    )
    with (directory / "log").open("w") as log:
        process = subprocess.Popen(
            [
                "prometheus",
                f"--config.file={config}",
                f"--storage.tsdb.path={directory / 'data'}",
                f"--web.listen-address={address}",
                "--enable-feature=exemplar-storage",
            ],
            stdout=log,
            stderr=log,
        )
    try:
        yield f"http://{address}"
    finally:
        process.terminate()
        process.wait(30)
        print((directory / "log").read_text())


async def load(client: httpx.AsyncClient, stop: asyncio.Event) -> None:
    """What makes each instrument move: output, tenants, refusals, a hit of the prefix."""
    prompt = "the same beginning of every prompt, which the prefix cache finds again " * 4
    traced = {"traceparent": f"00-{TRACE}-b7ad6b7169203331-01", "x-tenant-id": "acme"}
    while not stop.is_set():
        good = {"model": "tiny", "prompt": prompt, "max_tokens": 24, "ignore_eos": True}
        answers = await asyncio.gather(
            *(client.post("/v1/completions", json=good, headers=traced) for _ in range(3)),
            client.post("/v1/completions", json={**good, "max_tokens": 10**6}),
            client.post("/v1/completions", json={**good, "prompt": [1 << 30]}),
        )
        assert [answer.status_code for answer in answers] == [200, 200, 200, 400, 400]


async def ask(client: httpx.AsyncClient, query: str) -> list[float]:
    answer = await client.get("/api/v1/query", params={"query": query})
    told: Any = answer.json()
    assert told["status"] == "success", (query, told)
    return [float(series["value"][1]) for series in told["data"]["result"]]


async def test_each_query_has_data(tiny_model: Path, tmp_path: Path) -> None:
    flags = (f"--model={tiny_model}", "--served-model-name=tiny", "--device=cpu")
    with (
        running_stack(*flags, "--kv-offload-memory=16MiB") as stack,
        prometheus(stack.http_address, tmp_path) as address,
    ):
        queries = {
            query.replace("$__rate_interval", "20s")
            .replace("$model", ".*")
            .replace("$instance", ".*"): query
            for query in dashboard_queries(DASHBOARD)
        }
        stop = asyncio.Event()
        async with (
            httpx.AsyncClient(base_url=f"http://{stack.http_address}", timeout=30) as server,
            httpx.AsyncClient(base_url=address, timeout=30) as asked,
        ):
            work = asyncio.ensure_future(load(server, stop))
            answers: dict[str, list[float]] = {}
            async with asyncio.timeout(LIMIT_S):
                while not all(answers.get(query) for query in queries) and not work.done():
                    for query in queries:
                        try:
                            answers[query] = await ask(asked, query)
                        except httpx.ConnectError:
                            break  # it is starting
                    await asyncio.sleep(0.25)
            stop.set()
            await work
            for query in queries:
                print(queries[query], "->", [round(value, 4) for value in answers[query]])
            moved = [query for query in queries if any(value > 0 for value in answers[query])]
            for part in ("first_token", "inter_token", "generation", "prefix_cache", "tenant"):
                assert any(part in query for query in moved), part
            assert len(moved) > len(queries) / 2
            rules = (await asked.get("/api/v1/rules")).json()["data"]["groups"][0]["rules"]
            assert len(rules) == len(rule_queries(ALERTS))
            assert {rule["health"] for rule in rules} == {"ok"}
            exemplars = await asked.get(
                "/api/v1/query_exemplars",
                params={
                    "query": "vllm:time_to_first_token_seconds_bucket",
                    "start": 0,
                    "end": 2**33,
                },
            )
            found = [it for series in exemplars.json()["data"] for it in series["exemplars"]]
            assert {it["labels"]["trace_id"] for it in found} == {TRACE}
        assert not any(math.isinf(value) for values in answers.values() for value in values)
