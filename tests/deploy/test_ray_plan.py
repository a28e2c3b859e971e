"""What is asked of Ray, without Ray, and the process that an actor keeps running."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from deploy.ray.endpoints import Endpoints
from deploy.ray.plan import Plan, read_plan
from deploy.ray.supervisor import Supervisor
from pagewire.config import EngineConfig, FrontendConfig, TokenizerConfig
from pagewire.errors import ConfigError
from pagewire.settings import load_config
from tests.support.balanced import ROOT, eventually
from tests.support.tiny_model import TinySpec, write_hf

if TYPE_CHECKING:
    from pathlib import Path

REMOTE = "--allow-remote-engine"


def plan(*own: str, settings: tuple[str, ...] = ()) -> Plan:
    return read_plan([*own, "--", REMOTE, *settings])


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (["--engines", "0", "--", REMOTE], "--engines"),
        (["--engine-cpus", "-1", "--", REMOTE], "--engine-cpus"),
        (["--engine-port", "http", "--", REMOTE], "--engine-port"),
        (["--engine", "2", "--", REMOTE], "--engine"),
        (["--engines", "2"], "--allow-remote-engine"),
        (["--", REMOTE, "--num-engines", "2"], "--num-engines"),
        (["--", REMOTE, "--engine-bind", "tcp://10.0.0.1:1"], "--engine-bind"),
        (["--", REMOTE, "--ready-file", "x"], "--ready-file"),
        (["--", REMOTE, "--max-num-seq", "2"], "--max-num-seq"),
    ],
)
def test_a_wrong_flag_is_named(argv: list[str], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        read_plan(argv)


def test_rooms_understand_the_flags_they_get() -> None:
    asked = plan("--engines", "2", "--engine-cpus", "3", settings=("--max-num-seqs=7",))
    engine = load_config(EngineConfig, asked.engine_flags(1, "10.0.0.2"))
    assert engine.engine_bind == "tcp://10.0.0.2:5601"
    assert (engine.max_num_seqs, engine.cpu_threads) == (7, 3)
    tokenizer = load_config(TokenizerConfig, asked.tokenizer_flags("unix:/run/t"))
    assert tokenizer.tokenizer_bind == "unix:/run/t"
    engines = [asked.engine_endpoint(i, f"10.0.0.{i}") for i in range(2)]
    frontend = load_config(
        FrontendConfig, asked.frontend_flags(1, "10.0.0.9", "unix:/run/t", engines)
    )
    assert frontend.engine_address == "tcp://10.0.0.0:5600,tcp://10.0.0.1:5601"
    assert frontend.outputs_bind == "tcp://10.0.0.9:0"
    assert (frontend.port, frontend.http_port, frontend.admin_port) == (50052, 8001, 50053)


def test_a_gpu_engine_has_no_bound_on_its_threads() -> None:
    flags = plan("--engine-gpus", "1").engine_flags(0, "10.0.0.2")
    assert load_config(EngineConfig, flags).cpu_threads is None


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_hf(tmp_path_factory.mktemp("model"), TinySpec())


async def test_a_process_that_dies_is_started_again_with_new_flags(
    model: Path, tmp_path: Path
) -> None:
    sockets = iter(("a", "b", "c"))
    supervisor = Supervisor(
        "tokenizer_svc",
        lambda: tokenizer_flags(model, tmp_path / next(sockets)),
        tmp_path / "ready.json",
    )
    try:
        await eventually(lambda: supervisor.facts() is not None, 60)
        psutil.Process(facts_of(supervisor)["pid"]).kill()
        await eventually(lambda: facts_of(supervisor).get("grpc") == f"unix:{tmp_path}/b", 60)
        supervisor.renew()
        await eventually(lambda: facts_of(supervisor).get("grpc") == f"unix:{tmp_path}/c", 60)
    finally:
        assert supervisor.stop(60) == 0


def facts_of(supervisor: Supervisor) -> dict[str, Any]:
    return supervisor.facts() or {}


def tokenizer_flags(model: Path, socket: Path) -> list[str]:
    return [f"--model={model}", f"--tokenizer-bind=unix:{socket}"]


def test_an_engine_that_moves_is_found_and_one_that_is_away_is_not_forgotten() -> None:
    answers: list[str | None] = ["tcp://10.0.0.1:5600", "tcp://10.0.0.2:5601"]
    endpoints = Endpoints(
        [lambda: answers[0], lambda: answers[1]], ["tcp://10.0.0.1:5600", "tcp://10.0.0.2:5601"]
    )
    assert not endpoints.refresh()
    answers[1] = None
    assert not endpoints.refresh()
    answers[1] = "tcp://10.0.0.3:5601"
    assert endpoints.refresh()
    assert endpoints.current == ["tcp://10.0.0.1:5600", "tcp://10.0.0.3:5601"]
    assert not endpoints.refresh()


async def test_a_wrong_setting_is_permanent(tmp_path: Path) -> None:
    supervisor = Supervisor("frontend", lambda: ["--port=x"], tmp_path / "ready.json")
    await eventually(lambda: supervisor.status is not None, 60)
    assert supervisor.status == 2
    assert supervisor.facts() is None


async def test_the_process_ends_with_its_actor(model: Path, tmp_path: Path) -> None:
    ready = tmp_path / "ready.json"
    flags = tokenizer_flags(model, tmp_path / "a")
    actor = (
        "import sys, threading, pathlib\n"
        "from deploy.ray.supervisor import Supervisor\n"
        f"s = Supervisor('tokenizer_svc', lambda: {flags!r}, pathlib.Path({str(ready)!r}))\n"
        "threading.Event().wait()\n"
    )
    process = subprocess.Popen([sys.executable, "-c", actor], cwd=ROOT)  # noqa: ASYNC220
    try:
        await eventually(ready.exists, 60)
        (room,) = psutil.Process(process.pid).children()
        os.kill(process.pid, signal.SIGKILL)
        await eventually(lambda: not room.is_running(), 10)
    finally:
        process.kill()
        process.wait()
