"""Adapters over the engine's sockets: what one frontend changes, all know."""

from __future__ import annotations

from pagewire.wire.messages import AdapterInfo, AdapterList, LoadAdapter, Output, UnloadAdapter
from tests.support.engine_process import ThreadedEngine
from tests.support.fake_model import adapter_start, alone
from tests.support.wire_client import WireClient

PROMPT = [5, 9, 13, 5, 7]
SQL = AdapterInfo("sql", "/sql", 4, b"/sql")


def told(client: WireClient, wanted: tuple[AdapterInfo, ...]) -> None:
    def is_it(output: Output) -> bool:
        return isinstance(output, AdapterList) and output.adapters == wanted

    client.wait_for(is_it)


def test_every_frontend_is_told_and_so_is_one_that_comes_later() -> None:
    with (
        ThreadedEngine() as engine,
        WireClient(engine.endpoint) as one,
        WireClient(engine.endpoint) as other,
        WireClient(engine.endpoint) as late,
    ):
        assert one.hello().adapters == other.hello().adapters == ()
        assert one.change_adapters(LoadAdapter(1, "sql", "/sql")).code == ""
        # Who has the reply has been told before.
        lists = [output for output in one.outputs if isinstance(output, AdapterList)]
        assert [it.adapters for it in lists] == [(SQL,)]
        told(other, (SQL,))
        assert late.hello().adapters == (SQL,)
        # Each reload of what is there is answered, and tells nobody anything new.
        assert other.change_adapters(LoadAdapter(2, "sql", "/sql", b"/sql")).code == ""
        assert other.change_adapters(LoadAdapter(3, "sql", "/sql", b"/x")).code == "already_exists"
        late.add(1, PROMPT, adapter="sql")
        expected = alone(PROMPT, 8, (), start=adapter_start("/sql"))
        assert late.collect(1)[1].token_ids == expected
        assert late.change_adapters(UnloadAdapter(4, "sql")).code == ""
        told(one, ())
        told(other, ())
        assert len([it for it in other.outputs if isinstance(it, AdapterList)]) == 2


def test_what_cannot_be_loaded_is_told_and_harms_nobody() -> None:
    with ThreadedEngine() as engine, WireClient(engine.endpoint) as client:
        client.hello()
        bad = client.change_adapters(LoadAdapter(1, "sql", "/bad"))
        assert (bad.code, bad.field, bad.error) == ("invalid_request", "path", "/bad: bad")
        changed = client.change_adapters(LoadAdapter(2, "sql", "/sql", b"/other"))
        assert changed.code == "failed_precondition"
        assert client.change_adapters(UnloadAdapter(3, "sql")).code == "not_found"
        client.add(1, PROMPT)
        assert client.collect(1)[1].token_ids == alone(PROMPT, 8, ())


def test_what_follows_a_load_finds_it() -> None:
    """As a frontend sends them to an engine that takes another's place."""
    with ThreadedEngine() as engine, WireClient(engine.endpoint) as client:
        client.hello()
        client.send(LoadAdapter(1, "sql", "/sql", b"/sql"))
        client.add(1, PROMPT, adapter="sql")
        expected = alone(PROMPT, 8, (), start=adapter_start("/sql"))
        assert client.collect(1)[1].token_ids == expected
