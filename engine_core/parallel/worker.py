"""python -m engine_core.parallel.worker: a rank but the first, started by rank 0.

It has no address, no scheduler and no requests. It builds its part of the model and runs
the plans that come through its standard input until that ends, which it does with rank 0.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import signal
import sys
from typing import IO, TYPE_CHECKING

from engine_core.parallel.messages import decode_plan, decode_start, read_frame
from pagewire import collector
from pagewire.config import EngineConfig
from pagewire.errors import ConfigError, ModelLoadError
from pagewire.launch import die_with_parent
from pagewire.obs.logging import setup_logging

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from engine_core.engine_builder import BuiltEngine
    from engine_core.parallel.group import RankGroup
    from engine_core.runner.base import PendingStep, Runner

_log = logging.getLogger(__name__)


class FollowingRank:
    """Ranks (engine_core/parallel/ranks.py) for all ranks but rank 0.

    store_file: the descriptor of the file by which ranks find each other.
    """

    def __init__(self, config: EngineConfig, rank: int, store_file: int) -> None:
        self.rank = rank
        self.size = config.tensor_parallel_size
        self._config = config
        self._store_file = store_file

    def connect(self, device: torch.device) -> RankGroup:
        from engine_core.parallel.group import connect

        return connect(self._store_file, self.rank, self._config, device)

    def lead(self, runner: Runner) -> Runner:
        return runner

    def watch(self, on_death: Callable[[str], None]) -> None:
        pass

    def close(self) -> None:
        pass


def follow(built: BuiltEngine, plans: IO[bytes]) -> None:
    """Runs plans until there are no more."""
    before: PendingStep | None = None
    had_drafts = False
    while (frame := read_frame(plans)) is not None:
        plan = decode_plan(frame)
        # It would overwrite what was chosen, and says which draft tokens there are.
        if before is not None and (plan.chosen or had_drafts):
            before.result()
            before = None
        pending = built.runner.launch(plan)
        if before is not None:
            before.result()
        before, had_drafts = pending, plan.has_drafts


def main() -> int:
    """The exit status: as the engine's own (engine_core/__main__.py)."""
    # Before torch: Ctrl-C and the like are rank 0's to answer, and this process ends with it.
    die_with_parent(signal.SIGKILL)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    from engine_core.engine_builder import build_engine  # seconds, as on rank 0 meanwhile

    plans = sys.stdin.buffer
    frame = read_frame(plans)
    if frame is None:
        return 0
    start = decode_start(frame)
    if os.getppid() != start.parent_pid:
        return 0
    config = EngineConfig.model_validate_json(start.config)
    setup_logging(f"engine.{start.rank}", config.log_level, config.log_format)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    try:
        built = build_engine(
            config,
            lambda _stage, _done, _total: None,
            FollowingRank(config, start.rank, start.store),
        )
    except ConfigError as error:
        _log.error("%s", error)
        return 2
    except ModelLoadError as error:
        _log.error("%s", error)
        return 3
    collector.settle()
    try:
        follow(built, plans)
    except Exception:
        _log.exception("rank %d failed", start.rank)
        return 1
    return 0


if __name__ == "__main__":
    # Without the destructors of process groups, which may wait for ranks that are gone.
    status = main()
    logging.shutdown()
    os._exit(status)
