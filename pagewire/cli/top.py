"""`pagewire top`: what a server is doing, as it does it."""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

import msgspec
from rich.console import Console
from rich.live import Live

from pagewire.cli import EXIT_FAILED, EXIT_OK, fail
from pagewire.cli.connection import api_key_of
from pagewire.cli.top_figures import Figures, figures
from pagewire.cli.top_frame import frame
from pagewire.cli.top_source import Source, SourceFailed

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator
    from types import FrameType

    from rich.console import ConsoleOptions, RenderResult

    from pagewire.cli.top_source import Sample

_PIPE_WIDTH = 100
_QUIT = "qQ"


def run(options: argparse.Namespace) -> int:
    source = Source(
        options.http,
        tls=options.tls,
        ca=options.tls_ca,
        cert=options.tls_cert,
        key=options.tls_key,
        api_key=api_key_of(options),
    )
    watch = _Watch(source)
    try:
        with _interrupts() as interrupt:
            watch.begin()
            if options.once or options.json or not sys.stdout.isatty():
                return _print(watch, options, interrupt)
            return _show(watch, options.interval, interrupt)
    except SourceFailed as failure:
        fail(_with_hint(failure))
        return EXIT_FAILED
    except KeyboardInterrupt:
        return EXIT_OK
    finally:
        source.close()


class _Watch:
    """The last two samples, and what they say."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._last: Sample | None = None
        self.shown: Figures | None = None
        self.failure = ""
        """Of the last look."""
        self._lost_at = 0.0

    def begin(self) -> None:
        """Raises SourceFailed."""
        self._last = self._source.sample()
        self.shown = figures(self._source.url, self._last, self._last)

    def look(self) -> None:
        """Of the time since the last look; of a server that was started anew, of none.
        Raises SourceFailed."""
        assert self._last is not None, "begin() comes first"
        now, before = self._source.sample(), self._last
        if _life(now) != _life(before):
            before = now
        self._last = now
        self.shown = figures(self._source.url, now, before)

    def try_look(self) -> None:
        """The last figures stay while the server is away."""
        try:
            self.look()
        except SourceFailed as failure:
            self._lost_at = self._lost_at or time.monotonic()
            self.failure = str(failure)
        else:
            self._lost_at, self.failure = 0.0, ""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        assert self.shown is not None, "begin() comes first"
        width, height = options.size
        trouble = ""
        if self.failure:
            trouble = f"{self.failure}; for {time.monotonic() - self._lost_at:.0f} s"
        yield frame(self.shown, width=width, height=height, trouble=trouble)


def _life(sample: Sample) -> tuple[str, str]:
    return sample.live["life"], sample.live["model"]


class _Interrupt:
    """Ctrl-C, which raises KeyboardInterrupt wherever the program is. In a finalizer the
    interpreter drops that, so it is also noted here."""

    def __init__(self) -> None:
        self.came = False

    def __call__(self, _number: int, _frame: FrameType | None) -> None:
        self.came = True
        raise KeyboardInterrupt


@contextmanager
def _interrupts() -> Iterator[_Interrupt]:
    interrupt = _Interrupt()
    if threading.current_thread() is not threading.main_thread():
        yield interrupt  # signals are not its business
        return
    before = signal.signal(signal.SIGINT, interrupt)
    try:
        yield interrupt
    finally:
        signal.signal(signal.SIGINT, before)


def _print(watch: _Watch, options: argparse.Namespace, interrupt: _Interrupt) -> int:
    """Frame by frame, for a pipe or a file."""
    while not interrupt.came:
        pause(options.interval)
        if options.once:
            watch.look()
        else:
            was_away = bool(watch.failure)
            watch.try_look()
            if watch.failure:
                if not was_away:
                    fail(watch.failure)
                continue
        shown = watch.shown
        assert shown is not None, "begin() comes first"
        if options.json:
            sys.stdout.write(msgspec.json.encode(shown).decode() + "\n")
        else:
            width = None if sys.stdout.isatty() else _PIPE_WIDTH
            console = Console(width=width, highlight=False)
            console.print(frame(shown, width=console.width))
        sys.stdout.flush()
        if options.once:
            break
    return EXIT_OK


def _show(watch: _Watch, interval: float, interrupt: _Interrupt) -> int:
    """On a screen of its own, until q or Ctrl-C."""
    console = Console(highlight=False)
    with (
        _keys() as pause_for_key,
        Live(watch, console=console, screen=True, auto_refresh=False) as screen,
    ):
        while not interrupt.came:
            screen.refresh()
            if pause_for_key(interval):
                break
            watch.try_look()
    return EXIT_OK


def pause(seconds: float) -> None:
    time.sleep(seconds)


class _Keyboard:
    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def __call__(self, seconds: float) -> bool:
        """Waits so long; whether a key was pressed that means to quit."""
        ends_at = time.monotonic() + seconds
        while (left := ends_at - time.monotonic()) > 0:
            if select.select([self._descriptor], [], [], left)[0]:
                typed = os.read(self._descriptor, 64).decode("utf-8", "replace")
                if not typed or any(key in _QUIT for key in typed):
                    return True
        return False


class _NoKeyboard:
    def __call__(self, seconds: float) -> bool:
        pause(seconds)
        return False


@contextmanager
def _keys() -> Iterator[_Keyboard | _NoKeyboard]:
    """Keys without Return, and not shown, where stdin is a terminal."""
    if not sys.stdin.isatty():
        yield _NoKeyboard()
        return
    import termios
    import tty

    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    try:
        tty.setcbreak(descriptor)
        yield _Keyboard(descriptor)
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


def _with_hint(failure: SourceFailed) -> str:
    if failure.reached:
        return str(failure)
    return f"{failure}; start a server with: pagewire serve"
