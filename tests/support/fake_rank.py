"""A rank without torch, for python -m: echoes what it is told to a file, and ends as it is told.

    python -m tests.support.fake_rank            a rank, as RankProcesses starts it
    python -m tests.support.fake_rank LEADER     a process with one rank, which ends first

The model's name in the configuration is the directory in which rank R writes R.json, its
pid and what it was told; `end-N` in its place makes it end with status N.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from pathlib import Path

from engine_core.parallel.messages import decode_start, read_frame
from engine_core.parallel.processes import RankProcesses
from pagewire.config import EngineConfig

MODULE = "tests.support.fake_rank"


def rank() -> int:
    frame = read_frame(sys.stdin.buffer)
    if frame is None:
        return 0
    start = decode_start(frame)
    config = EngineConfig.model_validate_json(start.config)
    if config.model.startswith("end-"):
        return int(config.model.removeprefix("end-"))
    told = {"pid": os.getpid(), "size": config.tensor_parallel_size, "parent": start.parent_pid}
    # The file is there, without a name, for whoever inherits it.
    told["links"] = os.fstat(start.store).st_nlink
    told["frames"] = []
    path = Path(config.model) / f"{start.rank}.json"
    path.with_suffix(".new").write_text(json.dumps(told))
    path.with_suffix(".new").rename(path)
    while (frame := read_frame(sys.stdin.buffer)) is not None:
        told["frames"].append(frame.decode())
        path.write_text(json.dumps(told))
    return 0


def lead(model: str) -> int:
    """Its status is that of whoever ends it: it waits for ever."""
    RankProcesses(EngineConfig(model=model, tensor_parallel_size=2), MODULE).start()
    threading.Event().wait()
    return 0


if __name__ == "__main__":
    raise SystemExit(rank() if len(sys.argv) == 1 else lead(sys.argv[1]))
