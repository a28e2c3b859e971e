"""Just enough of HTTP/2 (RFC 9113) to see a gRPC server's frames and to starve it."""

from __future__ import annotations

import asyncio
import struct
from dataclasses import dataclass

DATA, HEADERS, SETTINGS, PING, GOAWAY, WINDOW_UPDATE = 0x0, 0x1, 0x4, 0x6, 0x7, 0x8
END_STREAM, ACK, END_HEADERS = 0x1, 0x1, 0x4
SETTINGS_INITIAL_WINDOW_SIZE = 0x4
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


@dataclass(frozen=True)
class Frame:
    kind: int
    flags: int
    stream: int
    payload: bytes

    @property
    def ends_stream(self) -> bool:
        return self.kind in (DATA, HEADERS) and bool(self.flags & END_STREAM)

    def encode(self) -> bytes:
        head = struct.pack(">I", len(self.payload))[1:]
        return head + struct.pack(">BBI", self.kind, self.flags, self.stream) + self.payload


class Connection:
    """A client connection; streams get `window` bytes of credit and no more by themselves."""

    def __init__(self, window: int) -> None:
        self._window = window
        self._next_stream = 1
        self.frames: list[Frame] = []
        """Those on streams, in order of arrival."""
        self.goaways = 0

    async def open(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self._reader, self._writer = await asyncio.open_connection(host, int(port))
        settings = struct.pack(">HI", SETTINGS_INITIAL_WINDOW_SIZE, self._window)
        self._writer.write(PREFACE)
        self._send(Frame(SETTINGS, 0, 0, settings))
        self.grant(0, 2**30)

    async def close(self) -> None:
        self._writer.close()
        await self._writer.wait_closed()

    def grant(self, stream: int, num_bytes: int) -> None:
        self._send(Frame(WINDOW_UPDATE, 0, stream, struct.pack(">I", num_bytes)))

    def call(self, path: str, message: bytes) -> int:
        """Starts a gRPC call; its stream id."""
        stream, self._next_stream = self._next_stream, self._next_stream + 2
        self._send(Frame(HEADERS, END_HEADERS, stream, self.block(path)))
        body = b"\0" + struct.pack(">I", len(message)) + message
        self._send(Frame(DATA, END_STREAM, stream, body))
        return stream

    def block(self, path: str) -> bytes:
        """The header block of a call."""
        fields = (
            (":method", "POST"),
            (":scheme", "http"),
            (":path", path),
            (":authority", "test"),
            ("te", "trailers"),
            ("content-type", "application/grpc"),
        )
        return b"".join(_literal(name) + _literal(value, b"") for name, value in fields)

    async def until_end(self, stream: int) -> list[Frame]:
        """All frames of a stream, up to the one that ends it."""
        while not any(f.ends_stream for f in self.of(stream)):
            await self._read()
        return self.of(stream)

    async def until_bytes(self, stream: int, num_bytes: int) -> None:
        while sum(len(f.payload) for f in self.of(stream) if f.kind == DATA) < num_bytes:
            await self._read()

    def of(self, stream: int) -> list[Frame]:
        return [frame for frame in self.frames if frame.stream == stream]

    def messages(self, stream: int) -> list[bytes]:
        """The gRPC messages of a stream, as far as they are complete."""
        body = b"".join(f.payload for f in self.of(stream) if f.kind == DATA)
        found, at = [], 0
        while len(body) >= at + 5:
            (length,) = struct.unpack(">I", body[at + 1 : at + 5])
            if len(body) < at + 5 + length:
                break
            found.append(body[at + 5 : at + 5 + length])
            at += 5 + length
        return found

    async def _read(self) -> None:
        head = await asyncio.wait_for(self._reader.readexactly(9), 60)
        length = int.from_bytes(head[:3], "big")
        kind, flags, stream = struct.unpack(">BBI", head[3:])
        frame = Frame(kind, flags, stream, await self._reader.readexactly(length))
        if kind == SETTINGS and not flags & ACK:
            self._send(Frame(SETTINGS, ACK, 0, b""))
        elif kind == PING and not flags & ACK:
            self._send(Frame(PING, ACK, 0, frame.payload))
        elif kind == GOAWAY:
            self.goaways += 1
        elif stream:
            self.frames.append(frame)

    def _send(self, frame: Frame) -> None:
        self._writer.write(frame.encode())


def _literal(text: str, prefix: bytes = b"\0") -> bytes:
    """A string of an HPACK field that is not indexed (RFC 7541, 6.2.2); under 127 bytes."""
    raw = text.encode()
    assert len(raw) < 127
    return prefix + bytes([len(raw)]) + raw
