"""A real `python -m tokenizer_svc`, and what a client of it needs."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import grpc
import psutil
from google.rpc import error_details_pb2, status_pb2

from pagewire.v1 import detokenizer_pb2_grpc, tokenizer_pb2_grpc
from pagewire.v1.detokenizer_pb2 import (
    DetokenizeStreamRequest,
    DetokenizeStreamResponse,
    OpenSequence,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from types import TracebackType

_MIB64 = 64 << 20


class Service:
    """The process, from its first line that says it serves to its end."""

    def __init__(self, *flags: str) -> None:
        self._flags = flags

    def __enter__(self) -> Service:
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-m", "tokenizer_svc", "--tokenizer-bind", "127.0.0.1:0"),
                *self._flags,
            ],
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.process.stderr is not None
        self.log: list[str] = []
        self.address = self.wait_for(r"serving \S+ on (\S+) with")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            self.process.wait(timeout=60)
        assert self.process.stderr is not None
        self.process.stderr.close()

    def wait_for(self, pattern: str) -> str:
        """Reads the log up to a line that matches; returns the first group."""
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.log.append(line)
            if match := re.search(pattern, line):
                return match[1] if match.groups() else line
        raise AssertionError("tokenizer_svc ended:\n" + "".join(self.log))

    def terminate(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout=60)

    def workers(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children()

    def channel(self) -> grpc.aio.Channel:
        return grpc.aio.insecure_channel(
            self.address,
            options=[
                ("grpc.max_send_message_length", 2 * _MIB64),
                ("grpc.max_receive_message_length", _MIB64),
            ],
        )


def tokenizer_stub(channel: grpc.aio.Channel) -> Any:
    return tokenizer_pb2_grpc.TokenizerServiceStub(channel)


def detokenizer_stub(channel: grpc.aio.Channel) -> Any:
    return detokenizer_pb2_grpc.DetokenizerServiceStub(channel)


def details_of(error: grpc.aio.AioRpcError) -> tuple[str, str]:
    """ErrorInfo's reason and the field that BadRequest names ("" without one)."""
    trailers = dict(error.trailing_metadata() or ())
    status = status_pb2.Status.FromString(trailers["grpc-status-details-bin"])
    reason, field = "", ""
    for detail in status.details:
        info, bad_request = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest()
        if detail.Unpack(info):
            reason = info.reason
        elif detail.Unpack(bad_request):
            field = bad_request.field_violations[0].field
    return reason, field


class Stream:
    """A DetokenizeStream, one step at a time."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.call = detokenizer_stub(channel).DetokenizeStream()
        self._step = 0

    async def send(
        self,
        rows: Mapping[int, Iterable[int]] | None = None,
        *,
        opens: Iterable[OpenSequence] = (),
        finished: Iterable[int] = (),
        closes: Iterable[int] = (),
    ) -> int:
        ends = set(finished)
        columns = {sequence: list(ids) for sequence, ids in (rows or {}).items()}
        columns |= {sequence: [] for sequence in ends - columns.keys()}
        self._step += 1
        await self.call.write(
            DetokenizeStreamRequest(
                step=self._step,
                opens=opens,
                sequences=columns,
                counts=[len(ids) for ids in columns.values()],
                token_ids=[token_id for ids in columns.values() for token_id in ids],
                finished=[sequence in ends for sequence in columns],
                closes=closes,
            )
        )
        return self._step

    async def receive(self) -> DetokenizeStreamResponse:
        response = await self.call.read()
        assert isinstance(response, DetokenizeStreamResponse), response
        return response

    async def step(
        self,
        rows: Mapping[int, Iterable[int]] | None = None,
        *,
        opens: Iterable[OpenSequence] = (),
        finished: Iterable[int] = (),
        closes: Iterable[int] = (),
    ) -> DetokenizeStreamResponse:
        number = await self.send(rows, opens=opens, finished=finished, closes=closes)
        response = await self.receive()
        assert response.step == number
        return response


def texts_of(response: DetokenizeStreamResponse) -> dict[int, str]:
    assert len(set(response.sequences)) == len(response.sequences)
    return dict(zip(response.sequences, response.texts, strict=True))
