"""Splits an output's text into what is said and what is called, as it arrives.

What comes out does not depend on how the text is cut into pieces:

- Calls are announced by the format's marker, or begin at a place where its format lets
  them begin without one. What follows is read for as long as it can still be calls.
- A call is told once it is complete. White space before it, and behind it up to the next
  call or the end, belongs to it.
- What turns out to be no call is text, as it stands: the marker first, and after it the
  search goes on.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple, Protocol

from frontend.tool_calls.json_scanner import Broken

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

_SPACE = re.compile(r"\s*")


class FunctionCall(NamedTuple):
    name: str
    arguments: str
    """A JSON object."""


class Parsed(NamedTuple):
    text: str
    calls: list[FunctionCall]


class Body(Protocol):
    """Calls being read, from behind their marker."""

    settled: int
    """Where in the text the last complete call ends; 0 before the first."""
    done: bool
    """Nothing more belongs to it; `settled` is its end."""

    def advance(self, text: str) -> Iterator[FunctionCall]:
        """The calls that are complete now. `text` is what it was at the last call, and
        more. Raises Broken where it can be none of the format."""


class Format(Protocol):
    """How one family of models writes its calls."""

    @property
    def marker(self) -> str:
        """What announces calls; empty where nothing does."""

    @property
    def closer(self) -> str:
        """What may stand behind a call; empty where nothing does."""

    @property
    def repeats_bare(self) -> bool:
        """Whether the next call may follow on a call without a marker."""

    def may_begin(self, text: str) -> bool | None:
        """Whether `text` begins calls that no marker announces; None while it is too short
        to tell."""

    def body(self, start: int, *, marked: bool) -> Body: ...


class ToolCallParser:
    """Follows one output. Call feed for each new piece, then finish at its end."""

    def __init__(self, call_format: Format, hidden: Collection[str] = ()) -> None:
        """hidden: special tokens that are there for this parser only, never for the reader."""
        self._format = call_format
        self._hidden = frozenset(hidden)
        stops = self._hidden | ({call_format.marker} if call_format.marker else set())
        self._stops = sorted(stops, key=len, reverse=True)
        self._next_stop = re.compile("|".join(map(re.escape, self._stops))).search
        self._buffer = ""
        """What is not decided."""
        self._bare = True
        """Calls may begin at the buffer's beginning without a marker."""
        self._after_call = False
        """There was no text since the last call."""
        self._closer_due = False
        self._body: Body | None = None
        self._start = 0
        """Of the body, in the buffer."""
        self.num_calls = 0

    def feed(self, piece: str) -> Parsed:
        self._buffer += piece
        return self._run(final=False)

    def finish(self) -> Parsed:
        """The rest, when no more text follows."""
        return self._run(final=True)

    def _run(self, *, final: bool) -> Parsed:
        texts: list[str] = []
        calls: list[FunctionCall] = []
        while self._buffer and self._step(texts, calls, final=final):
            pass
        self.num_calls += len(calls)
        return Parsed("".join(texts), calls)

    def _step(self, texts: list[str], calls: list[FunctionCall], *, final: bool) -> bool:
        """Decides the next part of the buffer; False where there is none to decide."""
        if self._body is not None:
            return self._read_body(self._body, texts, calls, final=final)
        if self._closer_due:
            return self._pass_closer(final=final)
        if self._bare:
            return self._try_bare(texts, final=final)
        return self._search(texts, final=final)

    def _read_body(
        self, body: Body, texts: list[str], calls: list[FunctionCall], *, final: bool
    ) -> bool:
        try:
            calls.extend(body.advance(self._buffer))
            broken = final and not body.done
        except Broken:
            broken = True
        if not (body.done or broken):
            return False
        self._body = None
        if body.settled:
            self._buffer = self._buffer[body.settled :]
            self._after_call = self._closer_due = body.done
        else:
            texts.append(self._shown(self._buffer[: self._start]))
            self._buffer = self._buffer[self._start :]
        return True

    def _pass_closer(self, *, final: bool) -> bool:
        rest, closer = self._buffer.lstrip(), self._format.closer
        if rest.startswith(closer):
            if closer:
                self._buffer = rest.removeprefix(closer)
        elif closer.startswith(rest):  # also where nothing is left
            if not final:
                return False
            self._buffer = ""  # cut off
        self._closer_due = False
        self._bare = self._format.repeats_bare
        return True

    def _try_bare(self, texts: list[str], *, final: bool) -> bool:
        space = _SPACE.match(self._buffer)
        assert space is not None
        start = space.end()
        begins = self._format.may_begin(self._buffer[start:]) if start < len(self._buffer) else None
        if begins is None and not final:
            return False
        self._bare = False
        if begins:
            self._enter(start, marked=False)
        return True

    def _search(self, texts: list[str], *, final: bool) -> bool:
        if self._after_call and self._buffer.isspace():
            if final:
                self._buffer = ""
            return False
        stop = self._next_stop(self._buffer) if self._stops else None
        if stop is None:
            end = len(self._buffer) if final or not self._stops else self._undecided_from()
            self._say(texts, end)
            return False
        if stop.group() == self._format.marker:
            keep = len(self._buffer[: stop.start()].rstrip())
            self._say(texts, keep)
            self._enter(stop.end() - keep, marked=True)
        else:
            self._say(texts, stop.start())
            self._buffer = self._buffer.removeprefix(stop.group())
        return True

    def _say(self, texts: list[str], end: int) -> None:
        """The buffer up to `end` is text."""
        if end:
            texts.append(self._buffer[:end])
            self._buffer = self._buffer[end:]
            self._after_call = False

    def _enter(self, start: int, *, marked: bool) -> None:
        self._body = self._format.body(start, marked=marked)
        self._start = start

    def _undecided_from(self) -> int:
        """Where a stop may have begun, with the white space before it."""
        text = self._buffer
        for length in range(min(len(text), len(self._stops[0]) - 1), 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stops):
                text = text[:-length]
                break
        return len(text.rstrip())

    def _shown(self, text: str) -> str:
        for token in self._hidden:
            text = text.replace(token, "")
        return text
