"""One logging set-up per process: text for people, JSON lines for machines."""

from __future__ import annotations

import contextlib
import json
import logging
import sys
import time
from contextvars import ContextVar
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from collections.abc import Iterator

_QUIET = ("asyncio", "filelock", "httpcore", "httpx", "multipart", "transformers", "urllib3")
_SERVERS = ("uvicorn", "uvicorn.error", "uvicorn.access", "grpc", "grpc._cython.cygrpc")
_STANDARD_FIELDS = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}

_context: ContextVar[dict[str, str] | None] = ContextVar("pagewire_log_context", default=None)


@contextlib.contextmanager
def log_context(**fields: str) -> Iterator[None]:
    """Adds fields, such as request_id and trace_id, to every record made inside,
    also in the asyncio tasks started there."""
    token = _context.set({**(_context.get() or {}), **fields})
    try:
        yield
    finally:
        _context.reset(token)


def setup_logging(room: str, level: str, format: str, *, stream: TextIO | None = None) -> None:
    """Sends all of this process's records to one stream (default: stderr).

    `format` is "text" (a line for a record; a traceback follows on lines of its
    own) or "json" (an object on one line for a record, traceback included).
    Fields given by log_context or by a record's `extra` are carried along.
    Calling it again replaces the former set-up.
    """
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter(room) if format == "json" else _TextFormatter(room))
    root = logging.getLogger()
    for old in root.handlers[:]:
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(level.upper())
    for name in _SERVERS:
        logger = logging.getLogger(name)
        logger.handlers.clear()
        logger.propagate = True
    logging.getLogger("uvicorn.access").setLevel(logging.WARNING)
    # uvicorn tells its life story at INFO; the rooms log their own addresses.
    logging.getLogger("uvicorn.error").setLevel(max(logging.WARNING, root.level))
    for name in _QUIET:
        logging.getLogger(name).setLevel(max(logging.WARNING, root.level))
    logging.captureWarnings(True)


class _TextFormatter(logging.Formatter):
    def __init__(self, room: str) -> None:
        super().__init__()
        self._room = room

    def format(self, record: logging.LogRecord) -> str:
        when = time.strftime("%H:%M:%S", time.localtime(record.created))
        line = (
            f"{when}.{int(record.msecs):03d} {record.levelname.lower():7} "
            f"{self._room}: {_one_line(record.getMessage())}"
        )
        for key, value in _fields(record).items():
            line += f" {key}={_one_line(str(value))}"
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        return line


class JsonFormatter(logging.Formatter):
    """An object on one line for a record."""

    def __init__(self, room: str) -> None:
        super().__init__()
        self._room = room

    def format(self, record: logging.LogRecord) -> str:
        when = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        entry: dict[str, object] = {
            "time": f"{when}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "room": self._room,
            "logger": record.name,
            "message": record.getMessage(),
        }
        entry.update(_fields(record))
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, default=str)


def _fields(record: logging.LogRecord) -> dict[str, object]:
    extra = {key: value for key, value in vars(record).items() if key not in _STANDARD_FIELDS}
    return {**(_context.get() or {}), **extra}


def _one_line(text: str) -> str:
    # What a client sent may end up in a message: it must neither forge a record nor steer
    # the terminal of whoever reads it.
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode() for char in text
    )
