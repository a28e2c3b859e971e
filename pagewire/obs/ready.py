"""The file by which a room says that it serves, and where."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from pathlib import Path
from typing import Any

GRPC = "grpc"
"""host:port or unix:/path of the room's gRPC server."""
HTTP = "http"
"""host:port of the frontend's HTTP server."""
ADMIN = "admin"
"""host:port of the frontend's AdminService."""
COMMANDS = "commands"
"""ZeroMQ endpoint of the engine."""
MODEL = "model"
"""The name that clients use."""
CHAT_TEMPLATE = "chat_template"
"""Whether the model has one, by tokenizer_svc."""


def write_ready_file(path: str | None, facts: dict[str, object]) -> None:
    """Writes `facts` and this process's pid to `path` as one JSON object.

    A reader sees nothing or the whole: the file is made beside its place and
    renamed into it. The keys that several rooms share are the names above.
    Does nothing for None. Raises OSError where the directory cannot be written.
    """
    if path is None:
        return
    target = Path(path)
    handle, temporary = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump({"pid": os.getpid(), **facts}, file)
        Path(temporary).replace(target)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            Path(temporary).unlink()
        raise


def read_ready_file(path: Path) -> dict[str, Any] | None:
    """The facts, or None while the room is not ready."""
    try:
        facts: dict[str, Any] = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        return None
    return facts
