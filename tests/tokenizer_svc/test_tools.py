"""Tools in chat templates: written as real ones are, told of and recognized."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from tokenizers import AddedToken

from pagewire.errors import InvalidRequest
from pagewire.tools import Tool, ToolCall, plain_schema
from pagewire.v1 import common_pb2, tokenizer_pb2
from tests.tokenizer_svc.tokenizers_for_tests import sentencepiece_tokenizer
from tokenizer_svc.chat_template import ChatTemplate
from tokenizer_svc.convert import chat_request
from tokenizer_svc.messages import ChatMessage
from tokenizer_svc.tool_format import find_format, has_tools, special_markers

if TYPE_CHECKING:
    from collections.abc import Sequence

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}"
)
HERMES = (
    "{% if tools %}{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}{% endif %}" + CHATML
)
LLAMA = (
    "{% if not tools is defined %}{% set tools = none %}{% endif %}"
    "{% if tools is not none %}Environment: ipython\nAnswer with "
    '{"name": function name, "parameters": dictionary of argument name and its value}.{% endif %}'
    "{% for m in messages %}{% if 'tool_calls' in m %}"
    "{{ m.tool_calls[0].function.arguments | tojson }}{% else %}{{ m.content }}{% endif %}"
    "{% endfor %}"
)
MISTRAL = (
    "{% if tools is not none %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}"
    "{% for m in messages %}{% if m.tool_calls is defined %}[TOOL_CALLS]{% for c in m.tool_calls %}"
    "{% if c.id is not defined or c.id | length != 9 %}{{ raise_exception('nine') }}{% endif %}"
    "{{ c.function | tojson }}{{ c.id }}{% endfor %}{% elif m.role == 'tool' %}"
    "[TOOL_RESULTS]{{ m.tool_call_id }}{{ m.content }}[/TOOL_RESULTS]"
    "{% else %}{{ m.content }}{% endif %}{% endfor %}"
)
PYTHONIC = (
    "{% if tools %}Write [func_name1(params_name1=params_value1, ...), func_name2(params)]"
    "{{ tools }}{% endif %}{% for m in messages %}{{ m.content }}{% endfor %}"
)
PLAIN = "{% for m in messages %}{{ m.content }}{% endfor %}"

PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOL = Tool("weather", "Tells it.", PARAMETERS)
CALL = ToolCall("abcdefgh1", "weather", '{"city": "Oslo"}')
TURNS = [
    ChatMessage("user", "Hi"),
    ChatMessage("assistant", "", [CALL]),
    ChatMessage("tool", "4", [], "abcdefgh1", "weather"),
]


def render(template: str, messages: Sequence[ChatMessage] = TURNS, *tools: Tool) -> str:
    return ChatTemplate(template, {}).render(messages, tools=tools)


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (HERMES, "hermes"),
        (LLAMA, "llama3_json"),
        (MISTRAL, "mistral"),
        (PYTHONIC, "pythonic"),
        ("{{ tools }}<|python_tag|>", "llama3_json"),
        ("{{ tools }}", "none"),
        # Known to no parser of ours: XML inside of the tags.
        ("{{ tools }}<tool_call><function=f>", "none"),
        ("{{ tools }}<tool_call>f<arg_key>", "none"),
        # Markers that stand in a template without tools, and no template.
        (CHATML, "none"),
        ("{{ tools", "none"),
        (None, "none"),
    ],
)
def test_the_format_is_told_from_the_template(template: str | None, expected: str) -> None:
    assert find_format(template) == expected


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (HERMES, True),
        (LLAMA, True),
        (PLAIN, False),
        ("{{ 'tools' }} tools {{ messages.tools }}", False),
        ("{% generation %}{{ tools }}{% endgeneration %}", True),
    ],
)
def test_whether_a_template_has_tools(template: str, expected: bool) -> None:
    assert has_tools(template) is expected


def test_markers_that_are_special_tokens() -> None:
    tokenizer = sentencepiece_tokenizer()
    tokenizer.add_special_tokens(["[TOOL_CALLS]"])
    tokenizer.add_tokens([AddedToken("<tool_call>", special=False)])
    assert special_markers("mistral", tokenizer) == ["[TOOL_CALLS]"]
    assert special_markers("hermes", tokenizer) == []


def test_a_template_gets_what_transformers_gives_it(embedded: Any) -> None:
    """Held against apply_chat_template with the same conversation in OpenAI's words."""
    from transformers import PreTrainedTokenizerFast

    theirs = PreTrainedTokenizerFast(tokenizer_object=embedded.tokenizer)
    function = {"name": "weather", "description": "Tells it.", "parameters": PARAMETERS}
    called = {"name": "weather", "arguments": {"city": "Oslo"}}
    conversation: list[dict[str, Any]] = [
        {"role": "user", "content": "Hi"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "abcdefgh1", "type": "function", "function": called}],
        },
        {"role": "tool", "content": "4", "tool_call_id": "abcdefgh1", "name": "weather"},
    ]
    for template in (HERMES, LLAMA, MISTRAL, PYTHONIC + "{{ messages[1].tool_calls }}"):
        for tools in ([], [TOOL]):
            expected = theirs.apply_chat_template(
                conversation,
                tools=[{"type": "function", "function": function}] if tools else None,
                chat_template=template,
                tokenize=False,
                add_generation_prompt=True,
            )
            assert render(template, TURNS, *tools) == expected
    assert "Oslo" in render(HERMES)
    assert "Tells it." in render(HERMES, TURNS, TOOL)


def test_a_tool_without_parameters_takes_none() -> None:
    text = render("{{ tools | tojson }}", TURNS[:1], Tool("now"))
    assert json.loads(text)[0]["function"]["parameters"] == {"type": "object", "properties": {}}


@pytest.mark.parametrize(
    ("template", "messages", "tools", "field"),
    [
        (PLAIN, TURNS[:1], [TOOL], "chat.tools"),
        (PLAIN, TURNS, [], "chat.messages[1].tool_calls"),
        (
            HERMES,
            [ChatMessage("assistant", "", [ToolCall("", "f", "[1]")])],
            [],
            "chat.messages[0].tool_calls[0].arguments",
        ),
        (
            HERMES,
            [ChatMessage("assistant", "", [CALL, ToolCall("", "", "{}")])],
            [],
            "chat.messages[0].tool_calls[1].name",
        ),
        # The template's own word.
        (MISTRAL, [ChatMessage("assistant", "", [ToolCall("1", "f", "")])], [], "chat"),
    ],
)
def test_what_cannot_be_rendered_is_refused(
    template: str, messages: list[ChatMessage], tools: list[Tool], field: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        render(template, messages, *tools)
    assert caught.value.field == field


def test_tools_are_no_template_kwargs() -> None:
    with pytest.raises(InvalidRequest) as caught:
        ChatTemplate(HERMES, {}).render(TURNS, template_kwargs={"tools": []})
    assert caught.value.field == "chat.template_kwargs.tools"


def test_the_rpc_takes_tools() -> None:
    chat = common_pb2.ChatInput(messages=[common_pb2.ChatMessage(role="user", content="Hi")])
    tool = chat.tools.add(name="weather", description="Tells it.")
    tool.parameters.update({"type": "object", "minProperties": 1})
    job = chat_request(tokenizer_pb2.ApplyChatTemplateRequest(chat=chat))(7)
    assert job.tools == [Tool("weather", "Tells it.", {"minProperties": 1, "type": "object"})]
    assert isinstance(job.tools[0].parameters["minProperties"], int)  # type: ignore[index]
    chat.tools.add(name="weather")
    with pytest.raises(InvalidRequest) as caught:
        chat_request(tokenizer_pb2.ApplyChatTemplateRequest(chat=chat))
    assert caught.value.field == "chat.tools[1].name"


def test_a_schema_reads_as_it_was_written() -> None:
    assert list(plain_schema({"b": [{"d": 1.0, "c": 2.5}], "a": True})) == ["a", "b"]
    assert json.dumps(plain_schema({"b": [{"d": 1.0, "c": 2.5}], "a": True})) == (
        '{"a": true, "b": [{"c": 2.5, "d": 1}]}'
    )
