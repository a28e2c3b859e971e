"""A file whose content is in force for as long as nobody writes a better one.

At start a bad file is a ConfigError. Later it is a line in the log, once, and what was
read before stays in force: a slip of an editor must neither open the door nor lock it.
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Generic, TypeVar

from pagewire.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

logger = logging.getLogger(__name__)

LOOK_EVERY_S = 1.0

Content = TypeVar("Content")


class WatchedFiles(Generic[Content]):
    """What `read` makes of the files; it raises OSError or ValueError for bad ones.

    `setting` names them in messages. Raises ConfigError.
    """

    def __init__(self, setting: str, paths: Sequence[str], read: Callable[[], Content]) -> None:
        self._setting = setting
        self._paths = [Path(path) for path in paths]
        self._read = read
        self._seen = self._state()
        try:
            self.content = read()
        except (OSError, ValueError) as error:
            raise ConfigError(f"{setting}: {_reason(error)}") from None

    def look(self) -> bool:
        """Reads the files again if they have changed; whether the content is new."""
        state = self._state()
        if state == self._seen:
            return False
        # Before reading: what is written meanwhile is found by the next look.
        self._seen = state
        try:
            self.content = self._read()
        except (OSError, ValueError) as error:
            logger.error(
                "%s: %s; what was read before stays in force", self._setting, _reason(error)
            )
            return False
        logger.info("%s: read again", self._setting)
        return True

    def _state(self) -> list[tuple[int, ...]]:
        return [_identity(path) for path in self._paths]


async def watch_forever(files: Sequence[WatchedFiles[object]]) -> None:
    """Looks at them every second. Cancel it to end."""
    while True:
        await asyncio.sleep(LOOK_EVERY_S)
        for watched in files:
            try:
                watched.look()
            except Exception:
                logger.exception("a watched file could not be looked at")


def _identity(path: Path) -> tuple[int, ...]:
    # Through links: Kubernetes swaps the directory that a mounted file's link leads to.
    try:
        stat = path.stat()
    except OSError:
        return ()
    return (stat.st_ino, stat.st_size, stat.st_mtime_ns)


def _reason(error: OSError | ValueError) -> str:
    # Not str(error) of an OSError, which puts an errno before it; a decoding error would
    # quote the file's bytes.
    if isinstance(error, UnicodeDecodeError):
        return "not UTF-8"
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return str(error)
