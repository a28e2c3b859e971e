from __future__ import annotations

import io
import json
import os
import pty
import select
import signal
import socket
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest

from pagewire.cli import main
from pagewire.client import Ask, CallFailed, Client
from pagewire.v1 import common_pb2
from tests.support.fake_inference import FakeInference, start_fake_inference

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

Server = tuple[FakeInference, str]


@pytest.fixture
def server() -> Iterator[Server]:
    servicer, address, stop = start_fake_inference()
    yield servicer, address
    stop()


@pytest.fixture
def nobody() -> Iterator[str]:
    """An address at which nothing listens."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{taken.getsockname()[1]}"


def test_generate_prints_the_text_and_nothing_else(
    server: Server, capfd: pytest.CaptureFixture[str]
) -> None:
    servicer, address = server
    status = main(
        [
            "generate",
            "two words",
            f"--address={address}",
            "--temperature=0",
            "--max-tokens=16",
            "--stop=a",
            "--stop=b",
            "--stop-token-id=7",
        ]
    )
    assert (status, capfd.readouterr()) == (0, ("echo two words ", ""))
    (request,) = servicer.requests
    sampling = request.sampling_params
    assert (sampling.temperature, sampling.max_tokens) == (0.0, 16)
    assert (list(sampling.stop), list(sampling.stop_token_ids)) == (["a", "b"], [7])
    assert sampling.HasField("temperature")
    assert not sampling.HasField("top_p")
    assert not sampling.HasField("seed")
    assert not request.HasField("model")


@pytest.mark.parametrize(
    ("flags", "temperature", "top_p"),
    [
        ((), 0.2, 0.9),
        (("--top-p=0.5",), 0.2, 0.5),
        # Who names one wants that distribution, whole.
        (("--temperature=1",), 1.0, None),
        (("--temperature=1", "--top-p=0.5"), 1.0, 0.5),
    ],
)
def test_generate_is_calm_unless_told_otherwise(
    server: Server, flags: tuple[str, ...], temperature: float, top_p: float | None
) -> None:
    servicer, address = server
    assert main(["generate", "hi", f"--address={address}", *flags]) == 0
    sampling = servicer.requests[0].sampling_params
    assert sampling.temperature == pytest.approx(temperature)
    assert sampling.HasField("top_p") == (top_p is not None)
    assert sampling.top_p == pytest.approx(top_p or 0.0)


def test_generate_passes_on_what_changes_logits(server: Server) -> None:
    servicer, address = server
    flags = "--min-tokens=2 --repetition-penalty=1.5 --presence-penalty=0.5"
    flags += " --frequency-penalty=-0.25 --logit-bias=7=-1.5 --logit-bias 9=2 --bad-word=x"
    assert main(["generate", "hi", f"--address={address}", *flags.split()]) == 0
    sampling = servicer.requests[0].sampling_params
    assert (sampling.min_tokens, sampling.repetition_penalty) == (2, 1.5)
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (0.5, -0.25)
    assert dict(sampling.logit_bias) == {7: -1.5, 9: 2.0}
    assert list(sampling.bad_words) == ["x"]


def test_generate_passes_on_what_constrains_the_text(server: Server, tmp_path: Path) -> None:
    fake, address = server
    schema = tmp_path / "schema.json"
    schema.write_text('{"type": "object"}')
    for flags, expected in (
        (["--choice=a b", "--choice=c"], {"choice": {"texts": ["a b", "c"]}}),
        ([f"--json-schema={schema}"], {"json_schema": '{"type": "object"}'}),
        (["--regex=a+"], {"regex": "a+"}),
        (["--json-object"], {"json_object": True}),
    ):
        assert main(["generate", "hi", f"--address={address}", *flags]) == 0
        sampling = fake.requests[-1].sampling_params
        assert sampling.structured_output == common_pb2.StructuredOutput(**expected)
    with pytest.raises(SystemExit):
        main(["generate", "hi", "--regex=a", "--json-object"])
    with pytest.raises(SystemExit):
        main(["generate", "hi", f"--grammar={tmp_path / 'nowhere'}"])


def test_generate_through_the_chat_template(server: Server, capfd: pytest.CaptureFixture) -> None:
    _servicer, address = server
    assert main(["generate", "hi", f"--address={address}", "--system=be brief"]) == 0
    assert capfd.readouterr().out == "echo system:be brief|user:hi "


def test_generate_reads_its_prompt_from_stdin(
    server: Server, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("from\na pipe"))
    assert main(["generate", "-", f"--address={server[1]}"]) == 0
    assert capfd.readouterr().out == "echo from\na pipe "


def test_generate_json_is_the_whole_response(
    server: Server, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", "hi", f"--address={server[1]}", "--json"]) == 0
    response = json.loads(capfd.readouterr().out)
    assert response["outputs"][0]["text"] == "echo hi"
    assert (response["request_id"], response["model"]) == ("r1", "fake")
    assert int(response["seed"]) == (1 << 63) + 1


@pytest.mark.parametrize(
    ("flags", "tty", "says"),
    [([], True, True), ([], False, False), (["--max-tokens=3"], True, False)],
)
def test_generate_json_says_why_it_is_silent(
    server: Server,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    flags: list[str],
    tty: bool,
    says: bool,
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: tty)
    assert main(["generate", "hi", f"--address={server[1]}", "--json", *flags]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["outputs"][0]["text"] == "echo hi"
    assert ("--max-tokens would bound the answer" in err) == says


def test_generate_json_asks_for_logprobs(server: Server, capfd: pytest.CaptureFixture[str]) -> None:
    flags = ["--logprobs=0", "--prompt-logprobs=3"]
    assert main(["generate", "hi", f"--address={server[1]}", "--json", *flags]) == 0
    sampling = server[0].requests[-1].sampling_params
    assert sampling.HasField("logprobs")
    assert (sampling.logprobs, sampling.prompt_logprobs) == (0, 3)
    capfd.readouterr()
    assert main(["generate", "hi", f"--address={server[1]}", flags[0]]) == 2
    assert "need --json" in capfd.readouterr().err


def test_several_sequences_need_json(server: Server, capfd: pytest.CaptureFixture[str]) -> None:
    flags = ["--n=2", "--best-of=4"]
    assert main(["generate", "hi", f"--address={server[1]}", "--json", *flags]) == 0
    sampling = server[0].requests[-1].sampling_params
    assert (sampling.n, sampling.best_of) == (2, 4)
    capfd.readouterr()
    for flag in flags:
        assert main(["generate", "hi", f"--address={server[1]}", flag]) == 2
        assert "need --json" in capfd.readouterr().err
    with Client(server[1]) as client, pytest.raises(CallFailed, match="would mix"):
        client.stream(Ask(prompt="hi", sampling={"n": 2}))


@pytest.mark.parametrize("extra", [[], ["--json"]])
def test_a_refused_field_is_one_line(
    server: Server, capfd: pytest.CaptureFixture[str], extra: list[str]
) -> None:
    assert main(["generate", "!", f"--address={server[1]}", *extra]) == 2
    assert capfd.readouterr() == ("", "pagewire: prompt: is of no use at all\n")


def test_an_error_after_text_has_a_line_of_its_own_on_a_terminal(
    server: Server, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ["generate", "what now?", f"--address={server[1]}"]
    assert main(command) == 1
    assert capfd.readouterr() == ("echo ", "pagewire: lost it (INTERNAL)\n")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    assert main(command) == 1
    assert capfd.readouterr() == ("echo \n", "pagewire: lost it (INTERNAL)\n")
    monkeypatch.setattr("sys.stdin", io.StringIO("what now?\n"))
    assert main(["chat", f"--address={server[1]}"]) == 1
    assert capfd.readouterr() == ("echo \n", "pagewire: lost it (INTERNAL)\n")


def test_a_value_that_no_message_can_hold_names_its_field(
    server: Server, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", "x", f"--address={server[1]}", "--max-tokens=99999999999"]) == 2
    assert capfd.readouterr().err.startswith("pagewire: sampling_params.max_tokens: ")
    assert server[0].requests == []


@pytest.mark.parametrize("command", [["generate", "hi"], ["chat"], ["models"]])
def test_no_server_is_said_in_one_line(
    nobody: str, capfd: pytest.CaptureFixture[str], command: list[str]
) -> None:
    assert main([*command, f"--address={nobody}"]) == 1
    assert capfd.readouterr() == (
        "",
        f"pagewire: no server answers at {nobody}; start one with: pagewire serve\n",
    )


def test_address_may_come_from_the_environment(
    server: Server, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PAGEWIRE_ADDRESS", server[1])
    assert main(["models"]) == 0
    header, row = capfd.readouterr().out.splitlines()
    assert header.split() == ["name", "architecture", "max_model_len", "dtype", "device"]
    assert row.split() == ["fake", "llama", "99", "float32", "cpu"]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["generate"], "the following arguments are required: PROMPT"),
        (["generate", "x", "--temperature=warm"], "--temperature: invalid float value: 'warm'"),
        (["generate", "x", "--address="], "--address: must not be empty"),
        (["generate", "x", "--timeout=nan"], "--timeout: must be above 0, got nan"),
        (["generate", "x", "--logit-bias=5"], "--logit-bias: must be ID=X, got '5'"),
        (["dance"], "COMMAND: invalid choice: 'dance'"),
        ([], "the following arguments are required: COMMAND"),
    ],
)
def test_bad_usage_is_one_line_and_status_2(
    capfd: pytest.CaptureFixture[str], argv: list[str], message: str
) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(argv)
    assert exit_.value.code == 2
    error = capfd.readouterr().err
    assert error.startswith(f"pagewire: {message}")
    assert len(error.splitlines()) == 1


def test_a_wrong_setting_of_serve_is_one_line_and_status_2(
    capfd: pytest.CaptureFixture[str],
) -> None:
    assert main(["serve", "--max-num-seq=3"]) == 2
    error = "pagewire: unknown flag --max-num-seq; did you mean --max-num-seqs?\n"
    assert capfd.readouterr() == ("", error)


def test_version(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["version"]) == 0
    assert capfd.readouterr().out.startswith("pagewire 0.")


def test_chat_from_a_pipe_answers_each_line(
    server: Server, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = "one\n/system be kind\ntwo\n\n/reset\nthree\n/quit\nnever\n"
    monkeypatch.setattr("sys.stdin", io.StringIO(lines))
    assert main(["chat", f"--address={server[1]}", "--temperature=0"]) == 0
    assert capfd.readouterr() == (
        (
            "echo user:one \n"
            "echo system:be kind|user:one|assistant:echo user:one |user:two \n"
            "echo system:be kind|user:three \n"
        ),
        "",
    )
    assert all(request.sampling_params.temperature == 0 for request in server[0].requests)


def test_chat_from_a_pipe_ends_at_the_first_failure(
    server: Server, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("/dance\nhi\n"))
    assert main(["chat", f"--address={server[1]}", "--min-p=0.5", "--top-k=99999999999"]) == 2
    error = capfd.readouterr().err.splitlines()
    assert error[0].startswith("pagewire: unknown command /dance")
    assert error[1].startswith("pagewire: sampling_params.top_k: ")


class Terminal:
    """`pagewire chat` on a pseudo-terminal."""

    def __init__(self, address: str) -> None:
        pid, self._fd = pty.fork()
        if pid == 0:
            os.environ.update(TERM="dumb", COLUMNS="200")
            command = [sys.executable, "-P", "-m", "pagewire.cli", "chat", f"--address={address}"]
            os.execv(sys.executable, command)
        self._pid = pid
        self.shown = ""

    def type(self, text: str) -> None:
        os.write(self._fd, text.encode())

    def wait_for(self, text: str, within_s: float = 60) -> None:
        deadline = time.monotonic() + within_s
        while text not in self.shown:
            ready, _, _ = select.select([self._fd], [], [], max(0, deadline - time.monotonic()))
            if not ready:
                raise AssertionError(f"no {text!r} in {self.shown!r}")
            self.shown += os.read(self._fd, 4096).decode()
        self.shown = self.shown.split(text, 1)[1]

    def leave(self) -> int:
        """Presses Ctrl-C until the process has ended; its exit status.

        More than once, as a person would: Python loses a KeyboardInterrupt that is raised
        where exceptions are ignored, in a destructor, say.
        """
        ended = os.pidfd_open(self._pid)
        try:
            for _ in range(10):
                self.type("\x03")
                if select.select([ended], [], [], 5)[0]:
                    return os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])
            raise AssertionError(f"still there after ten Ctrl-C: {self.shown!r}")
        finally:
            os.close(ended)

    def close(self) -> None:
        os.close(self._fd)


def test_chat_on_a_terminal_streams_and_stops_an_answer_by_ctrl_c(server: Server) -> None:
    servicer, address = server
    terminal = Terminal(address)
    try:
        terminal.wait_for(f"fake at {address}")
        terminal.wait_for("> ")
        terminal.type("hello\n")
        terminal.wait_for("echo user:hello")
        terminal.wait_for("3 tokens, 4.0/s, 2 of 4 prompt tokens cached")
        terminal.wait_for("> ")
        servicer.endless = True
        servicer.cancelled.clear()
        terminal.type("again\n")
        terminal.wait_for("more ")
        terminal.type("\x03")
        terminal.wait_for("[stopped]")
        assert servicer.cancelled.wait(20)
        terminal.wait_for("> ")
        assert terminal.leave() == 0
    finally:
        terminal.close()


def test_generate_ends_quietly_when_interrupted_or_unread(server: Server) -> None:
    servicer, address = server
    servicer.endless = True
    command = [sys.executable, "-P", "-m", "pagewire.cli", "generate", "x", f"--address={address}"]
    for end in ("interrupt", "close"):
        servicer.cancelled.clear()
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
            assert process.stdout is not None
            assert process.stderr is not None
            assert process.stdout.read(5) == b"echo "
            if end == "interrupt":
                process.send_signal(signal.SIGINT)
                process.stdout.read()
            process.stdout.close()
            assert process.stderr.read() == b""
        assert process.returncode == (130 if end == "interrupt" else 0)
        assert servicer.cancelled.wait(20)
