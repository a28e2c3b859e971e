"""Calls that are written as Python's: [get_weather(city="Oslo"), now()]."""

from __future__ import annotations

import ast
import json
import re
import warnings
from typing import TYPE_CHECKING, Any

from frontend.tool_calls.json_scanner import MAX_DEPTH, Broken
from frontend.tool_calls.parser import FunctionCall

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

_STOP = re.compile(r"[\"'()\[\]{}]")
_IN_STRING = {'"': re.compile(r'["\\\n]'), "'": re.compile(r"['\\\n]")}
_CLOSING = {"(": ")", "[": "]", "{": "}"}
_CONSTANTS = {"true": True, "false": False, "null": None}


class CallList:
    """A body of a list of calls with literal keyword arguments; told once it is closed."""

    def __init__(self, start: int, names: Collection[str]) -> None:
        self.settled = 0
        self.done = False
        self._start = self._position = start
        self._names = names
        self._closing: list[str] = []
        self._quote = ""

    def advance(self, text: str) -> Iterator[FunctionCall]:
        if not self._ends(text):
            return
        yield from read_calls(text[self._start : self._position], self._names)
        self.settled, self.done = self._position, True

    def _ends(self, text: str) -> bool:
        """Goes on to the list's closing bracket; False where it is not there."""
        while True:
            stop = (_IN_STRING[self._quote] if self._quote else _STOP).search(text, self._position)
            if stop is None:
                self._position = len(text)
                return False
            char = stop.group()
            if char == "\\":
                if stop.end() == len(text):
                    self._position = stop.start()
                    return False
                self._position = stop.end() + 1
                continue
            self._position = stop.end()
            self._pass(char)
            if not self._closing:
                return True

    def _pass(self, char: str) -> None:
        if char == "\n":
            raise Broken
        if self._quote:
            self._quote = ""
        elif char in _IN_STRING:
            self._quote = char
        elif char in _CLOSING:
            if len(self._closing) == MAX_DEPTH:
                raise Broken
            self._closing.append(_CLOSING[char])
        elif self._closing.pop() != char:
            raise Broken


def read_calls(text: str, names: Collection[str]) -> list[FunctionCall]:
    """All calls of a list, each to one of `names`. Raises Broken."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of escapes that Python does not know
            parsed = ast.parse(text, mode="eval").body
        if not isinstance(parsed, ast.List) or not parsed.elts:
            raise Broken
        calls = [_call(element) for element in parsed.elts]
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        raise Broken from None
    if not all(call.name in names for call in calls):
        raise Broken
    return calls


def _call(node: ast.expr) -> FunctionCall:
    if not isinstance(node, ast.Call) or node.args:
        raise Broken
    arguments: dict[str, Any] = {}
    for keyword in node.keywords:
        if keyword.arg is None:
            raise Broken
        arguments[keyword.arg] = _value(keyword.value)
    written = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    written.encode()  # a ValueError where Python spelled half a surrogate pair
    return FunctionCall(ast.unparse(node.func), written)


def _value(node: ast.expr) -> Any:
    """Of a literal that JSON has too; JSON's own constants are known as well."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str | int | float | None):
        return node.value
    if isinstance(node, ast.Name) and node.id in _CONSTANTS:
        return _CONSTANTS[node.id]
    if isinstance(node, ast.List | ast.Tuple):
        return [_value(element) for element in node.elts]
    if isinstance(node, ast.Dict):
        return {_key(key): _value(value) for key, value in zip(node.keys, node.values, strict=True)}
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        number = _value(node.operand)
        if isinstance(number, int | float) and not isinstance(number, bool):
            return -number
    raise Broken


def _key(node: ast.expr | None) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    raise Broken
