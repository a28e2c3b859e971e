"""Where the engines are: what --engine-address says, and what its names resolve to.

The setting is a list of endpoints with commas between them. `dns+tcp://NAME:PORT` in
it stands for every IPv4 address that the name has, or every IPv6 address if it has no
other, looked up again and again. Not for both: an engine of two addresses would be two.
"""

from __future__ import annotations

import asyncio
import logging
import re
import socket
from typing import TYPE_CHECKING

from pagewire.errors import ConfigError
from pagewire.wire.sockets import check_endpoint

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    Resolve = Callable[[str, int], Awaitable[list[str]]]

logger = logging.getLogger(__name__)

_DNS = "dns+"
_PORT = re.compile(r"(tcp://.*:)(\d+)")


class EngineAddresses:
    """Raises ConfigError for a setting that can never work."""

    def __init__(self, setting: str, resolve: Resolve | None = None) -> None:
        self._resolve = resolve or _resolve
        self.fixed: list[str] = []
        """Endpoints that are known from the start."""
        self.names: list[tuple[str, int]] = []
        """(host, port) of those to be looked up."""
        self._answers: dict[tuple[str, int], list[str]] = {}
        for part in (part.strip() for part in setting.split(",")):
            check_endpoint(part.removeprefix(_DNS), bind=False)
            if part in self.fixed:
                raise ConfigError(f"engine_address names {part} twice")
            if not part.startswith(_DNS):
                self.fixed.append(part)
                continue
            host, _, port = part.removeprefix(f"{_DNS}tcp://").rpartition(":")
            if not host or host.startswith("[") or not port.isdigit():
                raise ConfigError(f"endpoint {part!r}: expected dns+tcp://NAME:PORT")
            self.names.append((host, int(port)))

    async def lookup(self) -> list[str]:
        """All endpoints there are now. A name that cannot be resolved, or has no address
        at the moment, keeps those it had."""
        for name in self.names:
            try:
                hosts = await self._resolve(*name)
            except OSError as error:
                logger.warning("cannot resolve %s: %s", name[0], error)
                continue
            if hosts:
                self._answers[name] = [f"tcp://{host}:{name[1]}" for host in hosts]
        found = [endpoint for name in self.names for endpoint in self._answers.get(name, ())]
        return list(dict.fromkeys((*self.fixed, *found)))


def outputs_endpoint(endpoint: str, slot: int) -> str:
    """Where the outputs of the engine in that slot are received: of the first at
    `endpoint` itself, of the others at the next ports or at paths with a number.

    Raises ConfigError where there is no such port.
    """
    if slot == 0:
        return endpoint
    match = _PORT.fullmatch(endpoint)
    if match is None:  # a path, or a port to be chosen
        return f"{endpoint}.{slot}" if endpoint.startswith("ipc://") else endpoint
    port = int(match[2])
    if port and port + slot > 65535:
        raise ConfigError(f"{endpoint!r}: no port is left for the outputs of engine {slot}")
    return f"{match[1]}{port + slot if port else 0}"


async def _resolve(host: str, port: int) -> list[str]:
    """As endpoints spell them."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    ipv4 = {str(address[0]) for family, *_, address in found if family == socket.AF_INET}
    ipv6 = {f"[{address[0]}]" for family, *_, address in found if family == socket.AF_INET6}
    # What needs a scope, fe80::1%eth0 say, is of one host's own network cards.
    return sorted(ipv4 or {address for address in ipv6 if "%" not in address})
