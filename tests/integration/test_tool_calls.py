"""Tool calls over the whole stack, with a template that has tools."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from pagewire.client import Ask, Client
from tests.support.stack import Stack, running_stack

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

TEMPLATE = (
    "{% if tools %}{% for tool in tools %}{{ tool | tojson }}{% endfor %} <tool_call>{% endif %}"
    "{% for m in messages %}{{ m.role }}:{{ m.content }}{% for c in m.tool_calls %}"
    "{{ c.function | tojson }}{% endfor %}\n{% endfor %}"
)
WEATHER = {
    "name": "weather",
    "description": "Tells it.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"enum": ["Oslo", "Turku"]}, "days": {"enum": [1, 2]}},
        "required": ["city", "days"],
        "additionalProperties": False,
    },
}
ANSWER = 'So: <tool_call>{"name": "weather", "arguments": {"city": "Oslo", "days": 1}}</tool_call>'


@pytest.fixture(scope="module")
def stack(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    template = tmp_path_factory.mktemp("tools") / "template.jinja"
    template.write_text(TEMPLATE)
    with running_stack(
        f"--model={tiny_model}", f"--chat-template={template}", "--device=cpu", "--dtype=float32"
    ) as stack:
        yield stack


@pytest.fixture
def client(stack: Stack) -> Iterator[Client]:
    with Client(stack.address) as client:
        yield client


def ask(**fields: Any) -> Ask:
    return Ask(**{"messages": [("user", "How is it?")], "tools": [WEATHER], **fields})


def test_a_call_that_the_model_wrote(client: Client) -> None:
    """Forced by a choice; then asked with again."""
    wrote = {"structured_output": {"choice": {"texts": [ANSWER]}}}
    (output,) = client.generate(ask(sampling=wrote))["outputs"]
    assert output["text"] == "So:"
    assert output["finish_reason"] == "FINISH_REASON_TOOL_CALLS"
    (call,) = output["tool_calls"]
    assert (call["name"], json.loads(call["arguments"])) == ("weather", {"city": "Oslo", "days": 1})
    stream = client.stream(ask(sampling=wrote))
    assert "".join(stream) == "So:"
    assert [(c["name"], c["arguments"]) for c in stream.tool_calls] == [
        ("weather", call["arguments"])
    ]
    assert stream.final is not None
    assert stream.final["outputs"][0]["finish_reason"] == "FINISH_REASON_TOOL_CALLS"
    turns = [
        ("user", "How is it?"),
        {"role": "assistant", "content": "So:", "tool_calls": [call]},
        {"role": "tool", "content": "4", "tool_call_id": call["id"]},
    ]
    again = client.generate(ask(messages=turns, sampling={"max_tokens": 1}))
    first = client.generate(ask(sampling={"max_tokens": 1}))
    assert again["usage"]["prompt_tokens"] > first["usage"]["prompt_tokens"]


@pytest.mark.parametrize("tool_choice", ["required", "weather"])
@pytest.mark.parametrize("seed", [1, 2])
def test_a_call_that_is_forced_fits_its_schema(client: Client, tool_choice: str, seed: int) -> None:
    # Random weights: without a bias to end there would be many calls.
    sampling = {"seed": seed, "temperature": 2, "logit_bias": {ord("]"): 100, ord(","): -5}}
    now = {"name": "now", "parameters": {"additionalProperties": False}}
    answer = client.generate(
        ask(tools=[WEATHER, now], tool_choice=tool_choice, sampling={"max_tokens": 2000} | sampling)
    )
    (output,) = answer["outputs"]
    assert output["finish_reason"] == "FINISH_REASON_TOOL_CALLS", output
    assert output["text"] == ""
    assert output["tool_calls"]
    for call in output["tool_calls"]:
        arguments = json.loads(call["arguments"])
        if call["name"] == "weather":
            assert arguments["city"] in ("Oslo", "Turku")
            assert arguments["days"] in (1, 2)
            assert len(arguments) == 2
        else:
            assert (call["name"], tool_choice) == ("now", "required")
