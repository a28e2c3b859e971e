"""Constraints over the embedded model's tokens: what they let through, and what they refuse."""

from __future__ import annotations

import json
import re
import threading
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from engine_core.grammar.compiler import GrammarCompiler
from engine_core.grammar.gate import GrammarGate
from engine_core.grammar.grammar import BadConstraint
from engine_core.grammar.vocabulary import read_vocabulary
from pagewire.config import EMBEDDED_MODEL
from pagewire.errors import ModelLoadError
from pagewire.model_source import ModelSource, resolve_model
from pagewire.types import MAX_CONSTRAINT_CHARS, MAX_JSON_WHITESPACE, StructuredOutput
from tests.support.grammars import (
    EOS,
    VOCAB_SIZE,
    choice,
    compiler,
    draw,
    schema,
    vocabulary,
)
from tests.support.tiny_model import TinySpec, write_hf
from tokenizer_svc.loader import load_tokenizer
from tokenizer_svc.token_bytes import token_bytes

if TYPE_CHECKING:
    from pathlib import Path

SEEDS = range(12)
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
CHOICES = ("🦜 日本語 ไทย", "yes", "yes, sir", 'a "quoted"\\\n\ttext/')
ARITHMETIC = 'start: NUMBER (("+" | "-") NUMBER)? ";"\nNUMBER: /[0-9]{1,3}/'


def check_person(text: str) -> None:
    person: Any = json.loads(text)
    assert list(person) == ["name", "age", "tags"]
    assert len(person["name"]) <= 6
    assert 0 <= person["age"] <= 150
    assert len(person["tags"]) <= 3
    assert set(person["tags"]) <= {"a", "b"}


@pytest.mark.parametrize("source", ["gguf", "hf"])
def test_the_vocabulary_is_the_tokenizer_s(source: str, tmp_path: Path) -> None:
    path = (
        resolve_model(EMBEDDED_MODEL).path if source == "gguf" else write_hf(tmp_path, TinySpec())
    )
    read = read_vocabulary(resolve_model(str(path)), VOCAB_SIZE)
    tables = token_bytes(load_tokenizer(path).tokenizer)
    assert tables is not None
    assert len(read.tokens) == VOCAB_SIZE
    assert {at: token for at, token in enumerate(read.tokens) if token} == tables.all_tokens
    plain = {at for at, token in tables.no_special.items() if token}
    assert read.special_ids == tables.all_tokens.keys() - plain


def test_a_vocabulary_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text('{"decoder": {"type": "WordPiece"}}')
    with pytest.raises(ModelLoadError, match="decoder is not known to grammars"):
        read_vocabulary(ModelSource("hf", tmp_path, "odd"), 100)

    def unreadable() -> Any:
        return read_vocabulary(ModelSource("hf", tmp_path / "nowhere", "odd"), 100)

    with pytest.raises(BadConstraint, match=r"tokenizer\.json: cannot be read"):
        GrammarCompiler(unreadable, (EOS,)).compile(choice("a"))


def test_json_by_schema() -> None:
    for drawn in draw(compiler().compile(schema(PERSON)), SEEDS):
        assert drawn.ended, drawn.text
        check_person(drawn.text)


def test_any_json_object() -> None:
    quote, close = (vocabulary().tokens.index(token) for token in (b'"', b"}"))
    ended = 0
    bias = {quote: 9.0, close: 9.0}
    for drawn in draw(compiler().compile(StructuredOutput("json_object", "")), SEEDS, bias=bias):
        if drawn.ended:
            assert isinstance(json.loads(drawn.text), dict)
            ended += 1
    assert ended > len(SEEDS) // 2


@pytest.mark.parametrize("pattern", [r"[a-z]{3,8} [0-9]{2}", "(日本|🦜){1,3}", "x?", r"é+!"])
def test_a_regex_matches_the_whole_text(pattern: str) -> None:
    grammar = compiler().compile(StructuredOutput("regex", pattern))
    for drawn in draw(grammar, SEEDS):
        assert drawn.ended, drawn.text
        assert re.fullmatch(pattern, drawn.text), drawn.text


def test_a_choice_is_one_of_them() -> None:
    drawn = draw(compiler().compile(choice(*CHOICES)), range(40))
    assert all(one.ended for one in drawn)
    # Each of them, and byte for byte.
    assert {one.text for one in drawn} == set(CHOICES)


def test_a_grammar() -> None:
    grammar = compiler().compile(StructuredOutput("grammar", ARITHMETIC))
    texts = {drawn.text for drawn in draw(grammar, SEEDS)}
    assert all(re.fullmatch(r"[0-9]{1,3}([+-][0-9]{1,3})?;", text) for text in texts)
    assert len(texts) > 1


# vllm-project/vllm#38696
@pytest.mark.parametrize(
    "more", [{}, {"x-guidance": {"whitespace_pattern": "[ ]+", "key_separator": "[ ]*:[ ]*"}}]
)
def test_json_does_not_run_on_in_white_space(more: dict[str, Any]) -> None:
    asked = {
        "type": "object",
        "properties": {"a": {"type": "integer"}},
        "required": ["a"],
        "additionalProperties": False,
        **more,
    }
    grammar = compiler().compile(schema(asked))
    for drawn in draw(grammar, range(4), max_tokens=64, bias={198: 100.0, 216: 100.0}):
        assert drawn.ended, drawn.text
        assert set(json.loads(drawn.text)) == {"a"}
        runs = [len(run) for run in re.findall(r"\s+", drawn.text)]
        assert max(runs) == MAX_JSON_WHITESPACE


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        # vllm-project/vllm#17248
        (schema({"type": "objec"}), "Invalid type: objec"),
        (schema({"type": "object", "properties": 5}), "properties must be an object"),
        (schema({"$ref": "#/nowhere"}), "'/nowhere' does not exist"),
        (schema({"$ref": "http://example.org/schema"}), "does not fetch resources"),
        (schema(5), "Expecting object schema"),
        (schema({"enum": []}), "Unsatisfiable"),
        (schema({"type": "string", "pattern": "([a"}), "unclosed character class"),
        (schema({"$ref": "#"}), "no text satisfies it"),
        (StructuredOutput("json_schema", '{"type":'), "EOF while parsing"),
        (StructuredOutput("json_schema", '{"a":' * 8000), "recursion limit"),
        (StructuredOutput("regex", "([a-z"), "unclosed character class"),
        (StructuredOutput("regex", "a(?=b)"), "look-around"),
        (StructuredOutput("regex", "(" * 4000 + "a" + ")" * 4000), "invalid regex"),
        (StructuredOutput("grammar", "start: nothing"), 'unknown name: "nothing"'),
        (StructuredOutput("grammar", 'begin: "a"'), "no start rule"),
        (StructuredOutput("grammar", "start: start"), "no text satisfies it"),
        (StructuredOutput("grammar", "start: " + "(" * 8000), "too deeply nested"),
        (StructuredOutput("choice", "[]"), "an empty one"),
        (StructuredOutput("choice", "5"), "not a list"),
    ],
)
def test_what_does_not_compile_is_refused(wanted: StructuredOutput, message: str) -> None:
    with pytest.raises(BadConstraint, match=re.escape(message)) as raised:
        compiler().compile(wanted)
    assert "\n" not in str(raised.value)
    assert len(str(raised.value)) < 600
    # And the compiler is as good as before.
    assert {drawn.text for drawn in draw(compiler().compile(choice("yes")), [1])} == {"yes"}


def test_a_huge_repetition_is_bounded() -> None:
    started = time.monotonic()
    with pytest.raises(BadConstraint):
        compiler().compile(StructuredOutput("regex", "((a{1000}){1000}){1000}"))
    assert time.monotonic() - started < 30  # unbounded it takes minutes and gigabytes


def rule_chain(limit: int, rule: str) -> str:
    """As many rules as fit, each of which needs the next."""
    lines = ["start: " + rule.format(0)]
    size = len(lines[0])
    while size < limit - 40:
        lines.append(f"{rule.format(len(lines) - 1)}:{rule.format(len(lines))}")
        size += len(lines[-1]) + 1
    return "\n".join([*lines, f'{rule.format(len(lines) - 1)}:"z"'])


def ref_chain(limit: int) -> str:
    parts: list[str] = []
    while sum(map(len, parts)) < limit - 100:
        at = len(parts)
        parts += [f'"{i:x}":{{"items":{{"$ref":"#/d/{i + 1:x}"}}}}' for i in range(at, at + 50)]
    while sum(map(len, parts)) + len(parts) > limit - 60:
        parts.pop()
    return '{"$ref":"#/d/0","d":{' + ",".join([*parts, f'"{len(parts):x}":{{}}']) + "}}"


@pytest.mark.parametrize(
    "wanted",
    [
        StructuredOutput("grammar", rule_chain(MAX_CONSTRAINT_CHARS["grammar"], "x{:x}")),
        StructuredOutput("grammar", rule_chain(MAX_CONSTRAINT_CHARS["grammar"], "X{:X}")),
        StructuredOutput("json_schema", ref_chain(MAX_CONSTRAINT_CHARS["json_schema"])),
    ],
    ids=["rules", "terminals", "refs"],
)
def test_the_deepest_nesting_does_not_end_the_process(wanted: StructuredOutput) -> None:
    """On a stack of the usual size the library overflows it."""
    assert len(wanted.text) <= MAX_CONSTRAINT_CHARS[wanted.kind]
    done = threading.Event()
    gate = GrammarGate(compiler().compile)
    gate.set_wake(done.set)
    request: Any = _Request(wanted)
    gate.enter(request)
    assert done.wait(60)
    [(taken, result)] = gate.take_ready()
    assert taken is request
    if not isinstance(result, BadConstraint):
        follower, mask = result.start(), np.zeros(result.mask_words, np.int32)
        follower.fill_mask(mask)
        assert mask.any()
    gate.close()


def test_a_thread_that_cannot_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    gate = GrammarGate(compiler().compile)
    request: Any = _Request(choice("a"))
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", fail)
        gate.enter(request)
    [(taken, result)] = gate.take_ready()
    assert taken is request
    assert "no memory" in str(result)
    gate.close()


class _Request:
    def __init__(self, wanted: StructuredOutput) -> None:
        from pagewire.types import SamplingParams

        self.sampling = SamplingParams(8, structured_output=wanted)


class _Held:
    """A compiler that is slow until it is let go."""

    def __init__(self) -> None:
        self.compiled: list[StructuredOutput] = []
        self.entered = threading.Event()
        self.go = threading.Event()

    def compile(self, wanted: StructuredOutput) -> Any:
        self.entered.set()
        assert self.go.wait(20)
        self.compiled.append(wanted)
        if wanted.text == "bad":
            raise BadConstraint("bad indeed")
        if wanted.text == "panic":
            raise KeyboardInterrupt("a panic is no Exception")
        return f"compiled {wanted.text}"


def take(gate: GrammarGate, woken: threading.Semaphore, num: int) -> list[tuple[Any, Any]]:
    taken: list[tuple[Any, Any]] = []
    while len(taken) < num:
        assert woken.acquire(timeout=20)
        taken += gate.take_ready()
    return taken


def test_the_gate_compiles_once_and_keeps_it() -> None:
    held, woken = _Held(), threading.Semaphore(0)
    gate = GrammarGate(held.compile, max_cached=2)
    gate.set_wake(woken.release)
    a, b, bad = (StructuredOutput("regex", text) for text in ("a", "b", "bad"))
    requests: list[Any] = [_Request(of) for of in (a, a, bad, b)]
    for request in requests:
        gate.enter(request)
    assert held.entered.wait(20)
    assert not gate.has_ready
    assert len(gate) == 4
    # Left while it waits, and while its own is being compiled.
    assert gate.leave(requests[3])
    assert gate.leave(requests[1])
    assert not gate.leave(requests[1])
    held.go.set()
    taken = take(gate, woken, 2)
    assert [request for request, _ in taken] == [requests[0], requests[2]]
    assert taken[0][1] == "compiled a"
    assert isinstance(taken[1][1], BadConstraint)
    assert len(gate) == 0
    again: list[Any] = [_Request(of) for of in (a, bad)]
    for request in again:
        gate.enter(request)
    assert gate.has_ready
    assert [request for request, _ in gate.take_ready()] == again
    # Two more push them out.
    held.compiled.clear()
    for of in (b, StructuredOutput("regex", "panic")):
        gate.enter(_Request(of))  # type: ignore[arg-type]
    results = [result for _, result in take(gate, woken, 2)]
    assert results[0] == "compiled b"
    assert str(results[1]) == "it cannot be compiled"
    gate.enter(_Request(a))  # type: ignore[arg-type]
    assert not gate.has_ready
    take(gate, woken, 1)
    assert held.compiled == [b, StructuredOutput("regex", "panic"), a]
    gate.close()
    gate.close()
