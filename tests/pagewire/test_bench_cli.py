"""`pagewire bench serve` as a user runs it, against the fake engine's stack."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from html.parser import HTMLParser
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

import pytest

from pagewire.cli import main
from tests.frontend.certificates import make_ca, make_certificate
from tests.frontend.conftest import Stack
from tests.support.fake_engine import FakeEngine
from tests.support.fake_tokenizer import FakeTokenizer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path


HTTPS = ("--target=openai", "--url=https://127.0.0.1:1")


@pytest.fixture
async def stack() -> AsyncIterator[Stack]:
    stack = Stack(FakeEngine(), FakeTokenizer(), max_requests=4)
    await stack.start()
    yield stack
    await stack.close()


async def bench(stack: Stack, *flags: str) -> int:
    arguments = ["bench", "serve", f"--address={stack.frontend.address}", *flags]
    return await asyncio.to_thread(main, arguments)


async def test_a_run_tells_all_figures(
    stack: Stack, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report_path, page_path = tmp_path / "report.json", tmp_path / "page.html"
    status = await bench(
        stack,
        *("--num-requests=12", "--concurrency=3", "--input-len=5:9", "--output-len=2:6"),
        *("--warm-up=2", "--seed=7", "--goodput=ttft:60000", "--label=<a run>"),
        *(f"--json={report_path}", f"--html={page_path}"),
    )
    printed = capsys.readouterr()
    assert (status, printed.err) == (0, "")
    assert "12 of 12 requests successful" in printed.out
    adds = [add for add in stack.engine.commands if type(add).__name__ == "Add"]
    assert len(adds) == 14
    asked = [add.sampling.max_tokens for add in adds[2:]]
    report = json.loads(report_path.read_text())
    summary, settings = report["summary"], report["settings"]
    assert summary["output_tokens"] == sum(asked)
    assert summary["prompt_tokens"] == sum(len(add.token_ids) // 4 for add in adds[2:])
    assert summary["cached_tokens"] == 12
    assert summary["ttft_s"]["count"] == 12
    assert summary["itl_token_s"]["count"] <= sum(asked) - 12
    assert summary["goodput_per_s"] == pytest.approx(summary["requests_per_s"])
    assert (settings["vocab_size"], settings["seed"], settings["loop"]) == (300, 7, "closed")
    assert "by messages" in report["definitions"]["throughput"]
    assert set(report) == {
        *("made_at", "pagewire", "machine", "settings", "summary", "client_cpu", "output_rate"),
        "definitions",
    }
    assert settings["concurrency"] == 3
    check_page(page_path.read_text())


SWEEP = ("--concurrency=1,2,4", "--num-requests=5", "--warm-up=1", "--output-len=2:6")


@pytest.mark.parametrize("goodput", [["--goodput=ttft:60000"], []])
async def test_a_sweep_sets_its_runs_side_by_side(
    stack: Stack, tmp_path: Path, capsys: pytest.CaptureFixture[str], goodput: list[str]
) -> None:
    report_path, page_path = tmp_path / "report.json", tmp_path / "page.html"
    files = (f"--json={report_path}", f"--html={page_path}", "--label=<a run>")
    assert await bench(stack, *SWEEP, *goodput, *files) == 0
    report = json.loads(report_path.read_text())
    assert report["settings"]["concurrency"] == [1, 2, 4]
    assert report["sweep"]["itl"] == "itl_token_s"
    rows, runs = report["sweep"]["rows"], report["runs"]
    assert [run["concurrency"] for run in runs] == [1, 2, 4]
    for row, run in zip(rows, runs, strict=True):
        summary = run["summary"]
        assert row == {
            "concurrency": run["concurrency"],
            **{key: summary[key] for key in ("requests_per_s", "output_tokens_per_s")},
            "goodput_per_s": pytest.approx(summary["requests_per_s"]) if goodput else None,
            "ttft_p50_s": summary["ttft_s"]["p50"],
            "ttft_p99_s": summary["ttft_s"]["p99"],
            "ttft_count": 5,
            "itl_p99_s": summary["itl_token_s"]["p99"],
            "itl_count": summary["itl_token_s"]["count"],
            "rejected": 0,
            "errors": 0,
            "unfinished": 0,
        }
    heads, *lines = capsys.readouterr().out.splitlines()
    names = ["concurrency", "requests/s", "output tokens/s", *(["goodput/s"] if goodput else [])]
    assert " ".join(heads.split()).startswith(" ".join(names) + " TTFT p50 ms")
    for line, row in zip(lines, rows, strict=False):
        cells = line.split()
        assert cells[:2] == [str(row["concurrency"]), f"{row['requests_per_s']:.2f}"]
        assert cells[-2:] == ["0", "0"]
    assert lines.count("5 of 5 requests successful") == 3
    page = page_path.read_text()
    check_page(page, plots=3 * 6 + (3 if goodput else 2))
    assert ("Goodput against concurrency" in page) == bool(goodput)
    assert page.count("<circle") == 3 * (4 if goodput else 3)


async def test_a_sweep_asks_as_much_each_time_but_nothing_twice(stack: Stack) -> None:
    assert await bench(stack, *SWEEP, "--input-len=20:40") == 0
    adds = [add for add in stack.engine.commands if type(add).__name__ == "Add"]
    runs = [adds[start + 1 : start + 6] for start in (0, 6, 12)]
    shapes = [
        sorted((len(add.token_ids), add.sampling.max_tokens) for add in of_run) for of_run in runs
    ]
    assert shapes[0] == shapes[1] == shapes[2]
    assert len({add.token_ids for of_run in runs for add in of_run}) == 15


async def test_a_sweep_tells_at_which_concurrency_requests_are_turned_away(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stack = Stack(FakeEngine(auto=False), FakeTokenizer(), max_requests=4)
    await stack.start()
    path = tmp_path / "report.json"
    flags = ("--concurrency=2,7", "--num-requests=7", "--warm-up=0", "--output-len=1")
    running = asyncio.create_task(bench(stack, *flags, f"--json={path}"))

    def num_admitted() -> int:
        return sum(type(command).__name__ == "Add" for command in stack.engine.commands)

    def all_have_come() -> bool:
        # The first run's last request may still have its place when the second begins.
        name = b'admission_rejections_total{reason="max_num_queued_reqs"} %d.0'
        return name % (14 - num_admitted()) in stack.frontend.metrics.exposition()

    try:
        while await stack.engine.wait_running() and num_admitted() <= 7:
            stack.engine.step()
        await stack.until(all_have_come)
        stack.engine.step()
        assert await running == 0
    finally:
        await stack.close()
    rows = json.loads(path.read_text())["sweep"]["rows"]
    num_rejected = 14 - num_admitted()
    assert num_rejected >= 3
    assert [(row["concurrency"], row["rejected"]) for row in rows] == [(2, 0), (7, num_rejected)]
    assert all(row["errors"] == 0 for row in rows)
    capsys.readouterr()


async def test_https_with_its_own_ca_and_a_certificate_of_ours(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ca = make_ca(tmp_path, "ca")
    server, client = (make_certificate(tmp_path, name, ca) for name in ("server", "client"))
    tls = {"cert": server.cert, "key": server.key, "client_ca": ca.cert}
    config = {f"tls_{name}": str(path) for name, path in tls.items()}
    stack = Stack(FakeEngine(), FakeTokenizer(), **config)
    await stack.start(serving=False)
    await stack.until(lambda: stack.frontend.health.serving)
    flags = ["bench", "serve", "--target=openai", f"--url=https://{stack.frontend.http_address}"]
    flags += ["--num-requests=3", "--concurrency=2", "--output-len=4", "--vocab-size=300"]
    trust = f"--tls-ca={ca.cert}"
    shown = [f"--tls-cert={client.cert}", f"--tls-key={client.key}"]
    try:
        assert await asyncio.to_thread(main, [*flags, trust, *shown]) == 0
        assert "3 of 3 requests successful" in capsys.readouterr().out
        assert await asyncio.to_thread(main, flags) == 1
        assert "ClientConnectorCertificateError" in capsys.readouterr().err
        assert await asyncio.to_thread(main, [*flags, trust]) == 1
        assert "no warm-up request" in capsys.readouterr().err
        swapped = [f"--tls-cert={client.cert}", f"--tls-key={server.key}"]
        assert await asyncio.to_thread(main, [*flags, trust, *swapped]) == 2
        assert "not a PEM certificate and its key" in capsys.readouterr().err
    finally:
        await stack.close()


def test_a_key_with_a_password_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pair, locked = make_ca(tmp_path, "ca"), tmp_path / "locked.key"
    convert = ["openssl", "pkcs8", "-topk8", "-in", pair.key, "-out", locked]
    subprocess.run([*convert, "-passout", "pass:secret"], check=True, capture_output=True)
    flags = [f"--tls-cert={pair.cert}", f"--tls-key={locked}"]
    assert main(["bench", "serve", *HTTPS, *flags]) == 2
    assert "--tls-key: the private key is encrypted" in capsys.readouterr().err


class Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [value or "" for name, value in attrs if name in ("src", "href")]


def check_page(text: str, plots: int = 6) -> None:
    """It needs nothing else, has its plots, and escapes what users wrote."""
    page = Page()
    page.feed(text)
    assert page.tags.count("svg") == plots
    assert not page.links
    assert "script" not in page.tags
    assert "<a run>" not in text
    assert "&lt;a run&gt;" in text
    for part in text.split("<svg")[1:]:
        svg = ElementTree.fromstring("<svg" + part[: part.index("</svg>")] + "</svg>")
        assert svg.findall("text")
        for line in svg.findall("polyline"):
            points = [tuple(map(float, p.split(","))) for p in line.attrib["points"].split()]
            assert all(0 <= x <= 560 and 0 <= y <= 300 for x, y in points)


async def test_the_same_seed_asks_the_same(stack: Stack) -> None:
    for seed in (1, 1, 2):
        flags = ("--num-requests=3", "--concurrency=1", "--warm-up=0", "--output-len=1")
        assert await bench(stack, f"--seed={seed}", *flags) == 0
    asked = [add.token_ids for add in stack.engine.commands if type(add).__name__ == "Add"]
    assert asked[:3] == asked[3:6]
    assert set(asked[:3]).isdisjoint(asked[6:])


async def test_rejections_are_counted_apart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stack = Stack(FakeEngine(auto=False), FakeTokenizer(), max_requests=4)
    await stack.start()
    path = tmp_path / "report.json"
    flags = ("--num-requests=7", "--request-rate=inf", "--warm-up=0", "--output-len=1")
    running = asyncio.create_task(bench(stack, *flags, f"--json={path}"))
    rejected = b'admission_rejections_total{reason="max_num_queued_reqs"} 3.0'
    await stack.until(lambda: rejected in stack.frontend.metrics.exposition())
    await stack.engine.wait_running(4)
    stack.engine.step()
    assert await running == 0
    await stack.close()
    summary = json.loads(path.read_text())["summary"]
    assert (summary["successful"], summary["output_tokens"]) == (4, 4)
    assert (summary["rejected"], summary["errors"]) == ({"RESOURCE_EXHAUSTED": 3}, {})
    assert "4 of 7 requests successful; rejected: RESOURCE_EXHAUSTED 3" in capsys.readouterr().out


async def test_bad_requests_are_errors(
    stack: Stack, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "hello", "max_tokens": 3}\n{"prompt": [99999]}\n')
    status = await bench(
        stack, "--workload=file", f"--file={path}", "--num-requests=4", "--warm-up=1"
    )
    out = capsys.readouterr().out
    assert status == 0
    assert "2 of 4 requests successful; errors: INVALID_ARGUMENT 2; first failure: " in out


async def test_a_server_that_is_not_there_fails(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["bench", "serve", "--address=127.0.0.1:1", "--workload=text"]
    assert await asyncio.to_thread(main, flags) == 1
    assert "no warm-up request" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--input-len=9:3"], "--input-len: must be from 1"),
        (["--goodput=speed:3"], "--goodput: must be ttft, tpot or e2e"),
        (["--goodput=ttft:-1"], "--goodput: must be above 0"),
        (["--num-requests=0"], "--num-requests: must be a number above 0"),
        (["--concurrency=0"], "--concurrency: must be a number above 0"),
        (["--concurrency=1,x"], "--concurrency: must be a number above 0, or several"),
        (["--concurrency=1,64", "--num-requests=20"], "--concurrency: 64 cannot be in flight"),
        (["--target=openai", "--url=localhost:8000"], "--url: must be http://HOST:PORT"),
        (["--target=openai", "--tls"], "--tls is of use with an https:// --url only"),
        (["--target=openai", "--tls-ca=ca.pem"], "--tls-ca is of use with an https:// --url only"),
        ([*HTTPS, "--tls-ca=/nowhere.pem"], "--tls-ca /nowhere.pem: No such file"),
        ([*HTTPS, f"--tls-ca={__file__}"], "--tls-ca " + __file__ + ": not a PEM file"),
        ([*HTTPS, "--tls-cert=a.pem"], "--tls-cert and --tls-key are only of use together"),
        ([*HTTPS, f"--tls-cert={__file__}", f"--tls-key={__file__}"], "--tls-cert "),
        (["--request-rate=nan"], "--request-rate: must be above 0"),
        (["--extra-body=[]"], "--extra-body: must be a JSON object"),
        (["--workload=file"], "--workload file needs --file"),
        (["--json=/nowhere/at/all.json"], "/nowhere/at/all.json: no such directory"),
    ],
)
def test_bad_flags_are_named(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        status: Any = main(["bench", "serve", "--address=127.0.0.1:1", "--vocab-size=99", *flags])
    except SystemExit as end:
        status = end.code
    assert status == 2
    assert message in capsys.readouterr().err


def test_without_its_library_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delitem(sys.modules, "pagewire.bench.openai_target", raising=False)
    monkeypatch.setitem(sys.modules, "aiohttp", None)
    assert main(["bench", "serve", "--target=openai"]) == 2
    assert "pip install 'pagewire[bench]'" in capsys.readouterr().err
