"""Bytes <-> messages, and nothing else in the project knows the format.

A message is two frames: one type byte, then the struct as a msgpack array
(https://github.com/msgpack/msgpack/blob/master/spec.md). Type bytes are never
reused: a removed message leaves its number behind.

Decoding checks all that a reader would otherwise trip over: field types, that
ids fit 64 unsigned bits, that packed columns are whole and agree in length.
What a value means (is the id in the vocabulary, is the prompt too long) is the
receiver's to judge, because it can answer and the codec cannot.
"""

from __future__ import annotations

import sys
from array import array
from typing import TYPE_CHECKING, TypeVar

import msgspec

from pagewire.types import FinishReason
from pagewire.wire.messages import (
    Abort,
    AdapterList,
    AdapterReply,
    Add,
    Command,
    Dead,
    Heartbeat,
    Hello,
    LoadAdapter,
    Output,
    Ping,
    Ready,
    ResetPrefixCache,
    ResetPrefixCacheReply,
    StepOutput,
    UnloadAdapter,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence


class WireError(ValueError):
    """What arrived is not a message of this protocol; says what is wrong."""


_COMMAND_TYPES: dict[int, type[Command]] = {
    0x01: Hello,
    0x02: Add,
    0x03: Abort,
    0x04: Ping,
    0x05: ResetPrefixCache,
    0x06: LoadAdapter,
    0x07: UnloadAdapter,
}
_OUTPUT_TYPES: dict[int, type[Output]] = {
    0x81: Ready,
    0x82: StepOutput,
    0x83: Heartbeat,
    0x84: Dead,
    0x85: ResetPrefixCacheReply,
    0x86: AdapterReply,
    0x87: AdapterList,
}

_TYPE_FRAMES: dict[type, bytes] = {
    struct: bytes([number]) for number, struct in (_COMMAND_TYPES | _OUTPUT_TYPES).items()
}
_COMMAND_DECODERS = {
    number: msgspec.msgpack.Decoder(struct) for number, struct in _COMMAND_TYPES.items()
}
_OUTPUT_DECODERS = {
    number: msgspec.msgpack.Decoder(struct) for number, struct in _OUTPUT_TYPES.items()
}
_ENCODER = msgspec.msgpack.Encoder()

_FINISH_REASONS = frozenset(FinishReason)


def encode(message: Command | Output) -> list[bytes | memoryview]:
    """The message's frames, [type byte, body], ready for send_multipart."""
    return [_TYPE_FRAMES[type(message)], _ENCODER.encode(message)]


def decode_command(frames: Sequence[bytes | memoryview]) -> Command:
    """Reads the frames [type byte, body] of a frontend's message.

    Raises WireError, and nothing else, whatever the bytes.
    """
    command = _decode(frames, _COMMAND_DECODERS)
    if isinstance(command, Add):
        _check_id("request_id", command.request_id)
        _check_id("epoch", command.epoch)
        _column_length("token_ids", command.token_ids, 4)
    elif isinstance(command, Abort):
        _column_length("request_ids", command.request_ids, 8)
    elif isinstance(command, Hello | Ping):
        _check_id("frontend_id", command.frontend_id)
    return command


def decode_output(frames: Sequence[bytes | memoryview]) -> Output:
    """Reads the frames [type byte, body] of an engine's message.

    Raises WireError, and nothing else, whatever the bytes.
    """
    output = _decode(frames, _OUTPUT_DECODERS)
    if isinstance(output, StepOutput):
        _check_step_output(output)
    elif isinstance(output, Ready | Heartbeat | Dead | AdapterList):
        _check_id("epoch", output.epoch)
    return output


_M = TypeVar("_M")


def _decode(
    frames: Sequence[bytes | memoryview], decoders: Mapping[int, msgspec.msgpack.Decoder[_M]]
) -> _M:
    if len(frames) != 2:
        raise WireError(f"a message is 2 frames, not {len(frames)}")
    kind, body = frames
    if len(kind) != 1:
        raise WireError(f"the type frame is 1 byte, not {len(kind)}")
    decoder = decoders.get(kind[0])
    if decoder is None:
        raise WireError(f"unknown message type 0x{kind[0]:02x}")
    try:
        return decoder.decode(body)
    # RecursionError: nesting deeper than any message of ours.
    except (msgspec.MsgspecError, RecursionError) as error:
        raise WireError(f"message type 0x{kind[0]:02x}: {error}") from None


def _check_step_output(output: StepOutput) -> None:
    _check_id("epoch", output.epoch)
    rows = _column_length("request_ids", output.request_ids, 8)
    if _column_length("counts", output.counts, 2) != rows:
        raise WireError(f"{rows} request_ids but {len(output.counts) // 2} counts")
    num_ids = _column_length("token_ids", output.token_ids, 4)
    if sum(unpack_counts(output.counts)) != num_ids:
        raise WireError(f"the counts do not sum up to the {num_ids} token_ids")
    for started in output.started:
        _check_id("started.request_id", started.request_id)
    for finished in output.finished:
        _check_id("finished.request_id", finished.request_id)
        if finished.reason not in _FINISH_REASONS:
            raise WireError(f"finished.reason {finished.reason} is no FinishReason")
    for request_id in output.unknown_aborts:
        _check_id("unknown_aborts", request_id)
    if output.logprobs:
        _check_logprobs(output)


def _check_logprobs(output: StepOutput) -> None:
    counts = dict(
        zip(unpack_request_ids(output.request_ids), unpack_counts(output.counts), strict=True)
    )
    for logprobs in output.logprobs:
        num_new = counts.get(logprobs.request_id, 0)
        if len(logprobs.output) not in (0, num_new):
            raise WireError(
                f"logprobs.output has {len(logprobs.output)} positions, but {num_new} ids are new"
            )
        for position in (*logprobs.output, *logprobs.prompt):
            if len(position.top_ids) != len(position.top_logprobs):
                raise WireError(
                    f"logprobs: {len(position.top_ids)} top_ids but "
                    f"{len(position.top_logprobs)} top_logprobs"
                )


def _check_id(field: str, value: int) -> None:
    # msgpack reaches from -2**63 to 2**64 - 1.
    if value < 0:
        raise WireError(f"{field} is negative")


def _column_length(field: str, column: bytes, width: int) -> int:
    length, rest = divmod(len(column), width)
    if rest:
        raise WireError(f"{field}: {len(column)} bytes are no multiple of {width}")
    return length


def pack_ids(ids: Iterable[int]) -> bytes:
    """Token ids as little-endian int32. Raises OverflowError beyond int32."""
    return _pack("i", ids)


def unpack_ids(column: bytes) -> list[int]:
    """The inverse of pack_ids. Raises WireError for a length off 4."""
    return _unpack("i", column)


def pack_request_ids(ids: Iterable[int]) -> bytes:
    """Internal request ids as little-endian uint64. Raises OverflowError beyond it."""
    return _pack("Q", ids)


def unpack_request_ids(column: bytes) -> list[int]:
    """The inverse of pack_request_ids. Raises WireError for a length off 8."""
    return _unpack("Q", column)


def pack_counts(counts: Iterable[int]) -> bytes:
    """Row lengths as little-endian uint16. Raises OverflowError beyond it."""
    return _pack("H", counts)


def unpack_counts(column: bytes) -> list[int]:
    """The inverse of pack_counts. Raises WireError for a length off 2."""
    return _unpack("H", column)


def _pack(typecode: str, values: Iterable[int]) -> bytes:
    column = array(typecode, values)
    if sys.byteorder == "big":
        column.byteswap()
    return column.tobytes()


def _unpack(typecode: str, column: bytes) -> list[int]:
    values: array[int] = array(typecode)
    _column_length("column", column, values.itemsize)
    values.frombytes(column)
    if sys.byteorder == "big":
        values.byteswap()
    return values.tolist()
