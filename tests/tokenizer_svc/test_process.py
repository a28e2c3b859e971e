"""The process: start, death of its workers, end."""

from __future__ import annotations

import asyncio
import json
import random
import signal
import socket
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import grpc
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pagewire.obs.ready import read_ready_file
from pagewire.v1.detokenizer_pb2 import OpenSequence
from pagewire.v1.tokenizer_pb2 import TokenizeRequest
from tests.support.tiny_model import TinySpec, write_hf
from tests.tokenizer_svc.service import Service, Stream, texts_of, tokenizer_stub
from tokenizer_svc.servicer import _read

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from tokenizer_svc.loader import LoadedTokenizer


@pytest.mark.parametrize("has_template", [True, False])
def test_the_ready_file_tells_of_a_chat_template(tmp_path: Path, has_template: bool) -> None:
    model = write_hf(tmp_path / "model", TinySpec())
    if not has_template:
        config = json.loads((model / "tokenizer_config.json").read_text())
        del config["chat_template"]
        (model / "tokenizer_config.json").write_text(json.dumps(config))
    with Service("--model", str(model), "--ready-file", str(tmp_path / "ready.json")):
        facts = read_ready_file(tmp_path / "ready.json")
    assert facts is not None
    assert facts["chat_template"] is has_template


async def test_killed_workers_cost_no_text(embedded: LoadedTokenizer) -> None:
    """kill -9 under load: the errors name the sequences, a replay resumes them, and each
    text is whole."""
    rng = random.Random(29)
    outputs = {n: [rng.randrange(17, embedded.vocab_size) for _ in range(400)] for n in range(40)}
    texts = dict.fromkeys(outputs, "")
    done = dict.fromkeys(outputs, 0)
    lost: set[int] = set(outputs)
    num_lost = 0
    with Service("--tokenizer-workers", "2") as service:
        async with service.channel() as channel:
            stream = Stream(channel)
            for step in range(10_000):
                if step in (20, 60, 100):
                    victim = rng.choice(service.workers())
                    victim.send_signal(signal.SIGKILL)
                opens = [
                    OpenSequence(
                        sequence=n,
                        replay_token_ids=outputs[n][: done[n]],
                        replay_emitted_chars=len(texts[n]),
                    )
                    for n in lost
                ]
                lost.clear()
                rows = {n: outputs[n][done[n] : done[n] + 3] for n in outputs if done[n] < 400}
                if not rows:
                    break
                ends = [n for n in rows if done[n] + 3 >= 400]
                response = await stream.step(rows, opens=opens, finished=ends)
                lost = {error.sequence for error in response.errors}
                num_lost += len(lost)
                received = texts_of(response)
                for n in rows.keys() - lost:
                    texts[n] += received.get(n, "")
                    done[n] += len(rows[n])
    assert num_lost > 0
    for n, ids in outputs.items():
        assert texts[n] == embedded.tokenizer.decode(ids, skip_special_tokens=False)


async def test_the_only_worker_comes_back() -> None:
    with Service() as service:
        async with service.channel() as channel:
            stream, stub = Stream(channel), tokenizer_stub(channel)
            await stream.step({1: [13433]}, opens=[OpenSequence(sequence=1)])
            health = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
            assert (await health.read()).status == health_pb2.HealthCheckResponse.SERVING
            (victim,) = service.workers()
            victim.send_signal(signal.SIGKILL)
            assert (await health.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
            # Waits for the new worker instead of failing.
            reply = await stub.Tokenize(TokenizeRequest(text="alpha"))
            assert list(reply.token_ids) == [13433]
            assert (await health.read()).status == health_pb2.HealthCheckResponse.SERVING
            response = await stream.step({1: [11345]})
            assert [error.sequence for error in response.errors] == [1]
            again = OpenSequence(sequence=1, replay_token_ids=[13433], replay_emitted_chars=5)
            assert texts_of(await stream.step({1: [11345]}, opens=[again])) == {1: " beta"}
            assert service.workers()[0].pid != victim.pid


async def test_a_worker_that_hangs_is_replaced() -> None:
    with Service("--tokenizer-hang-timeout", "2") as service:
        async with service.channel() as channel:
            stream = Stream(channel)
            await stream.step({1: [13433]}, opens=[OpenSequence(sequence=1)])
            (victim,) = service.workers()
            victim.send_signal(signal.SIGSTOP)
            response = await stream.step({1: [11345]})
            assert [error.sequence for error in response.errors] == [1]
            again = OpenSequence(sequence=1, replay_token_ids=[13433], replay_emitted_chars=5)
            assert texts_of(await stream.step({1: [11345]}, opens=[again])) == {1: " beta"}
            assert service.workers()[0].pid != victim.pid
            assert f"(pid {victim.pid}) hangs" in service.wait_for(r"worker 0 .* hangs")


async def test_an_idle_worker_that_hangs_is_noticed() -> None:
    with Service("--tokenizer-hang-timeout", "2") as service:
        (victim,) = service.workers()
        victim.send_signal(signal.SIGSTOP)
        assert f"(pid {victim.pid}) hangs" in service.wait_for(r"worker 0 .* hangs")
        service.wait_for(r"worker 0 .* serves")


async def test_calls_in_flight_survive_a_death() -> None:
    with Service("--tokenizer-workers", "2") as service:
        async with service.channel() as channel:
            stub = tokenizer_stub(channel)
            victim = service.workers()[0]
            victim.send_signal(signal.SIGSTOP)
            calls = [
                asyncio.ensure_future(stub.Tokenize(TokenizeRequest(text=f"alpha {n} " * 20_000)))
                for n in range(8)
            ]
            # Those that are answered went to the other.
            _, waiting = await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)
            assert waiting
            victim.send_signal(signal.SIGKILL)
            replies = await asyncio.gather(*calls)
    assert all(len(reply.token_ids) > 20_000 for reply in replies)


def test_sigterm_ends_it_with_status_0_and_no_orphans() -> None:
    with Service("--tokenizer-workers", "2") as service:
        workers = service.workers()
        assert len(workers) == 2
        assert service.terminate() == 0
        gone, alive = psutil.wait_procs(workers, timeout=60)
        assert (len(gone), alive) == (2, [])


def test_workers_end_with_their_parent() -> None:
    with Service("--tokenizer-workers", "2") as service:
        workers = service.workers()
        service.process.kill()
        service.process.wait(timeout=60)
        gone, alive = psutil.wait_procs(workers, timeout=60)
        assert (len(gone), alive) == (2, [])


async def test_sigterm_lets_open_sequences_finish() -> None:
    with Service() as service:
        async with service.channel() as channel:
            stream = Stream(channel)
            await stream.step({1: [13433]}, opens=[OpenSequence(sequence=1)])
            # A signal to the whole group reaches the workers too.
            for process in [*service.workers(), psutil.Process(service.process.pid)]:
                process.send_signal(signal.SIGTERM)
            await asyncio.to_thread(service.wait_for, "draining")
            assert texts_of(await stream.step({1: [11345]})) == {1: " beta"}
            assert texts_of(await stream.step(finished=[1])) == {1: ""}
            assert await asyncio.to_thread(service.process.wait, 60) == 0


async def test_a_second_signal_does_not_wait() -> None:
    with Service() as service:
        async with service.channel() as channel:
            stream = Stream(channel)
            await stream.step({1: [13433]}, opens=[OpenSequence(sequence=1)])
            service.process.send_signal(signal.SIGINT)
            await asyncio.to_thread(service.wait_for, "draining")
            service.process.send_signal(signal.SIGINT)
            assert await asyncio.to_thread(service.process.wait, 60) == 0


async def test_a_stop_in_the_middle_of_a_stream_is_no_incident() -> None:
    """What grpc.aio raises in a read that comes after the stop."""

    async def requests() -> AsyncIterator[Any]:
        raise grpc.aio.BaseError("the server was stopped")
        yield

    steps: asyncio.Queue[Any] = asyncio.Queue()
    session: Any = None
    await _read(requests(), session, steps)
    assert steps.get_nowait() is None


def run(*flags: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tokenizer_svc", *flags],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_exit_status_for_a_bad_model(tmp_path: Path) -> None:
    result = run("--model", str(tmp_path / "absent"))
    assert result.returncode == 3
    assert "absent" in result.stderr
    assert "Traceback" not in result.stderr
    (tmp_path / "config.json").write_text("{}")
    result = run("--model", str(tmp_path), "--tokenizer-bind", "127.0.0.1:0")
    assert result.returncode == 3
    assert "tokenizer.json: missing" in result.stderr
    assert "Traceback" not in result.stderr


def test_exit_status_for_a_bad_configuration(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for flags, message in [
            (["--tokenizer-bind", f"127.0.0.1:{port}"], "cannot be bound"),
            (["--tokenizer-bind", "nowhere"], "host:port"),
            (["--tokenizer-bind", f"unix:/{'x' * 120}"], "107 bytes"),
            (["--tokenizer-bind", "127.0.0.1:0", "--chat-template", "/absent"], "/absent"),
            (["--no-such-flag"], "no-such-flag"),
        ]:
            result = run(*flags)
            assert (result.returncode, message in result.stderr) == (2, True), result.stderr
            assert "Traceback" not in result.stderr


async def test_unix_socket_left_behind(tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/t.sock"
    for _ in range(2):
        with Service("--tokenizer-bind", address) as service:
            assert service.address == address
            async with grpc.aio.insecure_channel(address) as channel:
                reply = await tokenizer_stub(channel).Tokenize(TokenizeRequest(text="alpha"))
                assert list(reply.token_ids) == [13433]
            service.process.kill()
            service.process.wait(timeout=60)


@pytest.mark.parametrize("module", ["tokenizer_svc.server", "tokenizer_svc.worker"])
def test_torch_is_not_imported(module: str, embedded_gguf: Path) -> None:
    code = f"""
import importlib, sys
from pathlib import Path
importlib.import_module({module!r})
from tokenizer_svc.chat_template import ChatTemplate
from tokenizer_svc.loader import load_tokenizer
loaded = load_tokenizer(Path({str(embedded_gguf)!r}))
ChatTemplate(loaded.chat_template, loaded.special_tokens).prepare()
assert "transformers" in sys.modules
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
