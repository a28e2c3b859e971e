from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from pagewire.obs.ready import read_ready_file, write_ready_file

if TYPE_CHECKING:
    from pathlib import Path


def test_facts_and_pid_are_read_back(tmp_path: Path) -> None:
    path = tmp_path / "ready.json"
    assert read_ready_file(path) is None
    write_ready_file(str(path), {"grpc": "127.0.0.1:1"})
    assert read_ready_file(path) == {"pid": os.getpid(), "grpc": "127.0.0.1:1"}
    write_ready_file(str(path), {"grpc": "127.0.0.1:2"})
    assert read_ready_file(path) == {"pid": os.getpid(), "grpc": "127.0.0.1:2"}
    assert list(tmp_path.iterdir()) == [path]


def test_a_failed_write_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(TypeError):
        write_ready_file(str(tmp_path / "ready.json"), {"grpc": object()})
    assert list(tmp_path.iterdir()) == []


def test_no_path_means_no_file() -> None:
    write_ready_file(None, {})
