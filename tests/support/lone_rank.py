"""A group of one rank: every collective is called, and nobody else is needed."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from engine_core.parallel.group import RankGroup, connect
from engine_core.parallel.ranks import SoleRank

if TYPE_CHECKING:
    import torch

    from pagewire.config import EngineConfig


class LoneRank(SoleRank):
    """config.tensor_parallel_size is 1."""

    def __init__(self, config: EngineConfig) -> None:
        assert config.tensor_parallel_size == 1
        self._config = config
        self._store_file = os.memfd_create("lone-rank")
        self._group: RankGroup | None = None

    def connect(self, device: torch.device) -> RankGroup:
        self._group = connect(self._store_file, 0, self._config, device)
        return self._group

    def close(self) -> None:
        if self._group is not None:
            self._group.close()
        os.close(self._store_file)
