"""bench/peers.py: what it reads, and how it sets servers side by side."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

from pagewire.cli import main

BENCH = Path(__file__).resolve().parents[2] / "bench"


@pytest.fixture(scope="module")
def peers() -> Any:
    spec = importlib.util.spec_from_file_location("bench_peers", BENCH / "peers.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["bench_peers"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_the_example_is_one(peers: Any) -> None:
    servers = {server.name: server for server in peers._read(BENCH / "peers.example.toml")}
    assert list(servers) == ["pagewire", "pagewire-packed", "vllm", "openvino", "llama"]
    assert servers["pagewire"].target == "grpc"
    assert "--model=smollm2-135m-instruct" in servers["pagewire"].command
    assert servers["vllm"].environment["LD_PRELOAD"] == ""
    assert servers["vllm"].floor == peers.Floor("smollm2-135m-instruct", "bfloat16")
    assert servers["llama"].extra_body == {"samplers": ["top_k"], "top_k": 1}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[server.x]\ncommand = ["$no_such_thing"]', r"\[server.x\] uses \$no_such_thing"),
        ('[server.x]\ncommand = ["a"]\nport = 1', r"\[server.x\].*port"),
        ('[server.x]\ncommand = ["a"]', r"\[server.x\].*target"),
        ('[server.x]\nfloor = {model = "a"}', r"\[server.x\].*weights"),
    ],
)
def test_bad_entries_are_named(peers: Any, text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "peers.toml"
    path.write_text(text)
    with pytest.raises(SystemExit, match=message):
        peers._read(path)


@pytest.mark.parametrize("workload", "ABCDE")
def test_workloads_are_flags_that_exist(
    peers: Any, workload: str, capsys: pytest.CaptureFixture[str]
) -> None:
    # Nobody answers there: that comes after all flags were read and all prompts drawn.
    flags = ["--address=127.0.0.1:1", "--vocab-size=999", "--warm-up=1"]
    assert main(["bench", "serve", *flags, *peers.WORKLOADS[workload]]) == 1
    assert "no warm-up request" in capsys.readouterr().err


def test_the_table_has_medians_and_ratios(peers: Any) -> None:
    def result(server: str, output: float, ttft: float | None) -> dict[str, Any]:
        figures = dict.fromkeys(peers.FIGURES) | {"output tok/s": output, "TTFT p50 ms": ttft}
        return {"server": server, "workload": "A", "figures": figures}

    results = [
        result("ours", 90.0, 10.0),
        result("theirs", 50.0, None),
        result("ours", 110.0, 20.0),
        result("theirs", 30.0, None),
    ]
    at_best = {"ours": {"A": {"output tok/s": 125.0, "TTFT p50 ms": 12.0}}}
    assert peers.table(results, "ours", at_best).splitlines() == [
        "| workload | figure | ours | theirs | ours / theirs | ours, of its floor |",
        "| --- | --- | ---: | ---: | ---: | ---: |",
        "| A | output tok/s | 100.0 | 40.0 | 2.50 | 0.80 |",
        "| A | TTFT p50 ms | 15.0 | - | - | 0.80 |",
    ]
