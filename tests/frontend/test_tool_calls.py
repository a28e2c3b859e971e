"""Tools in a chat: what is refused, what is rendered and forced, and how calls come back."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import grpc
import pytest

from frontend.convert.calls import generate_call
from frontend.validate import Limits, validate
from pagewire.errors import InvalidRequest
from pagewire.types import StructuredOutput
from pagewire.v1 import common_pb2, inference_pb2
from tests.support.fake_engine import EOS
from tests.support.grammars import compiler, draw, vocabulary

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.fake_engine import FakeRequest

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL_CALLS = common_pb2.FINISH_REASON_TOOL_CALLS
STOP = common_pb2.FINISH_REASON_STOP
LENGTH = common_pb2.FINISH_REASON_LENGTH


def tool(name: str = "weather", parameters: Any = CITY) -> common_pb2.Tool:
    made = common_pb2.Tool(name=name, description="Tells it.")
    if parameters is not None:
        made.parameters.update(parameters)
    return made


def chat(*tools: common_pb2.Tool, **fields: Any) -> common_pb2.ChatInput:
    messages = [common_pb2.ChatMessage(role="user", content="Hi")]
    return common_pb2.ChatInput(**{"messages": messages, "tools": tools, **fields})


def choice(**kind: Any) -> common_pb2.ToolChoice:
    return common_pb2.ToolChoice(**kind)


def writes(text: str) -> Callable[[FakeRequest], int]:
    """An engine that writes a text, a byte at a time, and ends."""
    ids = [*text.encode(), EOS]
    return lambda request: ids[min(len(request.output), len(ids) - 1)]


def limits(**tools: Any) -> Limits:
    return Limits(
        **{
            "model": "m",
            "max_model_len": 100,
            "vocab_size": 300,
            "eos_token_ids": (256,),
            "default_sampling": {},
            "has_chat_template": True,
            "chat_template_has_tools": True,
            "tool_call_format": "hermes",
            **tools,
        }
    )


def job_of(asked: common_pb2.ChatInput, served: Limits | None = None, **sampling: Any) -> Any:
    request = inference_pb2.GenerateRequest(
        chat=asked, sampling_params=common_pb2.SamplingParams(**sampling)
    )
    return validate(generate_call(request), served or limits(), "r1")


def past_call(arguments: str, name: str = "weather") -> list[common_pb2.ChatMessage]:
    call = common_pb2.ToolCall(id="abc", name=name, arguments=arguments)
    return [common_pb2.ChatMessage(role="assistant", tool_calls=[call])]


REFUSED: dict[str, tuple[Any, str]] = {
    "no name": (chat(tool(), tool("")), "chat.tools[1].name"),
    "long name": (chat(tool("x" * 65)), "chat.tools[0].name"),
    "twice": (chat(tool(), tool("b"), tool()), "chat.tools[2].name"),
    "too many": (chat(*(tool(f"t{i}") for i in range(129))), "chat.tools"),
    "not of an object": (chat(tool(parameters={"type": "array"})), "chat.tools[0].parameters.type"),
    "properties": (
        chat(tool(parameters={"properties": [1]})),
        "chat.tools[0].parameters.properties",
    ),
    "a property": (
        chat(tool(parameters={"properties": {"city": "string"}})),
        "chat.tools[0].parameters.properties.city",
    ),
    "required": (
        chat(tool(parameters={"required": "city"})),
        "chat.tools[0].parameters.required",
    ),
    "not JSON": (chat(tool(parameters={"maximum": float("nan")})), "chat.tools[0].parameters"),
    "a choice of nothing": (chat(tool(), tool_choice=choice()), "chat.tool_choice"),
    "not auto": (chat(tool(), tool_choice=choice(auto=False)), "chat.tool_choice.auto"),
    "not required": (chat(tool(), tool_choice=choice(required=False)), "chat.tool_choice.required"),
    "required, no tools": (chat(tool_choice=choice(required=True)), "chat.tool_choice"),
    "named, no tools": (chat(tool_choice=choice(name="weather")), "chat.tool_choice"),
    "unknown name": (chat(tool(), tool_choice=choice(name="wether")), "chat.tool_choice.name"),
    "call without a name": (
        chat(messages=past_call("{}", name="")),
        "chat.messages[0].tool_calls[0].name",
    ),
    "call without JSON": (
        chat(messages=past_call("{city}")),
        "chat.messages[0].tool_calls[0].arguments",
    ),
    "call without an object": (
        chat(messages=past_call("[NaN]")),
        "chat.messages[0].tool_calls[0].arguments",
    ),
    "long schema": (
        chat(tool(parameters={"title": "x" * 70_000}), tool_choice=choice(required=True)),
        "chat.tools",
    ),
}


@pytest.mark.parametrize(("asked", "field"), REFUSED.values(), ids=REFUSED)
def test_what_is_wrong_is_named(asked: common_pb2.ChatInput, field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        job_of(asked)
    assert caught.value.field == field


def test_what_the_server_cannot_do_is_refused() -> None:
    silent = limits(chat_template_has_tools=False, tool_call_format="none")
    for tool_choice in (None, choice(required=True), choice(none=True)):
        with pytest.raises(InvalidRequest, match="has no tools") as caught:
            job_of(chat(tool(), tool_choice=tool_choice), silent)
        assert caught.value.field == "chat.tools"
    unread = limits(tool_call_format="none")
    with pytest.raises(InvalidRequest, match="--tool-call-parser") as caught:
        job_of(chat(tool()), unread)
    assert caught.value.field == "chat.tool_choice"
    # Neither needs the model's own format.
    assert job_of(chat(tool(), tool_choice=choice(none=True)), unread).tools.format is None
    assert job_of(chat(tool(), tool_choice=choice(name="weather")), unread).tools.format is not None
    # No tools, no question.
    assert job_of(chat(tool_choice=choice(auto=True)), silent).tools.format is None


def test_a_forced_call_excludes_another_constraint() -> None:
    own = common_pb2.StructuredOutput(regex="a")
    asked = chat(tool(), tool_choice=choice(required=True))
    with pytest.raises(InvalidRequest) as caught:
        job_of(asked, structured_output=own)
    assert caught.value.field == "sampling_params.structured_output"
    assert job_of(chat(tool()), structured_output=own).sampling.structured_output.kind == "regex"
    with pytest.raises(InvalidRequest) as caught:
        job_of(asked, ignore_eos=True)
    assert caught.value.field == "sampling_params.ignore_eos"


TREE = {
    "type": "object",
    "properties": {"kids": {"type": "array", "items": {"$ref": "#"}, "maxItems": 1}},
    "additionalProperties": False,
}
SHELF = {
    "type": "object",
    "properties": {"size": {"$ref": "#/$defs/size"}},
    "required": ["size"],
    "additionalProperties": False,
    "$defs": {"size": {"enum": [1, 2]}},
}


def test_whatever_is_drawn_the_required_calls_fit() -> None:
    """Random logits under the constraint, with schemas that refer to themselves."""
    tools = [tool("tree", TREE), tool("shelf", SHELF), tool("now", {})]
    job = job_of(chat(*tools, tool_choice=choice(required=True)))
    wanted = job.sampling.structured_output
    assert isinstance(wanted, StructuredOutput)
    spaces = {i: -30.0 for i, token in enumerate(vocabulary().tokens) if not token.strip()}
    drawn = draw(compiler().compile(wanted), range(8), max_tokens=50, bias=spaces)
    ended = [it.text for it in drawn if it.ended]
    called = [call for text in ended for call in json.loads(text)]
    assert len(called) >= 5
    assert len({call["name"] for call in called}) >= 2
    for call in called:
        assert call.keys() == {"name", "parameters"}
        if call["name"] == "shelf":
            assert call["parameters"]["size"] in (1, 2)
        elif call["name"] == "tree":
            assert call["parameters"].keys() <= {"kids"}
    parser = job.tools.parser()
    told = [*parser.feed(ended[0]).calls, *parser.finish().calls]
    assert [call.name for call in told] == [call["name"] for call in json.loads(ended[0])]


ANSWER = (
    'I look.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo 🦜"}}\n</tool_call>\n'
    '<tool_call>{"name": "now"}</tool_call>'
)


async def test_calls_come_back(make_stack: Any) -> None:
    stack = await make_stack(next_token=writes(ANSWER))
    asked = chat(tool(), tool("now", None))
    collected = await stack.stream(chat=asked)
    (rendered,) = stack.tokenizer.chats
    assert rendered == asked
    response = await stack.unary(chat=asked)
    (output,) = response.outputs
    (end,) = collected.final.outputs
    streamed = [call for delta in collected.deltas for call in delta.tool_calls]
    for text, calls, reason in (
        (collected.text, streamed, end.finish_reason),
        (output.text, list(output.tool_calls), output.finish_reason),
    ):
        assert text == "I look."
        assert [(c.name, json.loads(c.arguments)) for c in calls] == [
            ("weather", {"city": "Oslo 🦜"}),
            ("now", {}),
        ]
        # Mistral's templates take ids of nine letters and digits back, and no others.
        assert all(len(c.id) == 9 and c.id.isalnum() for c in calls)
        assert len({c.id for c in calls}) == 2
        assert reason == TOOL_CALLS
    assert end.stop_match.eos_token_id == EOS
    # What was called can be asked with.
    turn = common_pb2.ChatMessage(
        role="assistant", content=output.text, tool_calls=output.tool_calls
    )
    told = common_pb2.ChatMessage(
        role="tool", content="4", tool_call_id=streamed[0].id, name="weather"
    )
    again = chat(*asked.tools, messages=[*asked.messages, turn, told])
    assert (await stack.unary(chat=again)).outputs[0].finish_reason == TOOL_CALLS
    assert stack.tokenizer.chats[-1] == again


async def test_each_sequence_is_read_by_itself(make_stack: Any) -> None:
    def by_index(request: FakeRequest) -> int:
        return writes(ANSWER if request.add.sample_index else "No.")(request)

    stack = await make_stack(next_token=by_index)
    response = await stack.unary(chat=chat(tool()), sampling_params=common_pb2.SamplingParams(n=3))
    assert [len(o.tool_calls) for o in response.outputs] == [0, 2, 2]
    assert [o.finish_reason for o in response.outputs] == [STOP, TOOL_CALLS, TOOL_CALLS]
    assert [o.text for o in response.outputs] == ["No.", "I look.", "I look."]


@pytest.mark.parametrize(
    ("max_tokens", "reason", "num_calls", "text"),
    [
        (len(ANSWER.encode()), LENGTH, 2, "I look."),
        (40, LENGTH, 0, ANSWER[:40]),
        (len(ANSWER.encode()) + 1, TOOL_CALLS, 2, "I look."),
    ],
)
async def test_a_cut_text(
    make_stack: Any, max_tokens: int, reason: int, num_calls: int, text: str
) -> None:
    """What is no whole call is text; and a cut is no call to wait for."""
    stack = await make_stack(next_token=writes(ANSWER))
    params = common_pb2.SamplingParams(max_tokens=max_tokens)
    (output,) = (await stack.unary(chat=chat(tool()), sampling_params=params)).outputs
    assert output.text == text
    assert len(output.tool_calls) == num_calls
    assert output.finish_reason == reason


async def test_without_tools_nothing_is_read(make_stack: Any) -> None:
    stack = await make_stack(next_token=writes(ANSWER))
    for asked in (chat(), chat(tool(), tool_choice=choice(none=True))):
        (output,) = (await stack.unary(chat=asked)).outputs
        assert output.text == ANSWER
        assert output.finish_reason == STOP
        assert not output.tool_calls
    # The model is told of tools that it must not call, as it may be asked about them.
    assert len(stack.tokenizer.chats[-1].tools) == 1


async def test_a_named_call_is_the_whole_text(make_stack: Any) -> None:
    stack = await make_stack(next_token=writes('{"city": "Oslo"}'))
    response = await stack.unary(chat=chat(tool(), tool_choice=choice(name="weather")))
    (output,) = response.outputs
    assert output.text == ""
    assert [(c.name, c.arguments) for c in output.tool_calls] == [("weather", '{"city": "Oslo"}')]
    assert output.finish_reason == TOOL_CALLS
    (add,) = [c for c in stack.engine.commands if type(c).__name__ == "Add"]
    wanted = add.sampling.structured_output
    assert wanted.kind == "json_schema"
    assert json.loads(wanted.text) == CITY


async def test_markers_that_are_special_tokens_are_asked_for(make_stack: Any) -> None:
    """They stay in the text for the parser, unless the client wants special tokens itself."""
    stack = await make_stack(
        next_token=writes("[TOOL_CALLS] no"),
        tokenizer_options={
            "tool_call_format": "mistral",
            "tool_call_special_tokens": ("[TOOL_CALLS]",),
        },
    )
    (hidden,) = (await stack.unary(chat=chat(tool()))).outputs
    assert hidden.text == " no"
    params = common_pb2.SamplingParams(skip_special_tokens=False)
    (shown,) = (await stack.unary(chat=chat(tool()), sampling_params=params)).outputs
    assert shown.text == "[TOOL_CALLS] no"
    opens = [o for message in stack.tokenizer.messages for o in message.opens]
    assert [list(o.kept_special_tokens) for o in opens] == [["[TOOL_CALLS]"], []]


async def test_a_schema_that_the_engine_refuses_is_the_tools(manual: Any) -> None:
    call = manual.open(chat=chat(tool(), tool_choice=choice(required=True)))
    (request,) = await manual.engine.wait_running()
    manual.engine.refuse(request.id, "no such", "sampling_params.structured_output.json_schema")
    failure = await manual.fails(call)
    assert failure.code is grpc.StatusCode.INVALID_ARGUMENT
    assert failure.fields == ["chat.tools"]
