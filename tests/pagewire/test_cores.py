"""Cores that a process may keep busy: its affinity, and the quotas of its cgroups."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from pagewire.cores import allowed_cores
from tests.support.root_folder import make_root

if TYPE_CHECKING:
    from pathlib import Path

AFFINITY = set(range(6))


@pytest.fixture(autouse=True)
def _six_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: AFFINITY)


@pytest.mark.parametrize(
    ("cpu_max", "cores"),
    [
        ("max 100000\n", 6),
        ("400000 100000\n", 4),
        ("900000 100000\n", 6),
        ("150000 100000\n", 1),  # of two threads each would stand still half of the time
        ("50000 100000\n", 1),
        ("garbage", 6),
    ],
)
def test_quota_of_a_container(tmp_path: Path, cpu_max: str, cores: int) -> None:
    """Version 2, where a container's group is the top of what it sees."""
    files = {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": cpu_max}
    assert allowed_cores(make_root(tmp_path, files)) == cores


def test_the_least_of_all_groups_above_counts(tmp_path: Path) -> None:
    group = "sys/fs/cgroup/user.slice/app.slice"
    files = {
        "proc/self/cgroup": "0::/user.slice/app.slice/engine.service\n",
        f"{group}/engine.service/cpu.max": "max 100000\n",
        f"{group}/cpu.max": "200000 100000\n",
        "sys/fs/cgroup/user.slice/cpu.max": "300000 100000\n",
        "sys/fs/cgroup/other.slice/cpu.max": "100000 100000\n",
    }
    assert allowed_cores(make_root(tmp_path, files)) == 2


@pytest.mark.parametrize("path", ["/", "/docker/0123456789ab"])
def test_quota_of_version_1(tmp_path: Path, path: str) -> None:
    """A container may know its group by the host's path, which it does not see."""
    files = {
        "proc/self/cgroup": f"9:name=systemd:{path}\n5:cpuset:{path}\n4:cpu,cpuacct:{path}\n",
        "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "300000\n",
        "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
    }
    assert allowed_cores(make_root(tmp_path, files)) == 3


def test_no_quota_of_version_1(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "1:cpu:/\n",
        "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
        "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
    }
    assert allowed_cores(make_root(tmp_path, files)) == 6


def test_no_cgroups(tmp_path: Path) -> None:
    assert allowed_cores(tmp_path) == 6
