"""From the tokenizer's text of a sequence to the client's."""

from __future__ import annotations

import secrets
import string
from typing import TYPE_CHECKING, NamedTuple

from pagewire.tools import ToolCall

if TYPE_CHECKING:
    from frontend.tool_calls.parser import Parsed, ToolCallParser

_ID_CHARS = string.ascii_letters + string.digits
_ID_LEN = 9
"""Mistral's chat templates refuse ids of any other length."""


class Shown(NamedTuple):
    text: str
    tool_calls: list[ToolCall]


class OutputText:
    """The echoed prompt goes ahead of the first piece, and calls are taken out."""

    __slots__ = ("_echo", "_parser", "is_plain")

    def __init__(self, echo: str = "", parser: ToolCallParser | None = None) -> None:
        self._echo = echo
        self._parser = parser
        self.is_plain = parser is None and not echo
        """Whether add() would give back what it is given."""

    @property
    def has_calls(self) -> bool:
        return self._parser is not None and self._parser.num_calls > 0

    def add(self, text: str) -> Shown:
        """What the client sees of the next piece, which may be empty."""
        shown = Shown(text, []) if self._parser is None else _shown(self._parser.feed(text))
        if self._echo:
            shown = Shown(self._echo + shown.text, shown.tool_calls)
            self._echo = ""
            self.is_plain = self._parser is None
        return shown

    def finish(self) -> Shown:
        """What was held back, once it is known that nothing follows."""
        return Shown("", []) if self._parser is None else _shown(self._parser.finish())


def _shown(parsed: Parsed) -> Shown:
    return Shown(
        parsed.text, [ToolCall(_mint_id(), call.name, call.arguments) for call in parsed.calls]
    )


def _mint_id() -> str:
    return "".join(secrets.choice(_ID_CHARS) for _ in range(_ID_LEN))
