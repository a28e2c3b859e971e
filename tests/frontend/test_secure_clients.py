"""Our own clients at a door with keys and mTLS: the library, the commands, the probe."""

from __future__ import annotations

import asyncio
import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from pagewire.api_keys import new_key
from pagewire.bench.grpc_target import GrpcTarget
from pagewire.bench.load import RequestFailed
from pagewire.cli import main
from pagewire.client import Ask, CallFailed, Client
from pagewire.connection import Connection
from pagewire.errors import ConfigError
from pagewire.obs import probe
from tests.frontend.certificates import make_ca, make_certificate

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


@pytest.fixture
async def door(
    make_stack: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Connection:
    """All that it takes to be let in."""
    monkeypatch.delenv("PAGEWIRE_API_KEY", raising=False)
    ca = make_ca(tmp_path, "ca")
    server, client = (make_certificate(tmp_path, name, ca) for name in ("server", "client"))
    key, entry = new_key("app", "acme")
    (tmp_path / "keys").write_text(entry.line())
    config = {
        "tls_cert": str(server.cert),
        "tls_key": str(server.key),
        "tls_client_ca": str(ca.cert),
        "api_keys": str(tmp_path / "keys"),
        "resume_ttl": 5.0,
    }
    stack = await make_stack(step_s=0.002, config=config, serving=False)
    await stack.until(lambda: stack.frontend.health.serving)
    return Connection(
        stack.frontend.address,
        ca=str(ca.cert),
        cert=str(client.cert),
        key=str(client.key),
        api_key=key,
    )


def flags(door: Connection) -> list[str]:
    return [f"--tls-ca={door.ca}", f"--tls-cert={door.cert}", f"--tls-key={door.key}"]


async def test_the_library(door: Connection) -> None:
    def use(connection: Connection) -> list[str]:
        ask = Ask(prompt="a", sampling={"max_tokens": 3})
        with Client(connection, retry=None) as client:
            return [
                client.models(5)[0]["name"],
                client.generate(ask, 5)["outputs"][0]["text"],
                "".join(client.stream(ask, 5)),
                "".join(client.resumable_stream(ask, 5)),
            ]

    name, *texts = await asyncio.to_thread(use, door)
    assert name == "fake"
    assert len(set(texts)) == 1
    with pytest.raises(CallFailed) as refused:
        await asyncio.to_thread(use, replace(door, api_key=None))
    assert refused.value.code == "UNAUTHENTICATED"
    with pytest.raises(CallFailed) as closed:
        await asyncio.to_thread(use, replace(door, cert=None, key=None))
    assert (closed.value.code, closed.value.reached) == ("UNAVAILABLE", False)
    assert door.api_key is not None
    assert door.api_key not in repr(door)


async def test_the_commands_and_the_probe(
    door: Connection, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    ask = ["generate", "a", "--max-tokens=3", f"--address={door.address}", *flags(door)]
    assert await asyncio.to_thread(main, ask) == 1
    assert "an API key is needed" in capfd.readouterr().err
    assert await asyncio.to_thread(main, [*ask, f"--api-key={door.api_key}"]) == 0
    assert door.api_key is not None
    monkeypatch.setenv("PAGEWIRE_API_KEY", door.api_key)
    assert await asyncio.to_thread(main, ask) == 0
    out, err = capfd.readouterr()
    assert len(out.split("\n")[0]) > 0
    assert err == ""
    grpc = ["grpc", door.address]
    assert await asyncio.to_thread(probe.main, [*grpc, "--tls-ca", str(door.ca)]) == 1
    files = [part for flag in flags(door) for part in flag.split("=")]
    assert await asyncio.to_thread(probe.main, [*grpc, *files]) == 0
    assert probe.main([*grpc, "--tls-caa", "x"]) == 2


async def test_the_benchmark(door: Connection) -> None:
    options: Any = {"model": None, "sampling": {}, "timeout": 5.0}
    async with GrpcTarget(door, **options) as target:
        assert await target.vocab_size() > 0
    async with GrpcTarget(replace(door, api_key="pw-wrong"), **options) as target:
        with pytest.raises(RequestFailed, match="not known"):
            await target.vocab_size()


def test_files_that_are_none_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    empty = tmp_path / "empty"
    empty.write_text("")
    for flag, said in (
        (f"--tls-ca={tmp_path}/none", "--tls-ca .*none: No such file"),
        (f"--tls-ca={empty}", "--tls-ca .*empty: not a PEM file"),
        (f"--tls-cert={empty}", "--tls-cert and --tls-key are only of use together"),
    ):
        assert main(["models", flag]) == 2
        assert re.search(said, capsys.readouterr().err)
    with pytest.raises(ConfigError, match="not a PEM file"):
        Connection(cert=str(empty), key=str(empty)).channel()
