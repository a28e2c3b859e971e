"""JSON that arrives in pieces: where an object ends, and what its members are."""

from __future__ import annotations

import enum
import json
import re
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator

MAX_DEPTH = 100
"""Deeper nesting is taken for no call: what parses it recurses."""

_SPACE = re.compile(r"[ \t\n\r]*")
_STRING_STOP = re.compile(r'["\\\x00-\x1f]')
_SCALAR_RUN = re.compile(r"[-+.0-9A-Za-z]*")
_SCALAR = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?|true|false|null")
_ESCAPE = re.compile(r'\\(?:["\\/bfnrt]|u[0-9A-Fa-f]{4})')
_CUT_ESCAPE = re.compile(r"\\(?:u[0-9A-Fa-f]{0,3})?")


class Broken(Exception):
    """The text is not what it began as."""


class _Expect(enum.Enum):
    VALUE = enum.auto()
    FIRST_ELEMENT = enum.auto()
    KEY = enum.auto()
    FIRST_KEY = enum.auto()
    COLON = enum.auto()
    COMMA = enum.auto()
    """Or the end of what is open."""
    KEY_TEXT = enum.auto()
    VALUE_TEXT = enum.auto()


class ObjectScanner:
    """Follows one JSON object as its text grows. Each character is looked at once (a number
    once a piece), and the first that cannot belong to any JSON is noticed."""

    def __init__(self, start: int) -> None:
        """start: where the object's opening brace is, or will be."""
        self._position = start
        self._open: list[str] = []
        self._expect = _Expect.VALUE

    def end(self, text: str) -> int | None:
        """The index after the closing brace, None while it is not there. `text` is what it
        was at the last call, and more. Raises Broken."""
        while self._position < len(text):
            if self._expect in (_Expect.KEY_TEXT, _Expect.VALUE_TEXT):
                if not self._string_ends(text):
                    return None
                continue
            space = _SPACE.match(text, self._position)
            assert space is not None
            self._position = space.end()
            if self._position == len(text) or not self._step(text, text[self._position]):
                return None
            if not self._open:
                return self._position
        return None

    def _step(self, text: str, char: str) -> bool:
        """Takes the next token; False where it is not all there."""
        expect = self._expect
        if expect in (_Expect.VALUE, _Expect.FIRST_ELEMENT):
            if char == "]" and expect is _Expect.FIRST_ELEMENT:
                return self._close()
            return self._value(text, char)
        if expect in (_Expect.KEY, _Expect.FIRST_KEY):
            if char == "}" and expect is _Expect.FIRST_KEY:
                return self._close()
            return self._take(char == '"', _Expect.KEY_TEXT)
        if expect is _Expect.COLON:
            return self._take(char == ":", _Expect.VALUE)
        if char == ",":
            return self._take(True, _Expect.KEY if self._open[-1] == "{" else _Expect.VALUE)
        if (self._open[-1], char) in (("{", "}"), ("[", "]")):
            return self._close()
        raise Broken

    def _value(self, text: str, char: str) -> bool:
        if char in "{[":
            if len(self._open) == MAX_DEPTH:
                raise Broken
            self._open.append(char)
            return self._take(True, _Expect.FIRST_KEY if char == "{" else _Expect.FIRST_ELEMENT)
        if not self._open:
            raise Broken  # an object is wanted
        if char == '"':
            return self._take(True, _Expect.VALUE_TEXT)
        run = _SCALAR_RUN.match(text, self._position)
        assert run is not None
        if run.end() == len(text) and run.group():
            return False
        if _SCALAR.fullmatch(run.group()) is None:
            raise Broken
        self._position = run.end()
        self._expect = _Expect.COMMA
        return True

    def _take(self, fits: bool, then: _Expect) -> bool:
        if not fits:
            raise Broken
        self._position += 1
        self._expect = then
        return True

    def _close(self) -> bool:
        self._open.pop()
        return self._take(True, _Expect.COMMA)

    def _string_ends(self, text: str) -> bool:
        """Goes on inside a string; False where its end is not there."""
        stop = _STRING_STOP.search(text, self._position)
        if stop is None:
            self._position = len(text)
            return False
        self._position = stop.start()
        if stop.group() == '"':
            key = self._expect is _Expect.KEY_TEXT
            return self._take(True, _Expect.COLON if key else _Expect.COMMA)
        escape = _ESCAPE.match(text, self._position)
        if escape is not None:
            self._position = escape.end()
            return True
        if _CUT_ESCAPE.fullmatch(text, self._position) is None:
            raise Broken
        return False


class Member(NamedTuple):
    key: str
    value: Any
    text: str
    """The value as it was written."""


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


_decode = json.JSONDecoder(parse_constant=_refuse).raw_decode


def members(text: str) -> Iterator[Member]:
    """Of the object that `text` is. Raises ValueError for a number that is too long."""
    position = _after_space(text, 1)
    while text[position] != "}":
        key, position = _decode(text, position)
        start = _after_space(text, _after_space(text, position) + 1)
        value, end = _decode(text, start)
        yield Member(key, value, text[start:end])
        position = _after_space(text, end)
        if text[position] == ",":
            position = _after_space(text, position + 1)


def _after_space(text: str, position: int) -> int:
    space = _SPACE.match(text, position)
    assert space is not None
    return space.end()
