"""Endpoints are checked, stale files go, and the options do what they are for."""

from __future__ import annotations

import contextlib
import os
import socket as posix
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import zmq

from pagewire.errors import ConfigError
from pagewire.wire import sockets
from pagewire.wire.sockets import (
    BindError,
    bind_commands,
    bind_outputs,
    bound_endpoint,
    close_bound,
    connect,
    connect_commands,
    connect_outputs,
    make_outputs,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

WAIT_MS = 10_000


@pytest.fixture
def context() -> Iterator[zmq.Context[Any]]:
    kept = []

    class KeepingContext(zmq.Context[Any]):
        """Holds its sockets to the end of the test: pyzmq warns of lost ones."""

        def socket(self, *args: Any, **kwargs: Any) -> Any:
            kept.append(super().socket(*args, **kwargs))
            return kept[-1]

    context = KeepingContext()
    yield context
    context.destroy(linger=0)


@pytest.fixture
def ipc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    # pytest's own directories may be too deep for a socket.
    monkeypatch.chdir(tmp_path)
    return "ipc://wire.sock"


def has_ipv6() -> bool:
    try:
        with posix.create_server(("::1", 0), family=posix.AF_INET6):
            return True
    except OSError:
        return False


@pytest.mark.parametrize(
    "kind",
    [
        *("tcp://127.0.0.1", "ipc"),
        pytest.param(
            "tcp://[::1]",
            marks=pytest.mark.skipif(not has_ipv6(), reason="this host has no IPv6 loopback"),
        ),
    ],
)
def test_commands_and_outputs_pass(context: zmq.Context[Any], kind: str, ipc: str) -> None:
    router = bind_commands(context, ipc if kind == "ipc" else f"{kind}:0")
    dealer = connect_commands(context, bound_endpoint(router))
    dealer.send_multipart([b"a", b"b"])
    assert router.poll(WAIT_MS)
    identity, *frames = router.recv_multipart()
    assert (len(identity), frames) == (17, [b"a", b"b"])
    pull = bind_outputs(context, "ipc://outputs.sock" if kind == "ipc" else f"{kind}:*")
    push = connect_outputs(context, bound_endpoint(pull))
    push.send_multipart([b"c", b"d"], zmq.NOBLOCK)
    assert pull.poll(WAIT_MS)
    assert pull.recv_multipart() == [b"c", b"d"]


@pytest.mark.parametrize(
    "endpoint",
    [
        "127.0.0.1:5557",
        "http://127.0.0.1:5557",
        "inproc://x",
        "tcp://127.0.0.1",
        "tcp://127.0.0.1:x",
        "tcp://127.0.0.1:65536",
        "tcp://::1:5557",
        "tcp://[::1:5557",
        "tcp://[1:2]:5557",
        "tcp://eth0;127.0.0.1:5557",
        "ipc://",
        "",
    ],
)
def test_a_malformed_endpoint_is_a_config_error(context: zmq.Context[Any], endpoint: str) -> None:
    for make in (bind_commands, connect_commands, bind_outputs, connect_outputs):
        with pytest.raises(ConfigError):
            make(context, endpoint)


@pytest.mark.parametrize(
    "endpoint", ["tcp://*:5557", "tcp://0.0.0.0:5557", "tcp://[::]:5557", "tcp://h:0", "ipc://*"]
)
def test_one_cannot_connect_to_a_wildcard(context: zmq.Context[Any], endpoint: str) -> None:
    with pytest.raises(ConfigError):
        connect_outputs(context, endpoint)


def test_an_address_of_another_host_is_a_config_error(context: zmq.Context[Any]) -> None:
    # TEST-NET-1 of RFC 5737: nobody's own.
    with pytest.raises(ConfigError, match=r"cannot bind tcp://192\.0\.2\.1:0"):
        bind_commands(context, "tcp://192.0.2.1:0")


@pytest.mark.parametrize("letter", ["x", "ä"])
def test_a_path_beyond_the_limit_says_so(context: zmq.Context[Any], letter: str) -> None:
    # sgl-project/sglang-omni#768: the limit is on bytes.
    path = "/" + letter * (108 // len(letter.encode()))
    for make in (bind_commands, connect_commands):
        with pytest.raises(ConfigError, match=r"the path has 109 bytes|the limit|107"):
            make(context, f"ipc://{path}")


def test_the_longest_path_works(context: zmq.Context[Any], tmp_path: Path) -> None:
    directory = os.open(tmp_path, os.O_RDONLY)
    try:
        prefix = f"/proc/self/fd/{directory}/"
        router = bind_commands(context, "ipc://" + prefix + "x" * (107 - len(prefix)))
        dealer = connect_commands(context, bound_endpoint(router))
        dealer.send(b"a")
        assert router.poll(WAIT_MS)
    finally:
        os.close(directory)


def test_a_stale_socket_file_is_replaced(context: zmq.Context[Any], ipc: str) -> None:
    # vllm-project/vllm#7222: what a killed process left behind stopped the restart.
    with posix.socket(posix.AF_UNIX) as dead:
        dead.bind("wire.sock")
        dead.listen()
    assert Path("wire.sock").is_socket()
    router = bind_commands(context, ipc)
    connect_commands(context, ipc).send(b"a")
    assert router.poll(WAIT_MS)


def test_a_living_server_keeps_its_address(context: zmq.Context[Any], ipc: str) -> None:
    router = bind_commands(context, ipc)
    with pytest.raises(BindError, match=r"cannot bind ipc://wire\.sock: another process"):
        bind_commands(context, ipc)
    connect_commands(context, ipc).send(b"a")
    assert router.poll(WAIT_MS)


def test_a_taken_port_is_a_bind_error(context: zmq.Context[Any]) -> None:
    endpoint = bound_endpoint(bind_commands(context, "tcp://127.0.0.1:0"))
    with pytest.raises(BindError, match=f"^cannot bind {endpoint}: "):
        bind_outputs(context, endpoint)


def test_a_file_that_is_no_socket_is_left_alone(context: zmq.Context[Any], ipc: str) -> None:
    Path("wire.sock").write_text("precious")
    with pytest.raises(ConfigError, match="is no socket"):
        bind_commands(context, ipc)
    assert Path("wire.sock").read_text() == "precious"


def test_a_missing_directory_is_named(context: zmq.Context[Any], ipc: str) -> None:
    with pytest.raises(ConfigError, match="no directory nowhere"):
        bind_commands(context, "ipc://nowhere/wire.sock")


def test_closing_removes_the_socket_file(context: zmq.Context[Any], ipc: str) -> None:
    close_bound(bind_commands(context, ipc))
    assert not Path("wire.sock").exists()
    close_bound(bind_commands(context, "tcp://127.0.0.1:0"))


def test_push_refuses_what_nobody_reads(context: zmq.Context[Any]) -> None:
    pull = bind_outputs(context, "tcp://127.0.0.1:0")
    push = connect_outputs(context, bound_endpoint(pull))
    num_sent = 0
    with pytest.raises(zmq.Again):
        # Far more than both high-water marks and the kernel's buffers hold.
        for number in range(1_000_000):
            push.send(number.to_bytes(4, "little") * 1024, zmq.NOBLOCK)
            num_sent += 1
    assert num_sent >= sockets.PUSH_HWM
    # What it took it delivers.
    for number in range(num_sent):
        assert pull.poll(WAIT_MS)
        assert pull.recv()[:4] == number.to_bytes(4, "little")


def test_push_does_not_follow_its_address_to_another_frontend(
    context: zmq.Context[Any], ipc: str
) -> None:
    pull = bind_outputs(context, ipc)
    push = make_outputs(context)
    monitor = push.get_monitor_socket(zmq.EVENT_DISCONNECTED)
    connect(push, ipc)
    push.send(b"for the first", zmq.NOBLOCK)
    assert pull.poll(WAIT_MS)
    close_bound(pull)
    assert monitor.poll(WAIT_MS)
    successor = bind_outputs(context, ipc)
    with contextlib.suppress(zmq.Again):
        push.send(b"for the first", zmq.NOBLOCK)
    assert not successor.poll(500), "it reconnected"
    connect_outputs(context, ipc).send(b"for the second", zmq.NOBLOCK)
    assert successor.poll(WAIT_MS)
    assert successor.recv() == b"for the second"
    push.disable_monitor()


def test_a_command_without_an_engine_stays_with_the_caller(
    context: zmq.Context[Any], ipc: str
) -> None:
    dealer = connect_commands(context, ipc)
    with pytest.raises(zmq.Again):
        dealer.send(b"a", zmq.NOBLOCK)
    router = bind_commands(context, ipc)
    assert dealer.poll(WAIT_MS, zmq.POLLOUT), "it did not reconnect"
    dealer.send(b"b", zmq.NOBLOCK)
    assert router.poll(WAIT_MS)
    assert router.recv_multipart()[1:] == [b"b"]


def test_a_frontend_is_recognized_after_a_reconnect(context: zmq.Context[Any], ipc: str) -> None:
    router = bind_commands(context, ipc)
    dealer = connect_commands(context, ipc)
    dealer.send(b"a")
    assert router.poll(WAIT_MS)
    identity, _ = router.recv_multipart()
    monitor = dealer.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
    close_bound(router)
    router = bind_commands(context, ipc)
    assert monitor.poll(WAIT_MS), "it did not reconnect"
    assert dealer.poll(WAIT_MS, zmq.POLLOUT)
    dealer.send(b"b")
    assert router.poll(WAIT_MS)
    assert router.recv_multipart() == [identity, b"b"]
    dealer.disable_monitor()


def test_an_oversized_message_costs_its_sender_the_connection(
    context: zmq.Context[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sockets, "MAX_MESSAGE_BYTES", 1000)
    router = bind_commands(context, "tcp://127.0.0.1:0")
    bad = connect_commands(context, bound_endpoint(router))
    monitor = bad.get_monitor_socket(zmq.EVENT_DISCONNECTED)
    bad.send(bytes(1001))
    assert monitor.poll(WAIT_MS)
    connect_commands(context, bound_endpoint(router)).send(b"fine")
    assert router.poll(WAIT_MS)
    assert router.recv_multipart()[1:] == [b"fine"]
    bad.disable_monitor()
