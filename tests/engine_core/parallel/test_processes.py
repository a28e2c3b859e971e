"""The processes of ranks: what they are told, and what their end means. No torch in any."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from engine_core.parallel.messages import write_frame
from engine_core.parallel.processes import RankProcesses
from pagewire.config import EngineConfig
from tests.support.fake_rank import MODULE

if TYPE_CHECKING:
    from collections.abc import Iterator

REPO = Path(__file__).parents[3]
TIMEOUT_S = 60.0


def told(directory: Path, rank: int) -> dict[str, Any]:
    """What a rank has written; waits until it has."""
    path, deadline = directory / f"{rank}.json", time.monotonic() + TIMEOUT_S
    while not path.exists():
        assert time.monotonic() < deadline
        threading.Event().wait(0.01)
    result: dict[str, Any] = json.loads(path.read_text())
    return result


@pytest.fixture(autouse=True)
def _path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(REPO))


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[RankProcesses]:
    config = EngineConfig(model=str(tmp_path), tensor_parallel_size=3)
    processes = RankProcesses(config, MODULE)
    # Without it the end of a rank is the end of this process.
    processes.watch(lambda _told: None)
    yield processes
    processes.close()


def test_ranks_live_until_their_pipe_ends(ranks: RankProcesses, tmp_path: Path) -> None:
    ranks.start()
    pids = []
    for rank in (1, 2):
        start = told(tmp_path, rank)
        assert (start["size"], start["parent"], start["links"]) == (3, os.getpid(), 0)
        pids.append(start["pid"])
    for pipe in ranks.pipes:
        write_frame(pipe, b"a plan")
    ranks.close()
    assert [told(tmp_path, rank)["frames"] for rank in (1, 2)] == [["a plan"]] * 2
    assert not any(map(psutil.pid_exists, pids))


def test_ranks_that_were_never_started_end_too(ranks: RankProcesses) -> None:
    ranks.close()
    assert psutil.Process().children() == []


def test_the_end_of_a_rank_is_told_once(tmp_path: Path) -> None:
    config = EngineConfig(model=str(tmp_path), tensor_parallel_size=3)
    ranks = RankProcesses(config, MODULE)
    heard: list[str] = []
    has_heard = threading.Event()

    def hear(what: str) -> None:
        heard.append(what)
        has_heard.set()

    ranks.watch(hear)
    ranks.start()
    pids = [told(tmp_path, rank)["pid"] for rank in (1, 2)]
    os.kill(pids[1], signal.SIGKILL)
    assert has_heard.wait(TIMEOUT_S)
    # Rank 1 might wait for it in a collective: it is not asked, but killed.
    os.kill(pids[0], signal.SIGSTOP)
    ranks.close()
    assert heard == ["rank 2 of 3 ended with SIGKILL, see its log"]
    assert not any(map(psutil.pid_exists, pids))
    late: list[str] = []
    ranks.watch(late.append)
    assert late == heard


@pytest.mark.parametrize(("status", "ours"), [(3, 3), (7, 1)])
def test_a_rank_that_ends_while_loading_ends_us(status: int, ours: int) -> None:
    process = subprocess.run(
        [sys.executable, "-m", MODULE, f"end-{status}"],
        cwd=REPO,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert process.returncode == ours
