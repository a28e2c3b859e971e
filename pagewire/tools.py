"""What a chat's model may call and has called, in plain values, and what is wrong with it.

The frontend checks a request's tools before any work, tokenizer_svc those of its own RPC.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from pagewire.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

MAX_TOOLS = 128
MAX_NAME_CHARS = 64

ToolCallFormat = Literal["hermes", "llama3_json", "mistral", "pythonic", "none"]
"""How a model writes its calls; none where that is unknown."""


class Tool(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A function that the model may call."""

    name: str
    description: str = ""
    parameters: dict[str, Any] | None = None
    """A JSON schema of an object; None takes any."""


class ToolCall(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A call that the model made."""

    id: str
    name: str
    arguments: str
    """A JSON object."""


def check_tools(tools: Sequence[Tool]) -> None:
    """Raises InvalidRequest naming the tool's field."""
    if len(tools) > MAX_TOOLS:
        raise InvalidRequest("chat.tools", f"{len(tools)} tools, at most {MAX_TOOLS} are allowed")
    seen: dict[str, int] = {}
    for index, tool in enumerate(tools):
        field = f"chat.tools[{index}]"
        if not 1 <= len(tool.name) <= MAX_NAME_CHARS:
            raise InvalidRequest(
                f"{field}.name",
                f"a tool's name has {len(tool.name)} characters, must have 1 to {MAX_NAME_CHARS}",
            )
        if tool.name in seen:
            raise InvalidRequest(
                f"{field}.name", f"tools {seen[tool.name]} and {index} have the same name"
            )
        seen[tool.name] = index
        if tool.parameters is not None:
            _check_schema(tool.parameters, f"{field}.parameters")


def _check_schema(schema: Mapping[str, Any], field: str) -> None:
    """What tells a schema of an object from something else; the rest is the compiler's."""
    if schema.get("type", "object") != "object":
        raise InvalidRequest(
            f"{field}.type", 'arguments are a JSON object, so the schema\'s type must be "object"'
        )
    properties = schema.get("properties", {})
    if not isinstance(properties, dict):
        raise InvalidRequest(f"{field}.properties", "properties is not an object")
    for name, value in properties.items():
        if not isinstance(value, dict | bool):
            raise InvalidRequest(
                f"{field}.properties.{name[:MAX_NAME_CHARS]}", "the property is not a JSON schema"
            )
    required = schema.get("required", [])
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        raise InvalidRequest(f"{field}.required", "required is not a list of names")


def plain_schema(values: dict[str, Any]) -> dict[str, Any]:
    """A protobuf Struct's content as JSON is usually written: without the fractions that all
    its numbers have, and in the order of the keys, since a Struct has none of its own."""
    tidied: dict[str, Any] = _tidy(values)
    return tidied


def _tidy(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _tidy(value[key]) for key in sorted(value)}
    if isinstance(value, list):
        return [_tidy(element) for element in value]
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        return int(value)
    return value


def read_arguments(call: ToolCall, field: str) -> dict[str, Any]:
    """A past call's arguments; `field` is the call's own. Raises InvalidRequest."""
    if not call.name:
        raise InvalidRequest(f"{field}.name", "the call has no name")
    try:
        arguments = json.loads(call.arguments or "{}", parse_constant=_refuse)
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise InvalidRequest(f"{field}.arguments", "the arguments are not a JSON object")
    return arguments


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")
