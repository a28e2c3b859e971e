"""bench/peers.py: what it reads, and how it sets servers side by side."""

from __future__ import annotations

import itertools
import json
import random
import re
import socket
import sys
from pathlib import Path
from typing import Any

import pytest

from bench import peers
from bench.comparison import FAILED, FIGURES, OUTPUT, RSS, Comparison
from bench.peer_server import Floor, ServerFailed, read_servers, running
from bench.workloads import WORKLOADS, seed
from pagewire.bench.workload import Lengths, random_ids
from pagewire.cli import main
from tests.support.balanced import free_port

ROOT = Path(__file__).resolve().parents[2]
BENCH = ROOT / "bench"


def test_the_example_is_one() -> None:
    servers = {server.name: server for server in read_servers(BENCH / "peers.example.toml")}
    assert list(servers) == ["pagewire", "pagewire-packed", "vllm", "openvino", "llama"]
    assert servers["pagewire"].target == "grpc"
    assert "--model=smollm2-135m-instruct" in servers["pagewire"].command
    assert servers["vllm"].environment["LD_PRELOAD"] == ""
    assert servers["vllm"].floor == Floor("smollm2-135m-instruct", "bfloat16")
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
def test_bad_entries_are_named(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "peers.toml"
    path.write_text(text)
    with pytest.raises(SystemExit, match=message):
        read_servers(path)


def test_a_name_that_is_none_of_the_servers(toml: Any) -> None:
    with pytest.raises(SystemExit, match="no such server: vlm"):
        peers.main([str(toml(vllm=([], ""))), "--only=vllm,vlm"])


@pytest.mark.parametrize("workload", "ABCDE")
def test_workloads_are_flags_that_exist(workload: str, capsys: pytest.CaptureFixture[str]) -> None:
    # Nobody answers there: that comes after all flags were read and all prompts drawn.
    flags = ["--address=127.0.0.1:1", "--vocab-size=999", "--warm-up=1"]
    assert main(["bench", "serve", *flags, *WORKLOADS[workload]]) == 1
    assert "no warm-up request" in capsys.readouterr().err


def result(server: str, **figures: float | None) -> dict[str, Any]:
    figures = dict.fromkeys(FIGURES) | {FAILED: 0} | figures
    return {"server": server, "workload": "A", "figures": figures}


def test_the_table_has_medians_and_ratios() -> None:
    results = [
        result("ours", **{"output tok/s": 90.0, "TTFT p50 ms": 10.0, RSS: 700.0}),
        result("theirs", **{"output tok/s": 50.0, RSS: 1000.0, FAILED: 2}),
        result("ours", **{"output tok/s": 110.0, "TTFT p50 ms": 20.0, RSS: 800.0}),
        result("theirs", **{"output tok/s": 30.0, RSS: 1000.0, FAILED: 1}),
    ]
    at_best = {"ours": {"A": {"output tok/s": 125.0, "TTFT p50 ms": 12.0}}}
    comparison = Comparison(["ours", "theirs", "absent"], results, at_best)
    heads, *rows = comparison.table().splitlines()
    assert heads.split(" | ")[-3:] == ["ours / theirs", "ours / absent", "ours, of its floor |"]
    assert rows == [
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |",
        "| A | output tok/s | 100.0 | 40.0 | - | 2.50 | - | 0.80 |",
        "| A | TTFT p50 ms | 15.0 | - | - | - | - | 0.80 |",
        "| A | RSS MiB | 750.0 | 1000.0 | - | 0.75 | - | - |",
        "| A | failed requests | 0 | 3 | - | - | - | - |",
    ]
    assert comparison.figures()["A"]["output tok/s"] == {"ours": 100.0, "theirs": 40.0}


def test_other_numbers_of_output_tokens_are_told() -> None:
    results = [result("ours", **{OUTPUT: 1536}), result("theirs", **{OUTPUT: 1536})]
    names = ["ours", "theirs"]
    assert OUTPUT not in Comparison(names, results, {}).table()
    results.append(result("short", **{OUTPUT: 1400}))
    table = Comparison([*names, "short"], results, {}).table()
    assert "| A | output tokens | 1536 | 1536 | 1400 | - | - |" in table


def test_tokens_that_come_together_have_no_ratio() -> None:
    results = [result("ours", **{"ITL p50 ms": 0.0}), result("theirs", **{"ITL p50 ms": 0.0})]
    at_best = {name: {"A": {"ITL p50 ms": 8.0}} for name in ("ours", "theirs")}
    row = "| A | ITL p50 ms | 0.0 | 0.0 | - | - | - |"
    assert row in Comparison(["ours", "theirs"], results, at_best).table()


def test_no_workload_finds_the_prompts_of_another_in_a_cache() -> None:
    prompts = []
    for turn, workload in itertools.product((1, 2), WORKLOADS):
        values = dict(flag.split("=") for flag in WORKLOADS[workload])
        rng = random.Random(f"asks/{seed(workload, turn)}")
        prompt, output = (Lengths.parse(values[n]) for n in ("--input-len", "--output-len"))
        prompts += [ask.ids for ask in random_ids(40, prompt, output, 49_152, rng)]
    assert len({ids[:4] for ids in prompts}) == len(prompts)


@pytest.fixture
def toml(tmp_path: Path) -> Any:
    """toml(name=(flags of tests.support.fake_completions, more keys)): a file of such servers."""

    def write(**servers: tuple[list[str], str]) -> Path:
        path = tmp_path / "peers.toml"
        entries = []
        for name, (options, keys) in servers.items():
            port = free_port()
            command = [sys.executable, "-m", "tests.support.fake_completions", f"--port={port}"]
            entries.append(
                f"[server.{name}]\ncommand = {json.dumps(command + options)}\n"
                f'target = "openai"\naddress = "127.0.0.1:{port}"\n{keys}\n'
                f'environment = {{PYTHONPATH = "{ROOT}"}}\n'
            )
        path.write_text("".join(entries))
        return path

    return write


def test_servers_that_do_not_start_are_told(
    toml: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = toml(
        mute=(["--mute"], "start_timeout = 0.5"),
        ends=(["--refuse"], ""),
        good=([], ""),
    )
    report = tmp_path / "figures.json"
    options = [f"--json={report}", "--workloads=E", "--runs=1", "--fraction=0.1"]
    assert peers.main([str(path), *options]) == 1
    out, err = capsys.readouterr()
    assert "good E run 1: output tok/s" in out
    assert "| workload | figure | mute | ends | good | mute / ends | mute / good |" in out
    assert "| E | prompt tok/s | - | - | " in out
    first, second = json.loads(report.read_text())["failures"]
    assert (first["server"], first["workloads"]) == ("mute", ["E"])
    assert re.fullmatch(r"did not start: no answer within \d+\.\d s", first["message"])
    assert (second["server"], second["output"]) == ("ends", "no such model")
    assert second["message"].startswith("did not start: ended with status 3 after ")
    # When it happens, with what the server wrote, and after the table.
    for failure in (first, second):
        assert err.count(f"{failure['server']} E run 1: FAILED: {failure['message']}") == 2
    assert "    no such model\n" in err


def test_a_server_that_ends_midway_loses_one_workload(
    toml: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # B asks for eight, before them for eight to warm up; A for one and one.
    path = toml(dies=(["--end-after=12"], ""), good=([], ""))
    report = tmp_path / "figures.json"
    options = [f"--json={report}", "--workloads=B,A", "--runs=1", "--fraction=0.05"]
    assert peers.main([str(path), *options]) == 1
    out, err = capsys.readouterr()
    document = json.loads(report.read_text())
    measured = [(result["server"], result["workload"]) for result in document["results"]]
    assert measured == [("dies", "A"), ("good", "B"), ("good", "A")]
    assert set(document["figures"]["A"]["output tok/s"]) == {"dies", "good"}
    # Of a Python process; the client and this one are none of the server's.
    assert 5 < document["figures"]["B"][RSS]["good"] < 100
    (failure,) = document["failures"]
    assert (failure["server"], failure["workloads"]) == ("dies", ["B"])
    assert failure["message"] == "ended with status 3; 4 of 8 requests were answered"
    assert failure["output"] == "out of memory"
    assert f"dies B run 1: FAILED: {failure['message']}\n    out of memory\n" in err
    assert "| B | output tok/s | - | " in out


def test_a_workload_takes_as_long_as_it_may(toml: Any, capsys: pytest.CaptureFixture[str]) -> None:
    path = toml(stops=(["--stop-after=0"], "workload_timeout = 3"))
    assert peers.main([str(path), "--workloads=A", "--runs=1", "--fraction=0.05"]) == 1
    assert "stops A run 1: FAILED: not done within 3 s" in capsys.readouterr().err


def test_an_address_that_is_taken_is_not_measured(toml: Any) -> None:
    (server,) = read_servers(toml(x=([], "")))
    host, port = server.address.split(":")
    with (
        socket.create_server((host, int(port))),
        pytest.raises(ServerFailed, match="listens at"),
        running(server),
    ):
        pass
