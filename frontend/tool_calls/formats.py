"""The formats by name: what announces a call, and how it is written."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from frontend.tool_calls.json_calls import (
    Choice,
    ListOfObjects,
    NamedObject,
    OneObject,
    arguments_of,
    read_call,
    read_known_call,
)
from frontend.tool_calls.python_calls import CallList

if TYPE_CHECKING:
    from collections.abc import Callable

    from frontend.tool_calls.parser import Body, Format
    from pagewire.tools import ToolCallFormat

_PYTHON_LIST = re.compile(r"\[\s*(?:[^\W\d][\w.]*\s*(?:(\()|$)|$)")


@dataclass(frozen=True, slots=True)
class Hermes:
    """<tool_call>{"name": ..., "arguments": {...}}</tool_call>, as Hermes and Qwen write."""

    marker: str = "<tool_call>"
    closer: str = "</tool_call>"
    repeats_bare: bool = False

    def may_begin(self, text: str) -> bool | None:
        return False

    def body(self, start: int, *, marked: bool) -> Body:
        return OneObject(start, read_call)


@dataclass(frozen=True, slots=True)
class Mistral:
    """[TOOL_CALLS] and an array of objects; newer models write a name and the arguments."""

    marker: str = "[TOOL_CALLS]"
    closer: str = ""
    repeats_bare: bool = False

    def may_begin(self, text: str) -> bool | None:
        return False

    def body(self, start: int, *, marked: bool) -> Body:
        return Choice(start, self._choose)

    def _choose(self, char: str, start: int) -> Body:
        if char == "[":
            return ListOfObjects(start, read_call)
        return OneObject(start, read_call) if char == "{" else NamedObject(start, "[ARGS]")


@dataclass(frozen=True, slots=True)
class Llama3Json:
    """{"name": ..., "parameters": {...}} at the beginning, or anywhere behind its marker; more
    of them behind a semicolon. Without the marker, only a call to a tool there is is one."""

    names: frozenset[str]
    marker: str = "<|python_tag|>"
    closer: str = ";"
    repeats_bare: bool = True

    def may_begin(self, text: str) -> bool | None:
        return text.startswith("{")

    def body(self, start: int, *, marked: bool) -> Body:
        known = partial(read_known_call, names=self.names)
        return OneObject(start, read_call if marked else known)


@dataclass(frozen=True, slots=True)
class Pythonic:
    """[f(a=1), g()] at the beginning, of calls to tools there are."""

    names: frozenset[str]
    marker: str = ""
    closer: str = ""
    repeats_bare: bool = False

    def may_begin(self, text: str) -> bool | None:
        begun = _PYTHON_LIST.match(text)
        if begun is None:
            return False
        return True if begun.group(1) else None

    def body(self, start: int, *, marked: bool) -> Body:
        return CallList(start, self.names)


@dataclass(frozen=True, slots=True)
class RequiredCalls:
    """An array of calls and nothing else: what tool_choice required is constrained to."""

    marker: str = ""
    closer: str = ""
    repeats_bare: bool = False

    def may_begin(self, text: str) -> bool | None:
        return text.startswith("[")

    def body(self, start: int, *, marked: bool) -> Body:
        return ListOfObjects(start, read_call)


@dataclass(frozen=True, slots=True)
class NamedCall:
    """The arguments of one call and nothing else: what a named tool_choice is constrained to."""

    name: str
    marker: str = ""
    closer: str = ""
    repeats_bare: bool = False

    def may_begin(self, text: str) -> bool | None:
        return text.startswith("{")

    def body(self, start: int, *, marked: bool) -> Body:
        return OneObject(start, arguments_of(self.name))


_FORMATS: dict[ToolCallFormat, Callable[[frozenset[str]], Format]] = {
    "hermes": lambda names: Hermes(),
    "mistral": lambda names: Mistral(),
    "llama3_json": Llama3Json,
    "pythonic": Pythonic,
}


def format_of(name: ToolCallFormat, tool_names: frozenset[str]) -> Format:
    """name: any but "none"."""
    return _FORMATS[name](tool_names)
