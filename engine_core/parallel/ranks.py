"""A process's place among the ranks of its engine, as its builder sees it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from engine_core.parallel.group import RankGroup
    from engine_core.runner.base import Runner


class Ranks(Protocol):
    rank: int
    size: int

    def connect(self, device: torch.device) -> RankGroup | None:
        """Waits until all ranks are there; called once all that can be checked without the
        weights is. None for a rank of one. Raises ConfigError or ModelLoadError."""
        ...

    def lead(self, runner: Runner) -> Runner:
        """What takes plans: on rank 0, for all ranks."""
        ...

    def watch(self, on_death: Callable[[str], None]) -> None:
        """on_death: told, from another thread, of the first rank that ended, in words."""
        ...

    def close(self) -> None:
        """Ends the other ranks."""
        ...


class SoleRank:
    """An engine of one process."""

    rank = 0
    size = 1

    def connect(self, device: torch.device) -> RankGroup | None:
        return None

    def lead(self, runner: Runner) -> Runner:
        return runner

    def watch(self, on_death: Callable[[str], None]) -> None:
        pass

    def close(self) -> None:
        pass


SOLE_RANK = SoleRank()
