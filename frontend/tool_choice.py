"""What a chat's tools and tool_choice come to: how calls are read, and what is forced."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from frontend.request import ChatPrompt, StructuredOutputCall
from frontend.tool_calls.formats import NamedCall, RequiredCalls, format_of
from frontend.tool_plan import ToolPlan
from pagewire.errors import InvalidRequest
from pagewire.tools import check_tools, read_arguments
from pagewire.types import MAX_CONSTRAINT_CHARS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from frontend.request import Prompt, SamplingCall
    from frontend.validate import Limits
    from pagewire.tools import Tool

FIELD = "chat.tool_choice"


def plan_tools(prompt: Prompt, sampling: SamplingCall, limits: Limits) -> ToolPlan:
    """Raises InvalidRequest."""
    if not isinstance(prompt, ChatPrompt):
        return ToolPlan()
    check_tools(prompt.tools)
    for index, message in enumerate(prompt.messages):
        for number, call in enumerate(message.tool_calls):
            read_arguments(call, f"chat.messages[{index}].tool_calls[{number}]")
    choice = _choice(prompt)
    if prompt.tools and not limits.chat_template_has_tools:
        raise InvalidRequest("chat.tools", "the model's chat template has no tools")
    if choice == "none" or not prompt.tools:
        return ToolPlan()
    if choice == "auto":
        return _auto_plan(prompt.tools, sampling, limits)
    if sampling.structured_output is not None:
        raise InvalidRequest(
            "sampling_params.structured_output",
            "structured_output excludes a tool_choice that forces a call",
        )
    if choice == "required":
        return ToolPlan(RequiredCalls(), (), _constraint(_calls_schema(prompt.tools)))
    assert prompt.tool_choice is not None
    tool = next(tool for tool in prompt.tools if tool.name == prompt.tool_choice.name)
    return ToolPlan(NamedCall(tool.name), (), _constraint(_arguments_schema(tool)))


def _choice(prompt: ChatPrompt) -> str:
    asked = prompt.tool_choice
    if asked is None:
        return "auto"
    if asked.kind is None:
        raise InvalidRequest(FIELD, "set one of auto, none, required and name")
    if asked.kind != "name" and not asked.flag:
        raise InvalidRequest(f"{FIELD}.{asked.kind}", f"{asked.kind} can only be true")
    if asked.kind in ("required", "name") and not prompt.tools:
        raise InvalidRequest(FIELD, "there are no tools to call")
    if asked.kind == "name" and all(tool.name != asked.name for tool in prompt.tools):
        raise InvalidRequest(f"{FIELD}.name", f"there is no tool {asked.name[:64]!r}")
    return asked.kind


def _auto_plan(tools: Sequence[Tool], sampling: SamplingCall, limits: Limits) -> ToolPlan:
    if limits.tool_call_format == "none":
        raise InvalidRequest(
            FIELD,
            "the server does not know how the model writes calls (see --tool-call-parser), so "
            "tool_choice must be none, required or a name",
        )
    call_format = format_of(limits.tool_call_format, frozenset(tool.name for tool in tools))
    markers = limits.tool_call_special_tokens if sampling.skip_special_tokens else ()
    return ToolPlan(call_format, markers)


def _constraint(schema: dict[str, Any]) -> StructuredOutputCall:
    text = json.dumps(schema, ensure_ascii=False)
    limit = MAX_CONSTRAINT_CHARS["json_schema"]
    if len(text) > limit:
        raise InvalidRequest(
            "chat.tools",
            f"the schema of a call has {len(text)} characters, at most {limit} are allowed",
        )
    return StructuredOutputCall("json_schema", text)


def _arguments_schema(tool: Tool) -> dict[str, Any]:
    return {"type": "object", **(tool.parameters or {})}


def _calls_schema(tools: Sequence[Tool]) -> dict[str, Any]:
    """At least one call to any of the tools. References within a tool's schema are to that
    schema, which is no longer the root."""
    schemas = {
        f"tool{index}": _moved(_arguments_schema(tool), f"#/$defs/tool{index}")
        for index, tool in enumerate(tools)
    }
    calls = [
        {
            "type": "object",
            "properties": {
                "name": {"const": tool.name},
                "parameters": {"$ref": f"#/$defs/tool{index}"},
            },
            "required": ["name", "parameters"],
            "additionalProperties": False,
        }
        for index, tool in enumerate(tools)
    ]
    return {"type": "array", "minItems": 1, "items": {"anyOf": calls}, "$defs": schemas}


def _moved(value: Any, root: str) -> Any:
    if isinstance(value, list):
        return [_moved(element, root) for element in value]
    if not isinstance(value, dict):
        return value
    moved = {key: _moved(element, root) for key, element in value.items()}
    reference = moved.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        moved["$ref"] = root + reference[1:]
    return moved
