"""What a chat template says of tools: whether it has any, and how the model is told to call.

Told from the template's text, as it is the one place where a model says so.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import jinja2

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from pagewire.tools import ToolCallFormat

_OTHER_TAGS = ("<function=", "<arg_key>", "<parameter=")
"""Inside of <tool_call>, where it is not JSON that stands there."""
_PYTHON_CALL = re.compile(r"\[\w+\(\w+=\w+")
_LLAMA_JSON = re.compile(r'\{\\?"name\\?": function name, \\?"parameters\\?"')

_MARKERS: dict[ToolCallFormat, tuple[str, ...]] = {
    "hermes": ("<tool_call>", "</tool_call>"),
    "mistral": ("[TOOL_CALLS]", "[ARGS]"),
    "llama3_json": ("<|python_tag|>",),
    "pythonic": (),
    "none": (),
}


def has_tools(template: str | None) -> bool:
    """Whether the template reads the variable `tools`. A template that is no Jinja has none."""
    if template is None:
        return False
    before = ""
    try:
        for _, kind, value in jinja2.Environment(autoescape=True).lex(template):
            if kind == "name" and value == "tools" and before != ".":
                return True
            if kind != "whitespace":
                before = value
    except jinja2.TemplateSyntaxError:
        return False
    return False


def find_format(template: str | None) -> ToolCallFormat:
    if not has_tools(template):
        return "none"
    assert template is not None
    if "<tool_call>" in template:
        return "none" if any(tag in template for tag in _OTHER_TAGS) else "hermes"
    if "[TOOL_CALLS]" in template:
        return "mistral"
    if _PYTHON_CALL.search(template):
        return "pythonic"
    if "<|python_tag|>" in template or _LLAMA_JSON.search(template):
        return "llama3_json"
    return "none"


def special_markers(tool_call_format: ToolCallFormat, tokenizer: Tokenizer) -> list[str]:
    """The format's markers that the tokenizer leaves out of a text without special tokens."""
    special = {t.content for t in tokenizer.get_added_tokens_decoder().values() if t.special}
    return [marker for marker in _MARKERS[tool_call_format] if marker in special]
