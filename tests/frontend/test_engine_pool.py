"""Where the engines are: the setting, and names whose addresses change."""

from __future__ import annotations

import asyncio
import socket
import time
from typing import TYPE_CHECKING, Any

import pytest

from frontend.engine_addresses import EngineAddresses, outputs_endpoint
from frontend.engine_pool import EnginePool
from pagewire.config import FrontendConfig
from pagewire.errors import ConfigError
from pagewire.wire.sockets import check_endpoint

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from frontend.engine_link import EngineLink


class Names:
    """A name server with an answer that a test changes."""

    def __init__(self) -> None:
        self.hosts: list[str] | None = []
        self.asked: list[tuple[str, int]] = []

    async def __call__(self, host: str, port: int) -> list[str]:
        self.asked.append((host, port))
        if self.hosts is None:
            raise socket.gaierror(socket.EAI_AGAIN, "try again")
        return self.hosts


class Events:
    """Hears of no engine: none is there."""

    def __init__(self) -> None:
        self.gone: list[EngineLink] = []

    def engine_gone(self, link: EngineLink, reason: str) -> None:
        self.gone.append(link)


def test_a_list() -> None:
    addresses = EngineAddresses("tcp://a:1, ipc:///tmp/b ,tcp://c:2")
    assert addresses.fixed == ["tcp://a:1", "ipc:///tmp/b", "tcp://c:2"]
    assert addresses.names == []


@pytest.mark.parametrize(
    "setting",
    [
        *(
            "",
            "tcp://a:1,",
            "tcp://a",
            "udp://a:1",
            "dns+ipc:///tmp/b",
            "dns+tcp://:1",
            "tcp://a:0",
        ),
        "dns+tcp://[::1]:1",
    ],
)
def test_what_is_no_address(setting: str) -> None:
    with pytest.raises(ConfigError, match="endpoint"):
        EngineAddresses(setting)


def test_the_same_twice() -> None:
    with pytest.raises(ConfigError, match="twice"):
        EngineAddresses("tcp://a:1,tcp://a:1")


async def test_a_name_and_its_addresses() -> None:
    names = Names()
    addresses = EngineAddresses("tcp://a:1,dns+tcp://engines:5557", names)
    assert await addresses.lookup() == ["tcp://a:1"]
    names.hosts = ["10.0.0.1", "10.0.0.2"]
    both = ["tcp://a:1", "tcp://10.0.0.1:5557", "tcp://10.0.0.2:5557"]
    assert await addresses.lookup() == both
    assert names.asked[-1] == ("engines", 5557)
    names.hosts = None
    assert await addresses.lookup() == both, "a server that does not answer takes no engine away"
    names.hosts = []
    assert await addresses.lookup() == both
    names.hosts = ["10.0.0.2"]
    assert await addresses.lookup() == ["tcp://a:1", "tcp://10.0.0.2:5557"]


async def test_a_real_name() -> None:
    addresses = EngineAddresses("dns+tcp://localhost:5557")
    assert await addresses.lookup() == ["tcp://127.0.0.1:5557"]


async def test_a_name_without_ipv4_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    ipv4 = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("10.0.0.1", 1))]
    ipv6 = [
        (socket.AF_INET6, socket.SOCK_STREAM, 6, "", (address, 1, 0, 0))
        for address in ("fd00::2", "fd00::1", "fe80::1%eth0")
    ]
    answers = [ipv4 + ipv6, ipv6]

    async def getaddrinfo(*_: object, **__: object) -> Any:
        return answers.pop(0)

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", getaddrinfo)
    addresses = EngineAddresses("dns+tcp://engines:1")
    # An engine that has both is one engine.
    assert await addresses.lookup() == ["tcp://10.0.0.1:1"]
    found = await addresses.lookup()
    assert found == ["tcp://[fd00::1]:1", "tcp://[fd00::2]:1"]
    for endpoint in found:
        check_endpoint(endpoint, bind=False)


def test_where_outputs_come() -> None:
    assert outputs_endpoint("tcp://127.0.0.1:5558", 0) == "tcp://127.0.0.1:5558"
    assert outputs_endpoint("tcp://127.0.0.1:5558", 2) == "tcp://127.0.0.1:5560"
    assert outputs_endpoint("tcp://[::1]:5558", 2) == "tcp://[::1]:5560"
    assert outputs_endpoint("tcp://127.0.0.1:0", 2) == "tcp://127.0.0.1:0"
    assert outputs_endpoint("tcp://127.0.0.1:*", 2) == "tcp://127.0.0.1:*"
    assert outputs_endpoint("ipc:///run/outputs", 2) == "ipc:///run/outputs.2"
    with pytest.raises(ConfigError, match="no port"):
        outputs_endpoint("tcp://127.0.0.1:65535", 1)


@pytest.fixture
async def pool() -> AsyncIterator[Any]:
    names = Names()
    config = FrontendConfig(
        engine_address="tcp://127.0.0.1:1,tcp://127.0.0.9:1,dns+tcp://engines:1",
        outputs_bind="tcp://127.0.0.1:0",
    )
    pool = EnginePool(config, Events(), clock=time.monotonic, resolve=names)  # type: ignore[arg-type]
    for link in pool.links:
        await link.client.start()
    yield pool, names
    await pool.close()


async def test_engines_come_and_go_with_their_name(pool: tuple[EnginePool, Names]) -> None:
    engines, names = pool
    fixed = engines.links[0]
    names.hosts = ["127.0.0.2", "127.0.0.3"]
    await engines.update()
    assert [(link.address, link.slot) for link in engines.links] == [
        ("tcp://127.0.0.1:1", 0),
        ("tcp://127.0.0.9:1", 1),
        ("tcp://127.0.0.2:1", 2),
        ("tcp://127.0.0.3:1", 3),
    ]
    names.hosts = ["127.0.0.3", "127.0.0.4"]
    await engines.update()
    assert [(link.address, link.slot) for link in engines.links] == [
        ("tcp://127.0.0.1:1", 0),
        ("tcp://127.0.0.9:1", 1),
        ("tcp://127.0.0.3:1", 3),
        ("tcp://127.0.0.4:1", 2),
    ]
    assert engines.links[0] is fixed


async def test_a_busy_engine_is_left_when_it_is_empty(pool: tuple[EnginePool, Names]) -> None:
    engines, names = pool
    names.hosts = ["127.0.0.2"]
    await engines.update()
    link = engines.links[2]
    link.client.ready = object()  # type: ignore[assignment]
    link.live[1] = object()  # type: ignore[assignment]
    assert link.usable
    names.hosts = ["127.0.0.3"]
    await engines.update()
    assert link in engines.links
    assert not link.usable
    names.hosts = ["127.0.0.2", "127.0.0.3"]
    await engines.update()
    assert link.usable, "it is in the list again"
    names.hosts = ["127.0.0.3"]
    link.live.clear()
    await engines.update()
    assert link not in engines.links
