"""Tool calls read back from text: each format, and any way of cutting the text."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from frontend.tool_calls.formats import (
    Hermes,
    Llama3Json,
    Mistral,
    NamedCall,
    Pythonic,
    RequiredCalls,
)
from frontend.tool_calls.json_scanner import Broken, ObjectScanner, members
from frontend.tool_calls.parser import ToolCallParser

if TYPE_CHECKING:
    from collections.abc import Sequence

    from frontend.tool_calls.parser import Format

NAMES = frozenset({"f", "g", "geo.find"})
LLAMA, PYTHONIC = Llama3Json(NAMES), Pythonic(NAMES)

Told = tuple[str, list[tuple[str, str]]]


def told_of(call_format: Format, pieces: Sequence[str], hidden: Sequence[str] = ()) -> Told:
    """Text and calls of a text that comes in pieces."""
    parser = ToolCallParser(call_format, hidden)
    parsed = [*map(parser.feed, pieces), parser.finish()]
    calls = [tuple(call) for part in parsed for call in part.calls]
    assert parser.num_calls == len(calls)
    return "".join(part.text for part in parsed), calls  # type: ignore[return-value]


F1 = '{"name": "f", "arguments": {"a": 1}}'
G = '{"name": "g"}'
CALL_F1, CALL_G = ("f", '{"a": 1}'), ("g", "{}")

CASES: list[tuple[Format, str, Told]] = [
    (Hermes(), "No calls.\n", ("No calls.\n", [])),
    (Hermes(), f"<tool_call>\n{F1}\n</tool_call>", ("", [CALL_F1])),
    (
        Hermes(),
        f"I look.\n<tool_call>{F1}</tool_call>\n<tool_call>\n{G}</tool_call>\n",
        ("I look.", [CALL_F1, CALL_G]),
    ),
    (Hermes(), f"a <tool_call>{G}</tool_call> b", ("a b", [CALL_G])),
    # The end of the text, or its limit, came before the closing tag.
    (Hermes(), f"<tool_call>{G}", ("", [CALL_G])),
    (Hermes(), f"<tool_call>{G}</tool", ("", [CALL_G])),
    (Hermes(), '<tool_call>{"name": "f', ('<tool_call>{"name": "f', [])),
    (Hermes(), "a < b <tool_calls> <tool", ("a < b <tool_calls> <tool", [])),
    (
        Hermes(),
        '<tool_call>{"name": "f", "arguments": {"a": "</tool_call>}{\\"["}}</tool_call>',
        ("", [("f", '{"a": "</tool_call>}{\\"["}')]),
    ),
    # Some write the arguments as text, or as nothing.
    (Hermes(), '<tool_call>{"name":"f","arguments":"{\\"a\\":1}"}', ("", [("f", '{"a":1}')])),
    (Hermes(), '<tool_call>{"name":"f","arguments":null}', ("", [("f", "{}")])),
    # No calls, and the next one is.
    (
        Hermes(),
        f'<tool_call>{{"name": f}}</tool_call>\n<tool_call>{G}</tool_call>',
        ('<tool_call>{"name": f}</tool_call>', [CALL_G]),
    ),
    (Hermes(), "<tool_call>[]</tool_call>", ("<tool_call>[]</tool_call>", [])),
    (Mistral(), f"[TOOL_CALLS][{F1}, {G}]", ("", [CALL_F1, CALL_G])),
    (Mistral(), f"Wait.\n[TOOL_CALLS] [{G}]\nDone [x].", ("Wait.\nDone [x].", [CALL_G])),
    (Mistral(), f"[TOOL_CALLS]{G}", ("", [CALL_G])),
    (Mistral(), '[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g{}', ("", [CALL_F1, CALL_G])),
    (Mistral(), "[TOOL_CALLS][]", ("[TOOL_CALLS][]", [])),
    (Mistral(), f"[TOOL_CALLS][{G}, 7]", (", 7]", [CALL_G])),
    (Mistral(), "[TOOL_CALLS] nothing", ("[TOOL_CALLS] nothing", [])),
    (LLAMA, '{"name": "f", "parameters": {"a": 1}}', ("", [CALL_F1])),
    (
        LLAMA,
        ' {"name": "f", "parameters": {"a": 1}}; {"name": "g", "parameters": {}}',
        ("", [CALL_F1, CALL_G]),
    ),
    (LLAMA, f"Well <|python_tag|>{F1}", ("Well", [CALL_F1])),
    (LLAMA, "<|python_tag|>print(1)", ("<|python_tag|>print(1)", [])),
    # JSON that is an answer, and prose.
    (LLAMA, '{"name": "Ada", "age": 36}', ('{"name": "Ada", "age": 36}', [])),
    (LLAMA, '{"name": "f"}', ('{"name": "f"}', [])),
    (LLAMA, "{braces} are fine", ("{braces} are fine", [])),
    (LLAMA, f"Say {F1}", (f"Say {F1}", [])),
    (
        PYTHONIC,
        "[f(a=1, b='x])', c=[true, None, -2.5], d={\"k\": (1,)}), geo.find()]",
        (
            "",
            [
                ("f", '{"a": 1, "b": "x])", "c": [true, null, -2.5], "d": {"k": [1]}}'),
                ("geo.find", "{}"),
            ],
        ),
    ),
    (PYTHONIC, " [g()] then", (" then", [CALL_G])),
    *[
        (PYTHONIC, text, (text, []))
        for text in (
            "[1, 2]",
            "[see(1)]",
            "[f(1)]",
            "[f(a=b)]",
            "[f(**{})]",
            "[unknown(a=1)]",
            "[f(a=1e999)]",
            "[f(a='\\ud800')]",
            "[f(a='\n')]",
            "[f(a=1)",
            "[f(a=(1]",
            "[f (x) for x in y]",
            "Hello [f(a=1)]",
            "[f(a=f'{b}')]",
        )
    ],
    (RequiredCalls(), f"[{F1},{G}]", ("", [CALL_F1, CALL_G])),
    (RequiredCalls(), f'[{F1}, {{"na', (', {"na', [CALL_F1])),
    (NamedCall("f"), '{"a": 1}', ("", [CALL_F1])),
    (NamedCall("f"), '{"a": ', ('{"a": ', [])),
]


@pytest.mark.parametrize(("call_format", "text", "expected"), CASES)
def test_each_format(call_format: Format, text: str, expected: Told) -> None:
    assert told_of(call_format, [text]) == expected
    assert told_of(call_format, list(text)) == expected


@given(st.data())
def test_the_cuts_do_not_matter(data: st.DataObject) -> None:
    """What is told of a text depends on the text alone."""
    call_format = data.draw(st.sampled_from([Hermes(), Mistral(), LLAMA, PYTHONIC]))
    markers = ["<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>"]
    calls = [F1, G, '{"name": "g", "parameters": {}}', "[f(a=1)]"]
    rest = [
        "[",
        "]",
        "f",
        "(",
        '{"',
        "}",
        ";",
        "\\",
        " ",
        "\n",
        "\u00a0",
        "\x00",
        "text",
        "<",
        "🦜",
    ]
    parts = st.sampled_from([*markers, *calls, *rest])
    text = "".join(data.draw(st.lists(parts, max_size=12)))
    hidden = data.draw(st.sampled_from([(), ("[TOOL_CALLS]", "[ARGS]"), ("<|python_tag|>",)]))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=20)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    whole = told_of(call_format, [text], hidden)
    assert told_of(call_format, pieces, hidden) == whole
    assert not any(token in whole[0] for token in hidden)


def test_text_flows_and_markers_do_not_leak() -> None:
    parser = ToolCallParser(Hermes())
    seen = [parser.feed(piece) for piece in ("Look: ", "<tool", "s> ", "<tool_", "call>", G)]
    assert [part.text for part in seen] == ["Look:", "", " <tools>", "", "", ""]
    assert [len(part.calls) for part in seen] == [0, 0, 0, 0, 0, 1]


def test_special_tokens_that_announce_nothing_are_not_shown() -> None:
    hidden = ("[TOOL_CALLS]", "[ARGS]")
    assert told_of(Mistral(), ["a [TOOL_CALLS]x [ARGS] b"], hidden) == ("a x  b", [])


@pytest.mark.parametrize("opening", ['{"a":', "["])
def test_nesting_is_bounded(opening: str) -> None:
    """What json and ast would recurse into is text, however deep."""
    deep = opening * 5000
    for call_format, text in [
        (Hermes(), '<tool_call>{"name": "f", "arguments": {"x":' + deep),
        (PYTHONIC, "[f(a=" + deep),
    ]:
        assert told_of(call_format, [text]) == (text, [])


def test_a_name_that_protobuf_cannot_hold_is_text() -> None:
    text = '<tool_call>{"name": "\\ud83e", "arguments": {}}</tool_call>'
    assert told_of(Hermes(), [text]) == (text, [])


def test_a_number_that_python_does_not_read_is_text() -> None:
    text = '<tool_call>{"name": "f", "arguments": {"a": ' + "1" * 5000 + "}}</tool_call>"
    assert told_of(Hermes(), [text]) == (text, [])


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)  # fmt: skip


@given(
    st.dictionaries(st.text(), JSON_VALUES, max_size=3), st.booleans(), st.sampled_from([None, 1])
)
def test_the_scanner_ends_where_json_does(
    of: dict[str, object], ascii_only: bool, indent: int | None
) -> None:
    text = json.dumps(of, ensure_ascii=ascii_only, indent=indent)
    scanner = ObjectScanner(0)
    for end in range(1, len(text)):
        assert scanner.end(text[:end]) is None
    assert scanner.end(text + '"}') == len(text)
    found = {member.key: member for member in members(text)}
    assert {key: member.value for key, member in found.items()} == of
    assert {key: json.loads(member.text) for key, member in found.items()} == of


@given(st.text(alphabet='{}[]",:\\u0a1-.e tfn', max_size=12))
def test_the_scanner_refuses_what_is_no_json(rest: str) -> None:
    """Held against the standard library: it ends at the first whole object, if there is one."""
    text = "{" + rest
    try:
        _, expected = json.JSONDecoder().raw_decode(text)
    except ValueError:
        expected = None
    try:
        found = ObjectScanner(0).end(text)
    except Broken:
        found = None
    assert found == expected
