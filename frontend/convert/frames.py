"""The frames of GenerateStream as bytes; the common one is written by hand.

A delta with text and ids alone is one for nearly every token. Its message costs
twice what its bytes do (https://protobuf.dev/programming-guides/encoding/):

    frame   0a LENGTH delta                     GenerateStreamResponse.delta = 1
    delta   [08 index] [12 LENGTH text] [1a LENGTH ids]     Delta.index, .text, .token_ids

A field is left out where it has its default. tests/frontend/test_frames.py holds this to
what the protobuf library writes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from frontend.convert.answers import delta_frame, queued_frame
from frontend.stream import Delta

if TYPE_CHECKING:
    from frontend.stream import Queued

_ONE_BYTE = tuple(bytes([value]) for value in range(0x80))


def stream_frame(item: Delta | Queued) -> bytes:
    """A serialized GenerateStreamResponse."""
    if not isinstance(item, Delta):
        return queued_frame(item).SerializeToString()
    if item.logprobs or item.prompt_logprobs or item.tool_calls:
        return delta_frame(item).SerializeToString()
    text, ids = item.text.encode(), item.token_ids
    packed = _varint(ids[0]) if len(ids) == 1 else b"".join(map(_varint, ids))
    size = len(text) + len(packed) + 4
    if size < 0x80 and text and packed and not item.index:
        return b"\x0a%c\x12%c%b\x1a%c%b" % (size, len(text), text, len(packed), packed)
    delta = b"\x08" + _varint(item.index) if item.index else b""
    if text:
        delta += b"\x12%b%b" % (_varint(len(text)), text)
    if packed:
        delta += b"\x1a%b%b" % (_varint(len(packed)), packed)
    return b"\x0a%b%b" % (_varint(len(delta)), delta)


def _varint(value: int) -> bytes:
    """Base 128, the lowest seven bits first; a negative int32 is sign-extended to 64 bits."""
    if 0 <= value < 0x80:
        return _ONE_BYTE[value]
    if 0 <= value < 0x4000:
        return bytes((value & 0x7F | 0x80, value >> 7))
    if 0 <= value < 0x200000:
        return bytes((value & 0x7F | 0x80, value >> 7 & 0x7F | 0x80, value >> 14))
    value &= 0xFFFF_FFFF_FFFF_FFFF
    parts = bytearray()
    while value >= 0x80:
        parts.append(value & 0x7F | 0x80)
        value >>= 7
    parts.append(value)
    return bytes(parts)
