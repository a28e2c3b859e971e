"""Constrained requests through the whole engine, on a tiny model."""

from __future__ import annotations

import json
import re
import threading
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from engine_core.grammar.compiler import GrammarCompiler
from engine_core.grammar.gate import GrammarGate
from engine_core.grammar.grammar import BadConstraint
from engine_core.grammar.vocabulary import read_vocabulary
from pagewire.model_source import resolve_model
from pagewire.types import FinishReason, SamplingParams, StructuredOutput
from pagewire.wire.codec import decode_command, encode, pack_ids, unpack_ids, unpack_request_ids
from pagewire.wire.messages import Add, Finished, Heartbeat
from tests.parity.harness import EPOCH, FRONTEND_ID, Engine, Loaded, load
from tests.support.engine_process import ThreadedEngine
from tests.support.fake_model import FakeEngine
from tests.support.graph_device import GraphDevice
from tests.support.tiny_model import EOS_ID, TinySpec, write_hf
from tests.support.wire_client import WireClient

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

PROMPTS = ([5, 90, 17, 250, 33, 8, 61], [40, 41, 40, 41] * 5, list(range(60, 91)), [7])
WANTED = (
    StructuredOutput("regex", "[a-m]{20,30}!"),
    StructuredOutput("choice", '["the first of the choices", "the second", "日本語 ไทย"]'),
    StructuredOutput("json_schema", '{"type":"array","items":{"enum":[1,22,333]},"maxItems":4}'),
    StructuredOutput("grammar", 'start: ("ab" | "c"){12}'),
)
ASKED = [
    (ids, SamplingParams(64, temperature=1.0, seed=at, structured_output=WANTED[at % 4]))
    for at, ids in enumerate(PROMPTS * 2)
] + [(ids, SamplingParams(24, temperature=0.9, seed=30 + len(ids))) for ids in PROMPTS]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_hf(tmp_path_factory.mktemp("tiny") / "model", TinySpec())


@pytest.fixture(scope="module")
def loaded(model: Path) -> Loaded:
    return load(str(model), "cpu")


class Server:
    """Engines over one compiler, and the wake-ups of its thread."""

    def __init__(self, model: Path) -> None:
        source = resolve_model(str(model))
        compiler = GrammarCompiler(lambda: read_vocabulary(source, 300), (EOS_ID,))
        self.grammars = GrammarGate(compiler.compile)
        self.woken = threading.Semaphore(0)
        self.grammars.set_wake(self.woken.release)
        self.tokens = read_vocabulary(source, 300).tokens

    def engine(self, loaded: Loaded, **limits: Any) -> Engine:
        return Engine(loaded, grammars=self.grammars, **limits)

    def serve(
        self,
        engine: Engine,
        asked: Sequence[tuple[Sequence[int], SamplingParams]],
        num_output: int = 0,
    ) -> list[tuple[list[int], Finished]]:
        """All at once; of each prompt's ids the last num_output are output that is replayed."""
        outputs: dict[int, list[int]] = {}
        finishes: dict[int, Finished] = {}
        for number, (ids, sampling) in enumerate(asked):
            outputs[number] = []
            add = Add(number, EPOCH, pack_ids(ids), num_output, sampling)
            engine.core.add(FRONTEND_ID, add, 0.0)
        while len(finishes) < len(asked):
            if not engine.core.has_work():
                assert self.woken.acquire(timeout=20), "it waits for nothing"
                continue
            engine.core.check_integrity()
            for output in engine.core.step(lambda: None).values():
                ids = unpack_request_ids(output.request_ids)
                for number, token_id in zip(ids, unpack_ids(output.token_ids), strict=True):
                    outputs[number].append(token_id)
                finishes.update({finished.request_id: finished for finished in output.finished})
        engine.kv_manager.check_all_free()
        while engine.core.has_work():  # a last step that nobody waits for
            assert not engine.core.step(lambda: None)
        return [(outputs[number], finishes[number]) for number in outputs]

    def text(self, ids: Sequence[int]) -> str:
        assert ids[-1] == EOS_ID
        return b"".join(self.tokens[token_id] for token_id in ids[:-1]).decode()


@pytest.fixture
def server(model: Path) -> Iterator[Server]:
    server = Server(model)
    yield server
    server.grammars.close()


def test_the_constraint_holds_and_company_changes_nothing(loaded: Loaded, server: Server) -> None:
    alone = [server.serve(server.engine(loaded), [one])[0] for one in ASKED]
    for (ids, finished), (_, sampling) in zip(alone, ASKED, strict=True):
        wanted = sampling.structured_output
        if wanted is None:
            continue
        assert (finished.reason, finished.stop_token_id) == (FinishReason.STOP, EOS_ID)
        text = server.text(ids)
        if wanted.kind == "regex":
            assert re.fullmatch(wanted.text, text)
        elif wanted.kind == "choice":
            assert text in json.loads(wanted.text)
        elif wanted.kind == "json_schema":
            assert set(json.loads(text)) <= {1, 22, 333}
        else:
            assert re.fullmatch("(ab|c){12}", text)
    together = server.serve(server.engine(loaded), ASKED)
    assert [ids for ids, _ in together] == [ids for ids, _ in alone]
    chunked = server.serve(
        server.engine(loaded, max_num_batched_tokens=9, max_num_seqs=5, prefix_caching=True), ASKED
    )
    assert [ids for ids, _ in chunked] == [ids for ids, _ in alone]


def test_preemption_and_replay_change_nothing(loaded: Loaded, server: Server) -> None:
    whole = server.serve(server.engine(loaded), ASKED)
    small = server.engine(loaded, num_blocks=9, max_num_seqs=6)
    results = server.serve(small, ASKED)
    assert small.scheduler.total_preemptions > 0
    assert [ids for ids, _ in results] == [ids for ids, _ in whole]
    for num_output in (1, 7):
        cut = [
            ([*prompt, *ids[:num_output]], sampling, ids)
            for (prompt, sampling), (ids, _) in zip(ASKED, whole, strict=True)
            if len(ids) > num_output
        ]
        rest = server.serve(
            server.engine(loaded), [(ids, sampling) for ids, sampling, _ in cut], num_output
        )
        assert [ids for ids, _ in rest] == [ids[num_output:] for _, _, ids in cut]


def test_plans_made_before_the_ids_are_known_change_nothing(
    loaded: Loaded, server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    whole = server.serve(server.engine(loaded), ASKED)
    dead = SamplingParams(8, min_tokens=5, structured_output=StructuredOutput("choice", '["ab"]'))
    late = replace(loaded, device=GraphDevice())
    for schedule in ({}, {"num_blocks": 9, "max_num_seqs": 6}):
        engine = server.engine(late, async_scheduling=True, **schedule)
        *results, (ids, finished) = server.serve(engine, [*ASKED, (PROMPTS[0], dead)])
        assert results_of(results) == results_of(whole)
        assert b"".join(server.tokens[token_id] for token_id in ids) == b"ab"
        assert (finished.reason, finished.field) == (FinishReason.ERROR, "sampling_params")
    assert engine.scheduler.total_preemptions > 0
    # Nor does a step beyond the end of a grammar trouble it.
    assert not [record for record in caplog.records if "gave up" in record.message]


def results_of(served: list[tuple[list[int], Finished]]) -> list[Any]:
    return [(ids, finished.reason, finished.stop_token_id) for ids, finished in served]


def test_a_bad_constraint_hurts_nobody(loaded: Loaded, server: Server) -> None:
    bad = [
        SamplingParams(8, structured_output=StructuredOutput("json_schema", '{"type":"objec"}')),
        SamplingParams(8, structured_output=StructuredOutput("regex", "([a-z")),
        SamplingParams(8, structured_output=StructuredOutput("grammar", "start: nothing")),
        SamplingParams(8, structured_output=StructuredOutput("choice", "[]")),
    ]
    engine = server.engine(loaded)
    results = server.serve(engine, [*ASKED, *((PROMPTS[0], sampling) for sampling in bad)])
    for (ids, finished), sampling in zip(results[len(ASKED) :], bad, strict=True):
        assert sampling.structured_output is not None
        assert ids == []
        assert finished.reason == FinishReason.ERROR
        kind = sampling.structured_output.kind
        assert finished.field == f"sampling_params.structured_output.{kind}"
        assert finished.error
    alone = server.serve(server.engine(loaded), ASKED)
    assert [ids for ids, _ in results[: len(ASKED)]] == [ids for ids, _ in alone]


def test_a_mask_that_leaves_nothing_ends_its_request_alone(loaded: Loaded, server: Server) -> None:
    """The choice is whole after two tokens, but no end is allowed before the fifth."""
    dead = SamplingParams(8, min_tokens=5, structured_output=StructuredOutput("choice", '["ab"]'))
    [(ids, finished)] = server.serve(server.engine(loaded), [(PROMPTS[0], dead)])
    assert b"".join(server.tokens[token_id] for token_id in ids) == b"ab"
    assert (finished.reason, finished.field) == (FinishReason.ERROR, "sampling_params")


def test_replayed_output_that_breaks_the_grammar(loaded: Loaded, server: Server) -> None:
    sampling = SamplingParams(8, structured_output=StructuredOutput("choice", '["ab"]'))
    wrong = server.tokens.index(b"x")
    [(ids, finished)] = server.serve(server.engine(loaded), [([5, 6, wrong], sampling)], 1)
    assert (ids, finished.reason) == ([], FinishReason.ERROR)


def test_an_abort_while_it_is_compiled(loaded: Loaded) -> None:
    entered, go, woken = threading.Event(), threading.Event(), threading.Event()

    def compile_slowly(_wanted: StructuredOutput) -> Any:
        entered.set()
        assert go.wait(20)
        return None

    gate = GrammarGate(compile_slowly)
    gate.set_wake(woken.set)
    engine = Engine(loaded, grammars=gate)
    sampling = SamplingParams(8, structured_output=WANTED[0])
    engine.core.add(FRONTEND_ID, Add(99, EPOCH, pack_ids([5, 6]), 0, sampling), 0.0)
    assert entered.wait(20)
    # The loop sleeps meanwhile, and the request counts as waiting.
    assert not engine.core.has_work()
    assert engine.core.stats().num_waiting == 1
    # Another request is served.
    assert len(engine.generate([[5, 6]], 3)[0]) == 3
    engine.core.abort(FRONTEND_ID, [99], 0.0)
    engine.core.check_integrity()
    [output] = engine.core.step(lambda: None).values()
    assert [finished.reason for finished in output.finished] == [FinishReason.ABORT]
    go.set()
    assert woken.wait(20)
    engine.core.step(lambda: None)
    assert not engine.core.has_work()
    assert engine.core.stats().num_waiting == 0
    gate.close()


def test_the_loop_sleeps_while_it_is_compiled_and_is_woken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    entered, go = threading.Event(), threading.Event()

    def compile_slowly(_wanted: StructuredOutput) -> Any:
        entered.set()
        assert go.wait(20)
        raise BadConstraint("bad indeed")

    gate = GrammarGate(compile_slowly)
    engine = ThreadedEngine()
    monkeypatch.setattr(engine.core, "_grammars", gate)
    gate.set_wake(engine.process.wake)
    has_work, asked = engine.core.has_work, threading.Semaphore(0)
    monkeypatch.setattr(engine.core, "has_work", lambda: (asked.release(), has_work())[1])
    with engine, WireClient(engine.endpoint) as client:
        client.hello()
        client.add(1, [5, 6], sampling=SamplingParams(8, structured_output=WANTED[0]))
        assert entered.wait(20)
        client.wait_for(lambda output: isinstance(output, Heartbeat) and output.stats.num_waiting)
        while asked.acquire(blocking=False):
            pass
        for _ in range(3):
            client.wait_for(lambda output: isinstance(output, Heartbeat))
        # Once for each of the two looks that the Add itself caused, if they came late.
        assert sum(asked.acquire(blocking=False) for _ in range(9)) <= 2
        go.set()
        [finished] = client.collect(1)[1].finished
    assert finished.error == "bad indeed"
    assert finished.field == "sampling_params.structured_output.regex"
    gate.close()


def test_it_travels_over_the_wire() -> None:
    sampling = SamplingParams(8, structured_output=WANTED[1])
    add = Add(1, EPOCH, pack_ids([5]), 0, sampling)
    decoded = decode_command([bytes(frame) for frame in encode(add)])
    assert decoded == add
    assert isinstance(decoded, Add)
    assert hash(decoded.sampling.structured_output) == hash(WANTED[1])


@pytest.mark.parametrize(
    ("sampling", "message"),
    [
        ({"structured_output": StructuredOutput("regex", "a" * 8193)}, "has 8193 characters"),
        ({"structured_output": WANTED[0], "ignore_eos": True}, "ignore_eos excludes"),
    ],
)
def test_what_could_hurt_the_engine_is_refused(sampling: dict[str, Any], message: str) -> None:
    engine = FakeEngine()
    engine.add(0, [5, 6], sampling=SamplingParams(max_tokens=8, **sampling))
    engine.step()
    assert engine.of(0).reason is FinishReason.ERROR
    assert message in engine.of(0).finished[0].error
    engine.check_at_rest()


def test_a_model_without_an_end_is_refused() -> None:
    engine = FakeEngine(eos_token_ids=())
    engine.add(0, [5, 6], sampling=SamplingParams(8, structured_output=WANTED[0]))
    engine.step()
    assert "needs an end of sequence" in engine.of(0).finished[0].error
