"""`pagewire chat`: a conversation in the terminal, or line by line from a pipe."""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from pagewire.cli import EXIT_OK, fail, report, sampling_of
from pagewire.cli.connection import connection_of
from pagewire.client import Ask, CallFailed, Client

if TYPE_CHECKING:
    import argparse

    from pagewire.client import TextStream

_HELP = "/reset forgets the conversation, /system TEXT sets its system message, /quit leaves"
# A model must not be able to steer the terminal: newline and tab are all it gets.
_CONTROLS = {code: None for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}


def run(options: argparse.Namespace) -> int:
    with Client(connection_of(options), retry=None) as client:
        try:
            names = [model["name"] for model in client.models(options.timeout)]
        except CallFailed as failure:
            return report(failure, options.address)
        chat = _Chat(client, options)
        if sys.stdin.isatty():
            chat.greet(options.model or ", ".join(names))
        return chat.run()


class _Chat:
    def __init__(self, client: Client, options: argparse.Namespace) -> None:
        self._client = client
        self._options = options
        self._interactive = sys.stdin.isatty()
        self._console = Console(highlight=False, soft_wrap=True)
        self._system: str | None = options.system
        self._turns: list[tuple[str, str]] = []

    def greet(self, model: str) -> None:
        # Gives input() line editing and history.
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401
        self._console.print(Text(f"{model} at {self._options.address}", style="bold"))
        self._console.print(Text(f"{_HELP}; Ctrl-C stops an answer", style="dim"))

    def run(self) -> int:
        """Until /quit or the end of input. From a pipe, the first failure ends it."""
        while (line := self._read()) is not None:
            if line.startswith("/"):
                if not self._command(line):
                    break
                continue
            if not line.strip():
                continue
            try:
                self._turn(line)
            except CallFailed as failure:
                status = report(failure, self._options.address)
                if not self._interactive:
                    return status
        return EXIT_OK

    def _read(self) -> str | None:
        try:
            if self._interactive:
                return self._console.input(Text("\n> ", style="bold cyan"))
            line = sys.stdin.readline()
            return line.rstrip("\n") if line else None
        except (EOFError, KeyboardInterrupt):
            return None

    def _command(self, line: str) -> bool:
        """Obeys a slash command; False ends the conversation."""
        name, _, argument = line.partition(" ")
        match name:
            case "/quit" | "/exit":
                return False
            case "/reset":
                self._turns.clear()
            case "/system":
                self._system = argument.strip() or None
            case "/help":
                self._console.print(Text(_HELP, style="dim"))
            case _:
                fail(f"unknown command {name}; {_HELP}")
        return True

    def _turn(self, question: str) -> None:
        system = [] if self._system is None else [("system", self._system)]
        turns = [*self._turns, ("user", question)]
        ask = Ask(
            messages=[*system, *turns],
            model=self._options.model,
            sampling=sampling_of(self._options),
        )
        stream = self._client.stream(ask, self._options.timeout)
        answer = self._show(stream)
        # A turn that failed raised above: it is not part of the conversation.
        self._turns = [*turns, ("assistant", answer)]

    def _show(self, stream: TextStream) -> str:
        """Prints the answer as it comes. Ctrl-C ends it and keeps what there is."""
        pieces: list[str] = []
        waiting = self._console.status("thinking")
        try:
            if self._interactive:
                waiting.start()
            for text in stream:
                waiting.stop()
                pieces.append(text)
                self._write(text)
        except CallFailed:
            if pieces:
                self._write("\n")
            raise
        except KeyboardInterrupt:
            stream.cancel()
            waiting.stop()
            if not self._interactive:
                raise
            self._console.print(Text(" [stopped]", style="yellow"), end="")
        finally:
            waiting.stop()
        self._write("\n")
        if self._interactive and stream.final is not None:
            self._console.print(Text(_summary(stream.final), style="dim"))
        return "".join(pieces)

    def _write(self, text: str) -> None:
        if sys.stdout.isatty():
            text = text.translate(_CONTROLS)
        sys.stdout.write(text)
        sys.stdout.flush()


def _summary(final: dict[str, Any]) -> str:
    usage = final["usage"]
    tokens = usage["completion_tokens"]
    summary = f"{tokens} tokens"
    decode = float(final.get("timings", {}).get("decode", "0s").removesuffix("s"))
    if tokens > 1 and decode > 0:
        summary += f", {(tokens - 1) / decode:.1f}/s"
    if usage["cached_tokens"]:
        summary += f", {usage['cached_tokens']} of {usage['prompt_tokens']} prompt tokens cached"
    return summary
