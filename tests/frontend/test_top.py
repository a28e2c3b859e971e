"""`pagewire top` against a whole frontend: its figures, its frames, its complaints."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import itertools
import json
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from pagewire.api_keys import new_key
from pagewire.cli import main, top
from pagewire.cli.top_figures import quantile
from pagewire.cli.top_source import Page, Sample
from pagewire.v1 import common_pb2
from tests.frontend.certificates import make_ca, make_certificate
from tests.frontend.several_engines import SeveralEngines
from tests.support.fake_engine import FakeEngine
from tests.support.fake_tokenizer import FakeTokenizer

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator
    from pathlib import Path

    from tests.frontend.conftest import Stack

ESCAPES = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")
WAIT_S = 60.0


async def ask(stack: Stack, tenant: str, count: int, max_tokens: int, prompt: str = "abc") -> None:
    sampling = common_pb2.SamplingParams(max_tokens=max_tokens)
    requests = (
        stack.stream(prompt=prompt, tenant=tenant, sampling_params=sampling) for _ in range(count)
    )
    await asyncio.gather(*requests)


async def run_top(stack: Stack, *flags: str) -> int:
    return await asyncio.to_thread(main, ["top", "--http", stack.frontend.http_address, *flags])


@pytest.fixture
def meanwhile(monkeypatch: pytest.MonkeyPatch) -> Callable[[Coroutine[Any, Any, None]], None]:
    """meanwhile(work): the next interval is as long as `work` takes."""

    def plan(work: Coroutine[Any, Any, None]) -> None:
        loop = asyncio.get_running_loop()

        def pause(seconds: float) -> None:
            asyncio.run_coroutine_threadsafe(work, loop).result(WAIT_S)

        monkeypatch.setattr(top, "pause", pause)
        monkeypatch.setattr("frontend.metrics_page.MAX_AGE_S", 0.0)

    return plan


async def test_figures_are_what_the_load_did(
    make_stack: Callable[..., Any],
    meanwhile: Callable[..., None],
    capfd: pytest.CaptureFixture[str],
) -> None:
    # One whose only heartbeat is the test's.
    stack = await make_stack(step_s=0.002, heartbeat_s=600, config={"engine_timeout": 600})
    too_many = common_pb2.SamplingParams(max_tokens=5000)
    await ask(stack, "acme", 4, 6)
    await stack.fails(stack.open(prompt=""))
    await stack.fails(stack.open(prompt="a", sampling_params=too_many))

    async def load() -> None:
        await ask(stack, "acme", 3, 5)
        await ask(stack, "", 2, 7, prompt="abcdef")
        await stack.fails(stack.open(prompt="a", sampling_params=too_many))
        stack.engine.heartbeat(
            num_running=3, num_waiting=2, num_free_blocks=400, num_free_cached_blocks=150
        )
        await stack.until(lambda: stack.engine_client.ready is not None and waiting(stack) == 2)

    def waiting(stack: Stack) -> int:
        stats = stack.frontend.dispatcher.engine_side.stats
        return 0 if stats is None else stats.num_waiting

    meanwhile(load())
    assert await run_top(stack, "--once", "--json") == 0
    it = json.loads(capfd.readouterr().out)
    assert (it["model"], it["serving"], it["draining"]) == ("fake", True, False)
    assert (it["running"], it["waiting"], it["in_flight"]) == (3, 2, 0)
    assert it["blocks"] == {"total": 1000, "used": 600, "cached": 150, "free": 250}
    seconds = it["interval_s"]
    assert it["output_tokens_per_s"] * seconds == pytest.approx(3 * 5 + 2 * 7)
    assert it["prompt_tokens_per_s"] * seconds == pytest.approx(3 * 3 + 2 * 6)
    # The fake engine says that half of the prompts was found, rounded down: 12 // 2, 33 // 2.
    assert it["prefix_cache_hit_rate"] == pytest.approx((16 - 6) / (33 - 12))
    assert it["preemptions"] == {"recent": 0, "total": 0}
    assert it["ended"] == {"length": {"recent": 5, "total": 9}}
    assert it["refused"] == {"invalid_request": {"recent": 1, "total": 2}}
    assert it["errors"] == {"INVALID_ARGUMENT": {"recent": 1, "total": 3}}
    counts = {name: latency["count"] for name, latency in it["latency_s"].items()}
    assert counts.pop("detokenize") > 0
    assert counts == {"ttft": 5, "itl": 3 * 4 + 2 * 6, "e2e": 5}
    for latency in it["latency_s"].values():
        assert 0 < latency["p50"] <= latency["p90"] <= latency["p99"]
    tenants = {tenant.pop("tenant"): tenant for tenant in it["tenants"]}
    assert tenants["acme"]["ended"] == {"recent": 3, "total": 7}
    assert tenants["acme"]["output_tokens"] == 4 * 6 + 3 * 5
    assert tenants[""]["ended"] == {"recent": 2, "total": 2}
    assert tenants[""]["prompt_tokens_per_s"] * seconds == pytest.approx(12)
    (engine,) = it["engines"]
    assert (engine["address"], engine["running"], engine["ready"]) == (
        stack.engine.address,
        3,
        True,
    )


async def test_a_frame_for_a_pipe(
    stack: Stack, meanwhile: Callable[..., None], capfd: pytest.CaptureFixture[str]
) -> None:
    meanwhile(ask(stack, "a\x1b[31mb", 2, 5))
    assert await run_top(stack, "--once") == 0
    out = capfd.readouterr().out
    assert "\x1b" not in out
    assert "fake" in out.splitlines()[0]
    assert re.search(r"^ended +length 2 \(2\)", out, re.M)
    assert re.search(r"^a\?\[31mb +2 +2 ", out, re.M)


async def test_several_engines_have_a_table(
    meanwhile: Callable[..., None], capfd: pytest.CaptureFixture[str]
) -> None:
    engines = [FakeEngine(auto=False, heartbeat_s=600), FakeEngine(auto=False)]
    stack = SeveralEngines(engines, FakeTokenizer(), engine_timeout=600)
    await stack.start()
    try:

        async def work() -> None:
            await stack.engines[1].kill()
            await stack.until(lambda: stack.links[1].ready is None)
            stack.engines[0].heartbeat(num_running=7, num_free_blocks=500)
            await stack.until(lambda: running(stack) == 7)

        def running(stack: SeveralEngines) -> int:
            stats = stack.links[0].stats
            return 0 if stats is None else stats.num_running

        meanwhile(work())
        assert await run_top(stack, "--once") == 0
        out = capfd.readouterr().out
        assert re.search(rf"^{re.escape(stack.engines[0].address)} +ready +7 +0 +50%", out, re.M)
        assert re.search(rf"^{re.escape(stack.engines[1].address)} +gone +0 +0 +-", out, re.M)
    finally:
        await stack.close()


class Terminal:
    """`pagewire top` on a terminal of its own."""

    def __init__(self, address: str, columns: int, lines: int) -> None:
        self._master, slave = pty.openpty()
        size = struct.pack("HHHH", lines, columns, 0, 0)
        fcntl.ioctl(slave, termios.TIOCSWINSZ, size)
        self._before = termios.tcgetattr(slave)
        self._slave = slave
        environment = {**os.environ, "TERM": "xterm-256color"}
        for name in ("COLUMNS", "LINES"):
            environment.pop(name, None)
        command = [sys.executable, "-m", "pagewire.cli", "top", "--http", address, "--interval=.1"]
        self.process = subprocess.Popen(
            command, stdin=slave, stdout=slave, stderr=slave, env=environment
        )
        self.text = ""

    async def until(self, pattern: str) -> str:
        """Reads until a whole frame has it; that frame, without what colours it."""
        async with asyncio.timeout(WAIT_S):
            while True:
                *whole, _ = self.text.split("\x1b[H")
                for frame in whole:
                    plain = ESCAPES.sub("", frame)
                    if re.search(pattern, plain, re.M):
                        return plain.replace("\r", "")
                self.text += await asyncio.to_thread(self._read)

    def _read(self) -> str:
        return os.read(self._master, 65536).decode()

    def press(self, key: str) -> None:
        os.write(self._master, key.encode())

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()

    async def end(self) -> int:
        # Kernels hold a program back whose terminal nobody reads.
        reader = threading.Thread(target=self._drain, daemon=True)
        reader.start()
        status = await asyncio.to_thread(self.process.wait, WAIT_S)
        assert termios.tcgetattr(self._slave) == self._before
        os.close(self._slave)
        await asyncio.to_thread(reader.join, WAIT_S)
        os.close(self._master)
        return status

    def _drain(self) -> None:
        try:
            while data := os.read(self._master, 65536):
                self.text += data.decode()
        except OSError:
            pass  # the other end is closed


@pytest.fixture
def open_terminal() -> Iterator[Callable[[str, int, int], Terminal]]:
    terminals = []

    def make(address: str, columns: int, lines: int) -> Terminal:
        terminals.append(Terminal(address, columns, lines))
        return terminals[-1]

    yield make
    for terminal in terminals:
        terminal.kill()


@pytest.mark.parametrize(("columns", "lines"), [(80, 24), (160, 40)])
async def test_a_screen(
    stack: Stack, open_terminal: Callable[..., Terminal], columns: int, lines: int
) -> None:
    terminal = open_terminal(stack.frontend.http_address, columns, lines)
    first = await terminal.until("serving")
    assert re.search("^ended +none", first, re.M)
    await asyncio.gather(*(ask(stack, f"tenant-{i}", 1, 4) for i in range(20)))
    frame = await terminal.until(r"^ended +length \d+ \(20\)")
    rows = frame.strip("\n").split("\n")
    assert len(rows) <= lines
    assert max(map(len, rows)) <= columns
    named = len(re.findall("tenant-", frame))
    assert named == (4 if lines == 24 else 20)
    assert ("16 more" in frame) == (lines == 24)
    terminal.press("q")
    assert await terminal.end() == 0
    # The cursor is shown again, and what was there before.
    assert terminal.text.endswith("\x1b[?25h\x1b[?1049l")


def test_an_interrupt_in_a_finalizer_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupted:
        url = "http://fake"
        num_asked = 0

        def sample(self) -> Sample:
            self.num_asked += 1
            assert self.num_asked < 5, "went on"
            if self.num_asked == 2:
                with contextlib.suppress(KeyboardInterrupt):
                    signal.raise_signal(signal.SIGINT)
            return Sample({"life": "1", "model": "fake"}, Page(""))

        def close(self) -> None:
            pass

    source, before = Interrupted(), signal.getsignal(signal.SIGINT)
    monkeypatch.setattr(top, "Source", lambda *_args, **_flags: source)
    monkeypatch.setattr(top, "figures", lambda *_args: {})
    assert main(["top", "--json", "--interval", "0.001"]) == 0
    assert source.num_asked == 2
    assert signal.getsignal(signal.SIGINT) is before


async def test_a_server_that_goes_and_comes_back(
    make_stack: Callable[..., Any], open_terminal: Callable[..., Terminal]
) -> None:
    first = await make_stack(step_s=0.002)
    address = first.frontend.http_address
    terminal = open_terminal(address, 80, 24)
    await terminal.until("  serving  ")
    await ask(first, "", 2, 4)
    await terminal.until(r"^ended +length \d \(2\)")
    await first.close()
    frame = await terminal.until("no answer from .*: Connection refused")
    assert re.search(r"^ended +length \d \(2\)", frame, re.M)
    second = await make_stack(step_s=0.002, config={"http_port": int(address.rpartition(":")[2])})
    await ask(second, "", 3, 4)
    await terminal.until(r"^ended +length \d \(3\)")
    terminal.process.send_signal(signal.SIGINT)
    assert await terminal.end() == 0


class Stranger(BaseHTTPRequestHandler):
    """Some other server."""

    def do_GET(self) -> None:
        body = b"{}" if self.path == "/live" else b"vllm:num_requests_running 1.0\n"
        known = self.server.server_port % 2 or self.path != "/live"  # type: ignore[attr-defined]
        self.send_response(200 if known else 404)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None: ...


@pytest.fixture
def strangers() -> Iterator[list[str]]:
    """The one with an odd port has a /live of its own, the other has none."""
    servers: dict[int, HTTPServer] = {}
    spare = []
    while len(servers) < 2:
        server = HTTPServer(("127.0.0.1", 0), Stranger)
        if server.server_port % 2 in servers:
            spare.append(server)
        else:
            servers[server.server_port % 2] = server
    for server in spare:
        server.server_close()
    threads = [threading.Thread(target=server.serve_forever) for server in servers.values()]
    for thread in threads:
        thread.start()
    yield [f"127.0.0.1:{servers[odd].server_port}" for odd in (1, 0)]
    for server, thread in zip(servers.values(), threads, strict=True):
        server.shutdown()
        thread.join()
        server.server_close()


def test_who_does_not_answer(strangers: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    odd, even = strangers
    for address, status, said in (
        ("127.0.0.1:1", 1, "no answer from http://127.0.0.1:1: Connection refused; start a server"),
        (odd, 1, f"http://{odd} is no Pagewire server"),
        (even, 1, f"http://{even} has no /live: is it Pagewire's?"),
        ("localhost", 2, "--http: must be HOST:PORT, got 'localhost'"),
        ("ftp://localhost:1", 2, "--http: must be HOST:PORT"),
        ("localhost:x", 2, "--http: must be HOST:PORT"),
        ("localhost:1/metrics", 2, "--http: must be HOST:PORT without a path"),
    ):
        assert main(["top", "--once", "--http", address]) == status, address
        out, err = capfd.readouterr()
        assert (out, err.count("\n")) == ("", 1)
        assert err.startswith(f"pagewire: {said}"), err
    for flag in ("--interval=0", "--interval=nan", "--interval=x"):
        with pytest.raises(SystemExit):
            main(["top", flag])


async def test_keys_and_tls(
    make_stack: Callable[..., Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    meanwhile: Callable[..., None],
    capfd: pytest.CaptureFixture[str],
) -> None:
    ca = make_ca(tmp_path, "ca")
    server = make_certificate(tmp_path, "server", ca)
    watcher, entry = new_key("watcher", "acme", ("metrics",))
    app, other = new_key("app", "acme")
    (tmp_path / "keys").write_text(f"{entry.line()}\n{other.line()}")
    stack = await make_stack(
        config={
            "api_keys": str(tmp_path / "keys"),
            "tls_cert": str(server.cert),
            "tls_key": str(server.key),
        },
        serving=False,
    )
    trusted = f"--tls-ca={ca.cert}"
    assert await run_top(stack, "--once", trusted) == 1
    assert "an API key is needed" in capfd.readouterr().err
    assert await run_top(stack, "--once", trusted, f"--api-key={app}") == 1
    assert "this key has not the role metrics" in capfd.readouterr().err
    assert await run_top(stack, "--once", "--tls", f"--api-key={watcher}") == 1
    assert "certificate verify failed" in capfd.readouterr().err
    assert await run_top(stack, "--once", f"--tls-ca={tmp_path / 'keys'}") == 2
    assert "--tls-ca" in capfd.readouterr().err
    monkeypatch.setenv("PAGEWIRE_API_KEY", watcher)
    meanwhile(asyncio.sleep(0))
    assert await run_top(stack, "--once", "--json", trusted) == 0
    assert json.loads(capfd.readouterr().out)["server"].startswith("https://")


@pytest.mark.parametrize("seed", range(8))
def test_quantiles_are_straight_lines_between_bounds(seed: int) -> None:
    random = np.random.default_rng(seed)
    bounds = np.cumsum(random.exponential(size=12))
    counts = random.integers(1, 50, size=12)
    buckets = list(zip(map(float, bounds), itertools.accumulate(map(float, counts)), strict=True))
    buckets.append((float("inf"), buckets[-1][1]))
    for q in (0.01, 0.5, 0.9, 0.99):
        expected = np.interp(q * counts.sum(), [0, *np.cumsum(counts)], [0, *bounds])
        assert quantile(buckets, q) == pytest.approx(expected)


def test_quantiles_at_the_edges() -> None:
    assert quantile([], 0.5) is None
    assert quantile([(1.0, 0.0), (float("inf"), 0.0)], 0.5) is None
    assert quantile([(1.0, 1.0), (float("inf"), 10.0)], 0.5) == float("inf")
    assert quantile([(1.0, 0.0), (2.0, 4.0), (float("inf"), 4.0)], 0.5) == 1.5
