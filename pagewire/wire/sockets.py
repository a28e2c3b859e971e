"""ZeroMQ sockets between a frontend and the engine, with every option chosen.

    frontend DEALER --commands--> ROUTER engine
    frontend PULL  <--outputs---  PUSH engine    (one pair for each frontend)

What the options must see to, because ZeroMQ's defaults do not:

- Nothing waits for ever: every LINGER is bounded, so a process can always end.
- Nothing is dropped unseen. A ROUTER or PUB drops at its high-water mark; here
  neither ever sends. PUSH and DEALER refuse instead (zmq.Again, or the caller
  waits), and who sends decides what that means.
- A command goes to a living engine or stays with the caller (IMMEDIATE), and
  never waits in a socket for the engine's next life.
- An output goes to the frontend it was made for. PUSH does not reconnect: behind
  the same address another frontend may have come up, with the same request ids.

The wire is neither encrypted nor authenticated: ipc, loopback or a private
network only, and require_local() sees to it that the last is meant.
http://api.zeromq.org/4-3:zmq-setsockopt has the options' fine print.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import re
import secrets
import socket as posix
import stat
from typing import Any

import zmq

from pagewire.errors import ConfigError

MAX_MESSAGE_BYTES = 64 * 2**20
"""A peer that announces more loses its connection; 16M token ids fit."""
PUSH_HWM = 128
"""Messages that ZeroMQ holds for a slow frontend before it refuses more. Small,
because a message has no size limit of its own: who sends keeps the rest, by bytes."""

_IPC_PREFIX = "ipc://"
_TCP = re.compile(
    r"tcp://(?P<host>[A-Za-z0-9._-]+|\*|\[(?P<ipv6>[0-9A-Fa-f:.]+)\]):(?P<port>\d{1,5}|\*)"
)
_WILDCARDS = ("*", "0.0.0.0", "[::]")  # noqa: S104


class BindError(OSError):
    """The endpoint cannot be had; names it and says why."""


def bind_commands(context: zmq.Context[Any], endpoint: str) -> Any:
    """The engine's ROUTER. Frames in: [identity, type byte, body].

    Raises ConfigError for an endpoint that can never work, BindError for one
    that is taken.
    """
    router = context.socket(zmq.ROUTER)
    _set_common(router)
    router.setsockopt(zmq.LINGER, 0)  # it never sends
    router.setsockopt(zmq.ROUTER_MANDATORY, 1)  # and if it did, not into the void
    # A frontend keeps its identity over reconnects: the newer connection is the true one.
    router.setsockopt(zmq.ROUTER_HANDOVER, 1)
    router.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
    router.setsockopt(zmq.RCVHWM, 1000)  # then TCP holds the frontend back
    return _bind(router, endpoint)


def connect_commands(context: zmq.Context[Any], endpoint: str) -> Any:
    """A frontend's DEALER; it reconnects by itself for as long as it lives.

    While no engine is connected, send waits, or raises zmq.Again if NOBLOCK.
    Raises ConfigError for a malformed endpoint.
    """
    dealer = context.socket(zmq.DEALER)
    _set_common(dealer)
    # Stable over reconnects, so that the engine still knows whose commands come.
    # The first byte must not be 0: such identities are ZeroMQ's own.
    dealer.setsockopt(zmq.IDENTITY, b"\x01" + secrets.token_bytes(16))
    dealer.setsockopt(zmq.IMMEDIATE, 1)
    dealer.setsockopt(zmq.LINGER, 500)  # the last aborts still go out
    dealer.setsockopt(zmq.SNDHWM, 10_000)
    # The first attempt tells at once whether anybody still listens there.
    dealer.setsockopt(zmq.RECONNECT_IVL, 20)
    dealer.setsockopt(zmq.RECONNECT_IVL_MAX, 500)
    # A host that vanished sends no RST; TCP alone would retransmit for 15 minutes.
    dealer.setsockopt(zmq.HEARTBEAT_IVL, 2000)
    dealer.setsockopt(zmq.HEARTBEAT_TIMEOUT, 10_000)
    return connect(dealer, endpoint)


def bind_outputs(context: zmq.Context[Any], endpoint: str) -> Any:
    """A frontend's PULL. Frames in: [type byte, body].

    Raises ConfigError for an endpoint that can never work, BindError for one
    that is taken.
    """
    pull = context.socket(zmq.PULL)
    _set_common(pull)
    pull.setsockopt(zmq.LINGER, 0)
    pull.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
    pull.setsockopt(zmq.RCVHWM, 1000)
    return _bind(pull, endpoint)


def connect_outputs(context: zmq.Context[Any], endpoint: str) -> Any:
    """The engine's PUSH to one frontend, for one connection.

    Send with NOBLOCK: zmq.Again means that the frontend does not read, or that
    the connection is over (watch the socket's monitor to tell them apart).
    Raises ConfigError for a malformed endpoint.
    """
    return connect(make_outputs(context), endpoint)


def make_outputs(context: zmq.Context[Any]) -> Any:
    """The PUSH of connect_outputs before it connects, to attach a monitor that
    misses nothing."""
    push = context.socket(zmq.PUSH)
    _set_common(push)
    push.setsockopt(zmq.LINGER, 0)  # raised by the engine for its last words
    push.setsockopt(zmq.IMMEDIATE, 0)  # Ready may wait for the connection it opens
    push.setsockopt(zmq.RECONNECT_IVL, -1)
    push.setsockopt(zmq.CONNECT_TIMEOUT, 5000)
    push.setsockopt(zmq.SNDHWM, PUSH_HWM)
    return push


def bound_endpoint(socket: Any) -> str:
    """Where a bound socket really listens: with the port that 0 or * became."""
    last: bytes = socket.getsockopt(zmq.LAST_ENDPOINT)
    return last.rstrip(b"\0").decode()


def close_bound(socket: Any) -> None:
    """Closes a bound socket at once, and removes its socket file, which ZeroMQ leaves."""
    endpoint = bound_endpoint(socket)
    path = check_endpoint(endpoint, bind=True)
    if path is not None:
        # While it still listens, so that the file cannot be a successor's.
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
    socket.close(0)


def _set_common(socket: Any) -> None:
    # Keeps NAT and firewall entries alive, and ends what the other side forgot.
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
    socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, 30)
    socket.setsockopt(zmq.TCP_KEEPALIVE_INTVL, 10)
    socket.setsockopt(zmq.TCP_KEEPALIVE_CNT, 3)


def _set_family(socket: Any, endpoint: str) -> None:
    """IPv6 only for an address of it: one name must not mean two addresses, of which one is
    bound."""
    match = _TCP.fullmatch(endpoint)
    socket.setsockopt(zmq.IPV6, int(match is not None and match["ipv6"] is not None))


def _bind(socket: Any, endpoint: str) -> Any:
    try:
        path = check_endpoint(endpoint, bind=True)
        if path is not None:
            _remove_stale(endpoint, path)
        _set_family(socket, endpoint)
        socket.bind(endpoint)
    except zmq.ZMQError as error:
        socket.close(0)
        if error.errno in (errno.EADDRINUSE, errno.EACCES, errno.EPERM):
            raise BindError(f"cannot bind {endpoint}: {error.strerror}") from None
        raise ConfigError(f"cannot bind {endpoint}: {error.strerror}") from None
    except BaseException:
        socket.close(0)
        raise
    return socket


def connect(socket: Any, endpoint: str) -> Any:
    """Connects the socket and returns it. Closes it and raises ConfigError if
    the endpoint is malformed."""
    try:
        check_endpoint(endpoint, bind=False)
        _set_family(socket, endpoint)
        socket.connect(endpoint)
    except zmq.ZMQError as error:
        socket.close(0)
        raise ConfigError(f"cannot connect to {endpoint}: {error.strerror}") from None
    except BaseException:
        socket.close(0)
        raise
    return socket


def is_wildcard(endpoint: str) -> bool:
    """Whether it is bound on every address, so that nobody can connect to it as it stands."""
    match = _TCP.fullmatch(endpoint)
    return match is not None and match["host"] in _WILDCARDS


def check_endpoint(endpoint: str, *, bind: bool) -> str | None:
    """The file path of an ipc endpoint that has one, else None.

    Raises ConfigError unless it is ipc://PATH or tcp://HOST:PORT, where HOST is a name, an
    IPv4 address or an IPv6 address in brackets. Port 0 and wildcards are for binding only.
    """
    if endpoint.startswith(_IPC_PREFIX):
        return _check_ipc(endpoint, bind=bind)
    match = _TCP.fullmatch(endpoint)
    if match is None:
        raise ConfigError(f"endpoint {endpoint!r}: expected ipc://PATH or tcp://HOST:PORT")
    host, port = match["host"], match["port"]
    if match["ipv6"] is not None:
        try:
            ipaddress.IPv6Address(match["ipv6"])
        except ValueError as error:
            raise ConfigError(f"endpoint {endpoint!r}: {error}") from None
    if port != "*" and int(port) > 65535:
        raise ConfigError(f"endpoint {endpoint!r}: the port is above 65535")
    if not bind and (host in _WILDCARDS or port in ("*", "0")):
        raise ConfigError(f"endpoint {endpoint!r}: an address to connect to has no wildcards")
    return None


def require_local(endpoint: str, setting: str, *, allow_remote: bool) -> None:
    """Raises ConfigError for an endpoint to bind that other hosts might reach, unless allowed."""
    match = _TCP.fullmatch(endpoint)
    if allow_remote or match is None:
        return
    host = match["host"]
    with contextlib.suppress(ValueError):
        if ipaddress.ip_address(match["ipv6"] or host).is_loopback:
            return
    if host != "localhost":
        raise ConfigError(
            f"{setting} {endpoint}: other hosts might reach it, and the engine wire is neither "
            "encrypted nor authenticated; where the network is private, --allow-remote-engine "
            "permits it"
        )


def _check_ipc(endpoint: str, *, bind: bool) -> str | None:
    path = endpoint.removeprefix(_IPC_PREFIX)
    if not path or (path == "*" and not bind) or "\0" in path:
        raise ConfigError(f"endpoint {endpoint!r}: no usable path after {_IPC_PREFIX}")
    length = len(os.fsencode(path))
    if length > zmq.IPC_PATH_MAX_LEN:
        raise ConfigError(
            f"endpoint {endpoint!r}: the path has {length} bytes, this system's limit for a "
            f"socket is {zmq.IPC_PATH_MAX_LEN}; use a shorter directory or tcp://"
        )
    # @name is Linux's abstract namespace; * is a path that ZeroMQ makes up.
    return None if path == "*" or path.startswith("@") else path


def _remove_stale(endpoint: str, path: str) -> None:
    """Removes the socket file of a process that is gone.

    ZeroMQ unlinks whatever is at the path when it binds, so a second engine
    would silently take the address of a living one.
    """
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        directory = os.path.dirname(path) or "."
        if not os.path.isdir(directory):
            raise ConfigError(f"cannot bind {endpoint}: no directory {directory}") from None
        return
    except OSError as error:
        raise ConfigError(f"cannot bind {endpoint}: {error.strerror}") from None
    if not stat.S_ISSOCK(mode):
        raise ConfigError(f"cannot bind {endpoint}: the path exists and is no socket")
    with posix.socket(posix.AF_UNIX, posix.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(path)
        except (ConnectionRefusedError, FileNotFoundError):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
            return
        except OSError:
            pass  # a full backlog is somebody, too
    raise BindError(f"cannot bind {endpoint}: another process listens there")
