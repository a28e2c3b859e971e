"""Calls that are JSON objects: {"name": ..., "arguments": {...}}."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

from frontend.tool_calls.json_scanner import Broken, ObjectScanner, members
from frontend.tool_calls.parser import FunctionCall

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator

    from frontend.tool_calls.parser import Body

_SPACE = re.compile(r"[ \t\n\r]*")
_NAME = re.compile(r"[A-Za-z0-9_.-]*")
_MAX_NAME_CHARS = 64


def read_call(text: str) -> FunctionCall:
    """Of an object with a name and arguments, or parameters, as Llama calls them. Absent
    ones are none. Raises Broken."""
    found = _members(text)
    name = found["name"][0] if "name" in found else None
    if not isinstance(name, str) or not name or not _is_unicode(name):
        raise Broken
    value: Any
    value, written = found.get("arguments") or found.get("parameters") or ({}, "{}")
    if isinstance(value, str):  # some write the object as a string
        value, written = _object_in(value), value
    if value is None:
        value, written = {}, "{}"
    if not isinstance(value, dict):
        raise Broken
    return FunctionCall(name, written)


def read_known_call(text: str, names: Collection[str]) -> FunctionCall:
    """The same where nothing but its content tells a call from JSON that is meant as text:
    it names a tool and has arguments. Raises Broken."""
    call = read_call(text)
    if call.name not in names or not {"arguments", "parameters"} & _members(text).keys():
        raise Broken
    return call


def _members(text: str) -> dict[str, tuple[Any, str]]:
    try:
        return {member.key: (member.value, member.text) for member in members(text)}
    except ValueError:
        raise Broken from None


def _object_in(text: str) -> object:
    try:
        return json.loads(text) if _is_unicode(text) else ""
    except (ValueError, RecursionError):
        return ""


def _is_unicode(text: str) -> bool:
    """JSON can spell half a surrogate pair, which no protobuf string holds."""
    return not any("\ud800" <= char <= "\udfff" for char in text)


class OneObject:
    """A body of one object."""

    def __init__(self, start: int, read: Callable[[str], FunctionCall]) -> None:
        self.settled = 0
        self.done = False
        self._start = start
        self._read = read
        self._scanner: ObjectScanner | None = None

    def advance(self, text: str) -> Iterator[FunctionCall]:
        if self._scanner is None:
            self._start = _after_space(text, self._start)
            self._scanner = ObjectScanner(self._start)
        # White space may still be coming; then the scanner skips it too.
        end = self._scanner.end(text)
        if end is not None:
            yield self._read(text[_after_space(text, self._start) : end])
            self.settled, self.done = end, True


class ListOfObjects:
    """A body of a JSON array of objects; each is told once it is complete."""

    def __init__(self, start: int, read: Callable[[str], FunctionCall]) -> None:
        self.settled = 0
        self.done = False
        self._position = start
        self._read = read
        self._expect = "["
        self._element: OneObject | None = None

    def advance(self, text: str) -> Iterator[FunctionCall]:
        while not self.done:
            if self._element is not None:
                yield from self._element.advance(text)
                if not self._element.done:
                    return
                self.settled = self._position = self._element.settled
                self._element, self._expect = None, ",]"
            self._position = _after_space(text, self._position)
            if self._position == len(text):
                return
            char = text[self._position]
            if char not in self._expect:
                raise Broken
            self._position += 1
            if char == "]":
                self.settled, self.done = self._position, True
            else:
                self._element = OneObject(self._position, self._read)


class NamedObject:
    """A body of a name, perhaps a marker, and the arguments."""

    def __init__(self, start: int, marker: str) -> None:
        self.settled = 0
        self.done = False
        self._start = start
        self._marker = marker
        self._arguments: OneObject | None = None

    def advance(self, text: str) -> Iterator[FunctionCall]:
        if self._arguments is None:
            name = _NAME.match(text, self._start)
            assert name is not None
            if not 1 <= len(name.group()) <= _MAX_NAME_CHARS:
                raise Broken
            rest = text[name.end() : name.end() + len(self._marker)]
            if rest != self._marker and self._marker.startswith(rest):
                return
            start = name.end() + (len(self._marker) if rest == self._marker else 0)
            self._arguments = OneObject(start, arguments_of(name.group()))
        yield from self._arguments.advance(text)
        self.settled, self.done = self._arguments.settled, self._arguments.done


def arguments_of(name: str) -> Callable[[str], FunctionCall]:
    """Reads an object that is the arguments of a call to `name`."""
    return lambda text: FunctionCall(name, text)


class Choice:
    """A body whose first character says which it is."""

    def __init__(self, start: int, choose: Callable[[str, int], Body]) -> None:
        self.settled = 0
        self.done = False
        self._start = start
        self._choose = choose
        self._body: Body | None = None

    def advance(self, text: str) -> Iterator[FunctionCall]:
        if self._body is None:
            start = _after_space(text, self._start)
            if start == len(text):
                return
            self._body = self._choose(text[start], start)
        try:
            yield from self._body.advance(text)
        finally:
            self.settled, self.done = self._body.settled, self._body.done


def _after_space(text: str, position: int) -> int:
    space = _SPACE.match(text, position)
    assert space is not None
    return space.end()
