"""`pagewire serve`: starts every room as a process of its own, watches, stops.

The rooms find each other by unix sockets in a private runtime directory, so any
number of servers run on one host. Each room is given its whole configuration as
flags, and none of the PAGEWIRE_* environment: it was read once, here.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import fcntl
import functools
import logging
import os
import shutil
import signal
import stat
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pagewire.config import (
    CHOSEN_BY_LAUNCHER,
    EngineConfig,
    FrontendConfig,
    RoomConfig,
    ServeConfig,
    TokenizerConfig,
)
from pagewire.cores import allowed_cores
from pagewire.errors import ConfigError
from pagewire.obs.logging import setup_logging
from pagewire.obs.ready import (
    ADMIN,
    CHAT_TEMPLATE,
    GRPC,
    HTTP,
    MODEL,
    read_ready_file,
    write_ready_file,
)
from pagewire.settings import ENV_PREFIX, as_flags, flag_name

if TYPE_CHECKING:
    from collections.abc import Iterator

logger = logging.getLogger(__name__)

_FRONTEND, _TOKENIZER, _ENGINE = "frontend", "tokenizer_svc", "engine_core"
# sun_path holds 108 bytes with its final zero; ZeroMQ and gRPC add nothing to it.
_MAX_SOCKET_PATH = 107
_SOCKET_TAIL = len("/pagewire-12345678/commands.sock.15")
_POLL_S = 0.05
_STOP_S = 10.0
_MAX_BACKOFF_S = 30.0
_STEADY_S = 5.0
"""A room that served for so long does start: it is not made to wait for its next start."""
_PERMANENT = frozenset({2, 3})
# A room that is still importing when SIGTERM comes dies by it.
_STOPPED = frozenset({0, -signal.SIGTERM})
ORPHANED = signal.SIGUSR2
"""Tells the frontend that the launcher was killed. It must not drain then: the engine has
gone too, and the next server wants its ports."""
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


def serve(config: ServeConfig) -> int:
    """Runs all rooms until a signal, and gives the exit status.

    0 after SIGINT or SIGTERM, once running requests have drained. A room that
    ends before all are ready stops the others and its status is ours. Raises
    ConfigError where a socket address is set that the launcher chooses itself.
    """
    for name in CHOSEN_BY_LAUNCHER:
        if name in config.model_fields_set:
            raise ConfigError(
                f"{flag_name(name)}: `pagewire serve` connects its rooms itself; "
                "start the rooms one by one to set it"
            )
    setup_logging("serve", config.log_level, config.log_format)
    with runtime_directory() as directory:
        return asyncio.run(_Stack(config, directory).run())


@contextlib.contextmanager
def runtime_directory() -> Iterator[Path]:
    """A new private directory whose path is short enough for unix sockets.

    Its lock file is held while the launcher lives; a directory whose lock is
    free was left by a launcher that was killed, and is removed here.
    """
    base = _runtime_base()
    _remove_stale(base)
    directory = Path(tempfile.mkdtemp(prefix="pagewire-", dir=base))
    try:
        # Locked before it has its name: nobody can find it there and unlocked.
        with (directory / "lock.new").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            (directory / "lock.new").rename(directory / "lock")
            yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _runtime_base() -> Path:
    candidates = (os.environ.get("XDG_RUNTIME_DIR"), tempfile.gettempdir(), "/tmp", "/var/tmp")  # noqa: S108
    for candidate in candidates:
        if not candidate or len(os.fsencode(candidate)) + _SOCKET_TAIL > _MAX_SOCKET_PATH:
            continue
        if Path(candidate).is_dir() and os.access(candidate, os.W_OK | os.X_OK):
            return Path(candidate)
    raise ConfigError(
        "no writable directory with a short path for unix sockets; set XDG_RUNTIME_DIR"
    )


def _remove_stale(base: Path) -> None:
    for directory in base.glob("pagewire-*"):
        with contextlib.suppress(OSError):
            info = directory.lstat()
            if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.getuid():
                continue
            with (directory / "lock").open() as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(directory, ignore_errors=True)


class _RoomEnded(Exception):
    def __init__(self, room: str, status: int) -> None:
        super().__init__(room, status)
        self.room = room
        self.status = status


@dataclass
class _Room:
    """One child process, restarted in place."""

    name: str
    module: str
    """The package that runs as it."""
    flags: list[str]
    ready_file: Path
    orphaned: signal.Signals = signal.SIGTERM
    """What it gets when the launcher is killed."""
    process: asyncio.subprocess.Process | None = None
    exited: asyncio.Task[int] | None = field(default=None, repr=False)

    async def start(self) -> None:
        self.ready_file.unlink(missing_ok=True)
        environment = {k: v for k, v in os.environ.items() if not k.upper().startswith(ENV_PREFIX)}
        # -P: a folder named frontend in the user's own directory is not ours.
        # A session of its own: Ctrl-C reaches the launcher only, which stops
        # the frontend first, and the room's own children die with their group.
        self.process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-P",
            "-m",
            self.module,
            *self.flags,
            env=environment,
            stdin=asyncio.subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=functools.partial(die_with_parent, self.orphaned),
        )
        self.exited = asyncio.create_task(self.process.wait())

    @property
    def alive(self) -> bool:
        return self.process is not None and self.process.returncode is None

    def facts(self) -> dict[str, Any] | None:
        return read_ready_file(self.ready_file)

    def served_s(self) -> float:
        """Seconds since it was ready; 0 if it is not."""
        try:
            return time.time() - self.ready_file.stat().st_mtime
        except FileNotFoundError:
            return 0.0

    def signal(self, number: signal.Signals) -> None:
        if self.process is not None and self.alive:
            with contextlib.suppress(ProcessLookupError):
                self.process.send_signal(number)

    def kill_group(self) -> None:
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)

    async def wait(self, patience: float | None = None) -> int | None:
        """The exit status, or None where the room outlives `patience` seconds."""
        if self.exited is None:
            return 0
        try:
            return await asyncio.wait_for(asyncio.shield(self.exited), patience)
        except TimeoutError:
            return None


def die_with_parent(number: signal.Signals) -> None:
    """In the child, before exec: a signal once the launcher is gone, also by SIGKILL."""
    _libc.prctl(_PR_SET_PDEATHSIG, number)


class _Stack:
    def __init__(self, config: ServeConfig, directory: Path) -> None:
        self._config = config
        self._rooms = _rooms(config, directory)
        self._frontend = self._rooms[0]
        self._stop = asyncio.Event()
        self._ready = False
        self._stopping = False

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal)
        try:
            for room in self._rooms:
                await room.start()
            return await self._run_until_end()
        finally:
            for room in self._rooms:
                room.kill_group()
                await room.wait()

    def _on_signal(self) -> None:
        if self._stop.is_set():
            logger.warning("second signal: killing the rooms")
            for room in self._rooms:
                room.kill_group()
        self._stop.set()

    async def _run_until_end(self) -> int:
        stop = asyncio.create_task(self._stop.wait())
        ready = asyncio.create_task(self._announce())
        watches = [asyncio.create_task(self._watch(room)) for room in self._rooms]
        pending: set[asyncio.Task[Any]] = {stop, ready, *watches}
        try:
            while not stop.done():
                done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
            return await self._stop_rooms()
        except _RoomEnded as ended:
            logger.error("%s; stopping the other rooms", _epitaph(ended, ready=self._ready))
            await self._stop_rooms(drain=self._ready)
            return ended.status if ended.status > 0 else 1
        except TimeoutError:
            waiting = ", ".join(room.name for room in self._rooms if room.facts() is None)
            logger.error(
                "not ready after %g s (--start-timeout), still waiting for: %s",
                self._config.start_timeout,
                waiting,
            )
            await self._stop_rooms(drain=False)
            return 1
        finally:
            for task in (stop, ready, *watches):
                task.cancel()
            await asyncio.gather(stop, ready, *watches, return_exceptions=True)

    async def _announce(self) -> None:
        async with asyncio.timeout(self._config.start_timeout):
            # A file has no event to wait for.
            while any(room.facts() is None for room in self._rooms):  # noqa: ASYNC110
                await asyncio.sleep(_POLL_S)
        self._ready = True
        facts = _server_facts(self._rooms)
        write_ready_file(self._config.ready_file, facts)
        if self._config.log_format == "json":
            logger.info("ready", extra=facts)
        else:
            sys.stdout.write(_banner(facts))
            sys.stdout.flush()

    async def _watch(self, room: _Room) -> None:
        """Restarts a room that dies once all have been ready; the frontend, and a
        room that cannot start again as it is configured, end the server."""
        backoff = 0.0
        while True:
            status = await room.wait()
            assert status is not None
            if self._stopping:
                return
            if not self._ready or room is self._frontend or status in _PERMANENT:
                raise _RoomEnded(room.name, status)
            if room.served_s() > _STEADY_S:
                backoff = 0.0
            when = f"in {backoff:g} s" if backoff else "at once"
            logger.error("%s; starting it again %s", _ending(room.name, status), when)
            room.kill_group()
            await asyncio.sleep(backoff)
            backoff = min(max(1.0, backoff * 2), _MAX_BACKOFF_S)
            if self._stopping:
                return
            await room.start()

    async def _stop_rooms(self, *, drain: bool = True) -> int:
        """The frontend first, while there is an engine to finish what runs."""
        self._stopping = True
        clean = True
        drain_s = self._config.drain_grace + self._config.drain_timeout
        patience = drain_s + _STOP_S if drain else _STOP_S
        for rooms, limit in (([self._frontend], patience), (self._rooms[1:], _STOP_S)):
            running = [room for room in rooms if room.alive]
            for room in running:
                room.signal(signal.SIGTERM)
            for room in running:
                status = await room.wait(limit)
                if status is None:
                    logger.error("%s did not stop within %g s: killed", room.name, limit)
                elif status not in _STOPPED:
                    logger.error("while stopping: %s", _ending(room.name, status))
                clean = clean and status in _STOPPED
                room.kill_group()
        return 0 if clean else 1


def _rooms(config: ServeConfig, directory: Path) -> list[_Room]:
    """The frontend first, then tokenizer_svc and the engines."""
    engines = [_ENGINE, *(f"{_ENGINE}.{number}" for number in range(1, config.num_engines))]
    commands = {
        name: f"ipc://{directory}/commands.sock{name.removeprefix(_ENGINE)}" for name in engines
    }
    tokenizer = f"unix:{directory}/tokenizer.sock"
    connected = config.model_copy(
        update={
            "tokenizer_bind": tokenizer,
            "tokenizer_address": tokenizer,
            "engine_address": ",".join(commands.values()),
            "outputs_bind": f"ipc://{directory}/outputs.sock",
        }
    )
    rooms: dict[str, type[RoomConfig]] = {
        _FRONTEND: FrontendConfig,
        _TOKENIZER: TokenizerConfig,
        **dict.fromkeys(engines, EngineConfig),
    }
    cpu_threads = config.cpu_threads
    if cpu_threads is None and config.num_engines > 1:
        cpu_threads = max(1, allowed_cores() // config.num_engines)
    result = []
    for name, cls in rooms.items():
        ready_file = directory / f"{name}.json"
        mine: dict[str, object] = {"ready_file": str(ready_file)}
        if cls is EngineConfig:
            mine |= {"engine_bind": commands[name], "cpu_threads": cpu_threads}
        orphaned = ORPHANED if name == _FRONTEND else signal.SIGTERM
        flags = as_flags(connected.model_copy(update=mine), cls)
        result.append(_Room(name, name.partition(".")[0], flags, ready_file, orphaned))
    return result


def _server_facts(rooms: list[_Room]) -> dict[str, Any]:
    facts: dict[str, Any] = {"pids": {}}
    for room in rooms:
        room_facts = room.facts() or {}
        facts["pids"][room.name] = room_facts.get("pid")
        for key in (GRPC, HTTP, ADMIN) if room.name == _FRONTEND else (MODEL, CHAT_TEMPLATE):
            if key in room_facts:
                facts[key] = room_facts[key]
    return facts


def _banner(facts: dict[str, Any]) -> str:
    address = facts[GRPC]
    option = "" if address == "127.0.0.1:50051" else f" --address {address}"
    command = "chat" if facts[CHAT_TEMPLATE] else 'generate "Once upon a time"'
    return (
        f"\npagewire serves {facts[MODEL]}\n"
        f"  gRPC   {address}\n"
        f"  HTTP   http://{facts[HTTP]}\n"
        f"  admin  {facts[ADMIN]}\n"
        f"Try it: pagewire {command}{option}\n\n"
    )


def _ending(room: str, status: int) -> str:
    if status < 0:
        return f"{room} was killed by {signal.Signals(-status).name}"
    return f"{room} ended with status {status}"


def _epitaph(ended: _RoomEnded, *, ready: bool) -> str:
    why = {2: " (a setting is wrong)", 3: " (the model cannot be loaded)"}.get(ended.status, "")
    when = "" if ready else " before the server was ready"
    return f"{_ending(ended.room, ended.status)}{why}{when}"
