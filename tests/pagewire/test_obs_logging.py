from __future__ import annotations

import io
import json
import logging
from typing import TYPE_CHECKING

import pytest

from pagewire.obs.logging import log_context, setup_logging

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(autouse=True)
def _restore_logging() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    logging.captureWarnings(False)


def test_text_is_one_line_a_record() -> None:
    stream = io.StringIO()
    setup_logging("engine", "info", "text", stream=stream)
    with log_context(request_id="r\n1"):
        logging.getLogger("x").info("forged\nrecord", extra={"blocks": 3})
    logging.getLogger("x").debug("below the level")
    (line,) = stream.getvalue().splitlines()
    assert line.endswith(r"info    engine: forged\nrecord request_id=r\n1 blocks=3")


def test_text_does_not_steer_a_terminal() -> None:
    stream = io.StringIO()
    setup_logging("frontend", "info", "text", stream=stream)
    sent = "\x1b[2J\x00\x9b\u202e\u2028é \N{GRINNING FACE}"
    logging.getLogger("x").info("ended", extra={"tenant": sent})
    expected = r"ended tenant=\x1b[2J\x00\x9b\u202e\u2028é " + "\N{GRINNING FACE}\n"
    assert stream.getvalue().endswith(expected)


def test_json_is_one_object_a_record_with_its_traceback() -> None:
    stream = io.StringIO()
    setup_logging("frontend", "debug", "json", stream=stream)
    with log_context(request_id="r1"), log_context(trace_id="t1"):
        try:
            raise ValueError("boom")
        except ValueError:
            logging.getLogger("frontend.x").exception("failed %s", "twice")
    logging.getLogger("frontend.x").debug("plain")
    first, second = map(json.loads, stream.getvalue().splitlines())
    assert (first["level"], first["room"], first["logger"]) == ("error", "frontend", "frontend.x")
    assert (first["message"], first["request_id"], first["trace_id"]) == (
        "failed twice",
        "r1",
        "t1",
    )
    assert first["exception"].endswith("ValueError: boom")
    assert "request_id" not in second


def test_server_libraries_go_through_the_same_handler() -> None:
    stream = io.StringIO()
    logging.getLogger("uvicorn.error").addHandler(logging.NullHandler())
    setup_logging("frontend", "info", "text", stream=stream)
    setup_logging("frontend", "info", "text", stream=stream)
    logging.getLogger("uvicorn.error").warning("trouble")
    logging.getLogger("uvicorn.access").info("GET /metrics")
    assert len(stream.getvalue().splitlines()) == 1
