"""`pagewire bench serve` as a user runs it, against the fake engine's stack."""

from __future__ import annotations

import asyncio
import json
import sys
from html.parser import HTMLParser
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

import pytest

from pagewire.cli import main
from tests.frontend.conftest import Stack
from tests.support.fake_engine import FakeEngine
from tests.support.fake_tokenizer import FakeTokenizer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path


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
    check_page(page_path.read_text())


class Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [value or "" for name, value in attrs if name in ("src", "href")]


def check_page(text: str) -> None:
    """It needs nothing else, has its plots, and escapes what users wrote."""
    page = Page()
    page.feed(text)
    assert page.tags.count("svg") == 6
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
