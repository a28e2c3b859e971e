"""How many cores a process may keep busy."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


def allowed_cores(root: Path = Path("/")) -> int:
    """Cores of the affinity mask, or fewer where a cgroup's quota allows less time: whole
    ones, at least one.

    More threads than the quota keeps busy spend it early in each period, and then all of
    them stand still. root stands for / in tests.
    """
    cores = float(len(os.sched_getaffinity(0)))
    for group in _cpu_groups(root):
        for quota in (_v2_quota(group), _v1_quota(group)):
            if quota is not None:
                cores = min(cores, quota)
    return max(1, int(cores))


def _cpu_groups(root: Path) -> Iterator[Path]:
    """The folders of this process's group and of all above it: each may have a quota. A
    container sees its own group as the top, under whatever path the host knows it by."""
    top = root / "sys/fs/cgroup"
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        # "0::/path" is version 2, "3:cpu,cpuacct:/path" is version 1.
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        mount = top / controllers
        group = mount / path.lstrip("/")
        yield from (it for it in (group, *group.parents) if it.is_relative_to(mount))


def _v2_quota(group: Path) -> float | None:
    """In cores."""
    try:
        quota, period = (group / "cpu.max").read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):
        return None


def _v1_quota(group: Path) -> float | None:
    try:
        quota = int((group / "cpu.cfs_quota_us").read_text())
        return None if quota < 0 else quota / int((group / "cpu.cfs_period_us").read_text())
    except (OSError, ValueError):
        return None
