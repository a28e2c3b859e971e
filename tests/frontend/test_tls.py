"""TLS and mTLS on every port, and new certificates without a restart."""

from __future__ import annotations

import asyncio
import shutil
import ssl
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from frontend.tls import Tls, TlsFiles, tls_of
from pagewire.config import FrontendConfig
from pagewire.errors import ConfigError
from tests.frontend.certificates import Pair, make_ca, make_certificate

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.frontend.conftest import Stack


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Pair]:
    directory = tmp_path_factory.mktemp("certificates")
    ca, other = make_ca(directory, "ca"), make_ca(directory, "other")
    return {
        "ca": ca,
        "other": other,
        "first": make_certificate(directory, "first", ca),
        "second": make_certificate(directory, "second", other),
        "client": make_certificate(directory, "client", ca),
        "stranger": make_certificate(directory, "stranger", other),
    }


async def grpc_answers(address: str, ca: Pair, client: Pair | None = None) -> bool:
    credentials = grpc.ssl_channel_credentials(
        ca.cert.read_bytes(),
        None if client is None else client.key.read_bytes(),
        None if client is None else client.cert.read_bytes(),
    )
    # A new connection each time: gRPC would share one between equal channels.
    options = [("grpc.use_local_subchannel_pool", 1)]
    async with grpc.aio.secure_channel(address, credentials, options) as channel:
        try:
            await health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(), timeout=60
            )
        except grpc.aio.AioRpcError as error:
            assert error.code() is grpc.StatusCode.UNAVAILABLE, error
            return False
    return True


async def http_answers(address: str, ca: Pair, client: Pair | None = None) -> bool:
    context = ssl.create_default_context(cafile=str(ca.cert))
    if client is not None:
        context.load_cert_chain(client.cert, client.key)
    host, _, port = address.rpartition(":")
    try:
        reader, writer = await asyncio.open_connection(host, int(port), ssl=context)
        writer.write(b"GET /healthz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        answer = await reader.read()
    except (ssl.SSLError, ConnectionError):
        return False
    writer.close()
    await asyncio.gather(writer.wait_closed(), return_exceptions=True)
    # TLS 1.3: a refused client certificate may show as an end after the handshake.
    return answer.startswith(b"HTTP/1.1 200")


async def answers(stack: Stack, ca: Pair, client: Pair | None = None) -> list[bool]:
    frontend = stack.frontend
    return [
        await grpc_answers(frontend.address, ca, client),
        await grpc_answers(frontend.admin_address, ca, client),
        await http_answers(frontend.http_address, ca, client),
    ]


def installed(directory: Path, pair: Pair) -> Pair:
    """A copy that can be written over."""
    copy = Pair(directory / "server.pem", directory / "server.key")
    shutil.copyfile(pair.cert, copy.cert)
    shutil.copyfile(pair.key, copy.key)
    return copy


async def test_every_port_speaks_tls_and_takes_new_certificates(
    make_stack: Callable[..., Any], made: dict[str, Pair], tmp_path: Path
) -> None:
    server = installed(tmp_path, made["first"])
    config = {"tls_cert": str(server.cert), "tls_key": str(server.key)}
    stack = await make_stack(config=config, serving=False)
    await stack.until(lambda: stack.frontend.health.serving)
    assert await answers(stack, made["ca"]) == [True] * 3
    assert await answers(stack, made["other"]) == [False] * 3
    installed(tmp_path, made["second"])
    assert stack.frontend._tls.watched.look()
    assert await answers(stack, made["ca"]) == [False] * 3
    assert await answers(stack, made["other"]) == [True] * 3


async def test_clients_must_show_a_certificate_where_a_ca_is_set(
    make_stack: Callable[..., Any], made: dict[str, Pair], tmp_path: Path
) -> None:
    server = installed(tmp_path, made["first"])
    client_ca = tmp_path / "clients.pem"
    shutil.copyfile(made["ca"].cert, client_ca)
    config = {
        "tls_cert": str(server.cert),
        "tls_key": str(server.key),
        "tls_client_ca": str(client_ca),
    }
    stack = await make_stack(config=config, serving=False)
    await stack.until(lambda: stack.frontend.health.serving)
    ca = made["ca"]
    assert await answers(stack, ca) == [False] * 3
    assert await answers(stack, ca, made["stranger"]) == [False] * 3
    assert await answers(stack, ca, made["client"]) == [True] * 3
    shutil.copyfile(made["other"].cert, client_ca)
    assert stack.frontend._tls.watched.look()
    assert await answers(stack, ca, made["stranger"]) == [True] * 3
    assert await answers(stack, ca, made["client"]) == [False] * 3


def test_a_bad_new_file_leaves_the_old_one_in_force(
    made: dict[str, Pair], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server = installed(tmp_path, made["first"])
    tls = Tls(TlsFiles(str(server.cert), str(server.key), None))
    before = tls.watched.content
    shutil.copyfile(made["second"].cert, server.cert)
    assert not tls.watched.look()
    assert tls.watched.content is before
    assert "KEY_VALUES_MISMATCH" in caplog.text
    assert not tls.watched.look()
    assert len(caplog.records) == 1
    shutil.copyfile(made["second"].key, server.key)
    assert tls.watched.look()
    assert tls.watched.content.cert == made["second"].cert.read_bytes()


def test_bad_files_are_settings_that_are_wrong(made: dict[str, Pair], tmp_path: Path) -> None:
    cert, key = made["first"].cert, made["first"].key
    empty = tmp_path / "empty.pem"
    empty.write_text("")
    for files, said in (
        (TlsFiles(str(tmp_path / "none.pem"), str(key), None), "none.pem: No such file"),
        (TlsFiles(str(cert), str(made["second"].key), None), "are not a PEM certificate and its"),
        (TlsFiles(str(empty), str(key), None), "are not a PEM certificate and its key"),
        (TlsFiles(str(cert), str(key), str(empty)), "has no PEM certificate"),
    ):
        with pytest.raises(ConfigError, match=said):
            Tls(files)
    for config in ({"tls_cert": "a"}, {"tls_key": "a"}, {"tls_client_ca": "a"}):
        with pytest.raises(ConfigError, match="together"):
            tls_of(FrontendConfig(**config))
