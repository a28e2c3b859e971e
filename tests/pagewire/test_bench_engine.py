"""`pagewire bench throughput` and `latency` over real engine processes."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from pagewire.cli import main
from tests.support.tiny_model import TinySpec, write_hf

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def test_throughput_runs_an_engine_and_ends_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = write_hf(tmp_path / "model", TinySpec())
    path = tmp_path / "report.json"
    flags = ["--num-requests=6", "--input-len=20:40", "--output-len=3:8", "--warm-up=1"]
    engine = [f"--model={model}", "--dtype=float32", "--kv-cache-memory=4MiB", "--cpu-threads=1"]
    status = main(["bench", "throughput", *flags, f"--json={path}", "--", *engine])
    assert status == 0
    assert "6 of 6 requests successful" in capsys.readouterr().out
    report = json.loads(path.read_text())
    assert report["settings"]["concurrency"] == 6
    assert report["settings"]["dtype"] == "float32"
    assert 18 <= report["summary"]["output_tokens"] <= 48
    assert report["summary"]["itl_token_s"]["count"] == report["summary"]["output_tokens"] - 6


def test_an_engine_that_cannot_start_has_its_own_status(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "latency", "--", f"--model={tmp_path / 'absent'}"]) == 3
    assert "absent" in capfd.readouterr().err
    assert main(["bench", "latency", "--", "--max-num-seqs=0"]) == 2
    assert "--max-num-seqs" in capfd.readouterr().err
