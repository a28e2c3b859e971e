"""Every message there and back; nothing but WireError for what is none."""

from __future__ import annotations

from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagewire.types import FinishReason, SamplingParams
from pagewire.wire.codec import (
    WireError,
    decode_command,
    decode_output,
    encode,
    pack_counts,
    pack_ids,
    pack_request_ids,
    unpack_counts,
    unpack_ids,
    unpack_request_ids,
)
from pagewire.wire.messages import (
    Abort,
    AdapterInfo,
    AdapterList,
    AdapterReply,
    Add,
    Command,
    Dead,
    Finished,
    Heartbeat,
    Hello,
    LoadAdapter,
    Output,
    Ping,
    PositionLogprobs,
    Ready,
    RequestLogprobs,
    ResetPrefixCache,
    ResetPrefixCacheReply,
    Started,
    StepOutput,
    StepStats,
    UnloadAdapter,
)

U64 = 2**64 - 1

STATS = StepStats(3, 2, 100, 40, 512, 0.25, 1000, 2000, 1, 900, 300, (0.001, 0.5))
ADD = Add(
    request_id=U64,
    epoch=1 << 63,
    token_ids=pack_ids([0, 1, 2**31 - 1]),
    num_output_tokens=1,
    sampling=SamplingParams(
        max_tokens=9,
        temperature=0.7,
        top_p=0.9,
        top_k=40,
        min_p=0.05,
        seed=U64,
        stop_token_ids=(2,),
    ),
    deadline_ms=1500.5,
    priority=-3,
    cache_salt="sält",
)
STEP_OUTPUT = StepOutput(
    epoch=U64,
    step=7,
    sent_ns=123456789,
    request_ids=pack_request_ids([1, U64, 3]),
    counts=pack_counts([1, 0, 2]),
    token_ids=pack_ids([5, 6, 7]),
    started=(Started(1, 16, 0.5),),
    finished=(Finished(3, int(FinishReason.STOP), stop_token_id=7), Finished(9, 4, error="no")),
    unknown_aborts=(4, U64),
    stats=STATS,
    logprobs=(
        RequestLogprobs(
            3,
            (PositionLogprobs(6, -0.5, 2, (9, 6), (-0.25, -0.5)), PositionLogprobs(7, -1.5, 1)),
            (PositionLogprobs(-1, 0.0, 0), PositionLogprobs(8, -2.0, 40)),
        ),
        RequestLogprobs(U64, (), (PositionLogprobs(-1, 0.0, 0),)),
    ),
)
COMMANDS: list[Command] = [
    Hello(1, U64, "ipc:///tmp/x"),
    ADD,
    Abort(pack_request_ids([1, 2])),
    Ping(5),
    ResetPrefixCache(3),
    LoadAdapter(4, "sql", "sql/v2", b"digest"),
    UnloadAdapter(5, "sql"),
]
OUTPUTS: list[Output] = [
    Ready(1, 2, "m", "LlamaForCausalLM", 8192, 49152, (2, 0), "float32", "cpu", 9, 16, 8, 512, 77,
          {"temperature": 0.5}),
    STEP_OUTPUT,
    Heartbeat(1, 2, 3, STATS),
    Dead(1, "shutdown"),
    ResetPrefixCacheReply(3, 12),
    AdapterReply(4, "no_room", "all slots are taken", "name"),
    AdapterList(2, (AdapterInfo("sql", "sql/v2", 16, b"digest", True),)),
]  # fmt: skip


def name_of(message: object) -> str:
    return type(message).__name__


def test_every_message_has_a_sample() -> None:
    assert {type(message) for message in COMMANDS} == set(get_args(Command))
    assert {type(message) for message in OUTPUTS} == set(get_args(Output))


@pytest.mark.parametrize("command", COMMANDS, ids=name_of)
def test_a_command_comes_back_equal(command: Command) -> None:
    assert decode_command(encode(command)) == command


@pytest.mark.parametrize("output", OUTPUTS, ids=name_of)
def test_an_output_comes_back_equal(output: Output) -> None:
    assert decode_output(encode(output)) == output
    assert decode_output([memoryview(frame) for frame in encode(output)]) == output


def test_type_bytes_are_as_they_have_always_been() -> None:
    kinds = [bytes(encode(message)[0]) for message in [*COMMANDS, *OUTPUTS]]
    assert b"".join(kinds) == b"\x01\x02\x03\x04\x05\x06\x07\x81\x82\x83\x84\x85\x86\x87"


@pytest.mark.parametrize("output", OUTPUTS, ids=name_of)
def test_the_two_directions_do_not_mix(output: Output) -> None:
    with pytest.raises(WireError, match="unknown message type"):
        decode_command(encode(output))


def test_fields_that_a_newer_peer_appended_are_skipped() -> None:
    body = msgspec.msgpack.encode([*msgspec.to_builtins(Ping(5)), "new", [1, 2]])
    assert decode_command([b"\x04", body]) == Ping(5)


def test_fields_that_an_older_peer_does_not_know_have_their_defaults() -> None:
    add = Add(1, 2, b"", 0, SamplingParams(max_tokens=1))
    body = msgspec.msgpack.encode([1, 2, b"", 0, [1]])
    assert decode_command([b"\x02", body]) == add


def changed(message: Any, **fields: object) -> list[bytes | memoryview]:
    return encode(msgspec.structs.replace(message, **fields))


MALFORMED = {
    "no frames": ([], "2 frames, not 0"),
    "one frame": ([b"\x04"], "2 frames, not 1"),
    "three frames": ([b"\x04", b"", b""], "2 frames, not 3"),
    "empty type": ([b"", b""], "type frame is 1 byte, not 0"),
    "long type": ([b"\x04\x04", b""], "type frame is 1 byte, not 2"),
    "unknown type": ([b"\xff", b""], "unknown message type 0xff"),
    "empty body": ([b"\x04", b""], "truncated"),
    "trailing bytes": ([b"\x04", b"\x91\x05\x00"], "trailing"),
    "a map": ([b"\x04", b"\x80"], "Expected `array`"),
    "a bool for an int": ([b"\x04", b"\x91\xc3"], "Expected `int`, got `bool`"),
    "bad UTF-8": ([b"\x01", b"\x93\x01\x02\xa1\xff"], "UTF-8"),
    "a string of 4 GiB": ([b"\x01", b"\x93\x01\x02\xdb\xff\xff\xff\xff"], "truncated"),
    "4 billion stop ids": ([b"\x02", b"\x95\x01\x02\xc4\x00\x00\x97" + b"\x01" * 6
                                     + b"\xdd\xff\xff\xff\xff"], "truncated"),
    "nested for ever": ([b"\x04", b"\x92\x05" + b"\x91" * 100_000], "recursion"),
    "negative frontend_id": (encode(Ping(-1)), "frontend_id is negative"),
    "negative request_id": (changed(ADD, request_id=-1), "request_id is negative"),
    "negative epoch": (changed(ADD, epoch=-1), "epoch is negative"),
    "token_ids off 4": (changed(ADD, token_ids=b"12345"), "token_ids: 5 bytes are no multiple"),
    "abort off 8": (encode(Abort(b"1234567")), "request_ids: 7 bytes are no multiple of 8"),
}  # fmt: skip


@pytest.mark.parametrize(("frames", "complaint"), MALFORMED.values(), ids=MALFORMED.keys())
def test_a_malformed_command_says_what_is_wrong(
    frames: list[bytes | memoryview], complaint: str
) -> None:
    with pytest.raises(WireError, match=complaint):
        decode_command(frames)


MALFORMED_OUTPUTS = {
    "request_ids off 8": ({"request_ids": b"123"}, "request_ids: 3 bytes"),
    "counts off 2": ({"counts": b"123"}, "counts: 3 bytes"),
    "token_ids off 4": ({"token_ids": b"123"}, "token_ids: 3 bytes"),
    "too few counts": ({"counts": pack_counts([3])}, "3 request_ids but 1 counts"),
    "sum too small": ({"counts": pack_counts([0, 0, 2])}, "do not sum up to the 3"),
    "sum too large": ({"counts": pack_counts([1, 1, 2])}, "do not sum up to the 3"),
    "negative epoch": ({"epoch": -5}, "epoch is negative"),
    "reason 0": ({"finished": (Finished(1, 0),)}, "reason 0 is no FinishReason"),
    "negative started": ({"started": (Started(-1, 0, 0.0),)}, "started.request_id is negative"),
    "negative finished": ({"finished": (Finished(-1, 1),)}, "finished.request_id is negative"),
    "negative abort": ({"unknown_aborts": (-1,)}, "unknown_aborts is negative"),
    "logprobs for too few ids": (
        {"logprobs": (RequestLogprobs(3, (PositionLogprobs(6, -0.5, 2),)),)},
        "logprobs.output has 1 positions, but 2 ids are new",
    ),
    "logprobs without ids": (
        {"logprobs": (RequestLogprobs(77, (PositionLogprobs(6, -0.5, 2),)),)},
        "but 0 ids are new",
    ),
    "a likely id without its logprob": (
        {"logprobs": (RequestLogprobs(1, (), (PositionLogprobs(6, -0.5, 2, (1, 2), (-0.5,)),)),)},
        "2 top_ids but 1 top_logprobs",
    ),
}


@pytest.mark.parametrize(
    ("fields", "complaint"), MALFORMED_OUTPUTS.values(), ids=MALFORMED_OUTPUTS.keys()
)
def test_a_malformed_step_output_says_what_is_wrong(
    fields: dict[str, object], complaint: str
) -> None:
    with pytest.raises(WireError, match=complaint):
        decode_output(changed(STEP_OUTPUT, **fields))


JSON_LIKE = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), U64)
    | st.floats()
    | st.text(max_size=8)
    | st.binary(max_size=24),
    lambda inner: st.lists(inner, max_size=12) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=24,
)
SAMPLES = [encode(message) for message in [*COMMANDS, *OUTPUTS]]


@st.composite
def damaged(draw: st.DrawFn) -> list[bytes]:
    """A true message with some bytes overwritten, cut out or cut off."""
    kind, body = (bytes(frame) for frame in draw(st.sampled_from(SAMPLES)))
    body_bytes = bytearray(body)
    for _ in range(draw(st.integers(1, 4))):
        position = draw(st.integers(0, len(body_bytes)))
        body_bytes[position : position + draw(st.integers(0, 3))] = draw(st.binary(max_size=3))
    return [kind, bytes(body_bytes[: draw(st.integers(0, len(body_bytes)))])]


@st.composite
def plausible(draw: st.DrawFn) -> list[bytes]:
    """Well-formed msgpack of the wrong shape under a true type byte."""
    kind = bytes(draw(st.sampled_from(SAMPLES))[0])
    return [kind, msgspec.msgpack.encode(draw(st.lists(JSON_LIKE, max_size=15) | JSON_LIKE))]


@settings(max_examples=200, deadline=None)
@given(damaged() | plausible() | st.lists(st.binary(max_size=64), max_size=4))
def test_whatever_comes_is_a_message_or_a_wire_error(frames: list[bytes]) -> None:
    for decode in (decode_command, decode_output):
        try:
            message = decode(frames)
        except WireError:
            continue
        # What was let through can be used without a further check.
        assert isinstance(message, get_args(Command) + get_args(Output))
        if isinstance(message, Add):
            unpack_ids(message.token_ids)
            pack_request_ids([message.request_id, message.epoch])
        elif isinstance(message, Abort):
            unpack_request_ids(message.request_ids)
        elif isinstance(message, StepOutput):
            rows = len(unpack_request_ids(message.request_ids))
            counts = unpack_counts(message.counts)
            assert (len(counts), sum(counts)) == (rows, len(unpack_ids(message.token_ids)))


@given(st.lists(st.integers(-(2**31), 2**31 - 1)))
def test_ids_come_back(ids: list[int]) -> None:
    assert unpack_ids(pack_ids(ids)) == ids


@given(st.lists(st.integers(0, U64)))
def test_request_ids_come_back(ids: list[int]) -> None:
    assert unpack_request_ids(pack_request_ids(ids)) == ids


@given(st.lists(st.integers(0, 2**16 - 1)))
def test_counts_come_back(counts: list[int]) -> None:
    assert unpack_counts(pack_counts(counts)) == counts


def test_packed_columns_are_little_endian() -> None:
    assert pack_ids([1, -1]) == b"\x01\0\0\0\xff\xff\xff\xff"
    assert pack_request_ids([258]) == b"\x02\x01" + bytes(6)
    assert pack_counts([258]) == b"\x02\x01"


@pytest.mark.parametrize(
    ("pack", "value"), [(pack_ids, 2**31), (pack_request_ids, -1), (pack_counts, 2**16)]
)
def test_what_does_not_fit_a_column_is_our_bug(pack: Any, value: int) -> None:
    with pytest.raises(OverflowError):
        pack([value])


@pytest.mark.parametrize("unpack", [unpack_ids, unpack_request_ids, unpack_counts])
def test_a_broken_column_does_not_unpack(unpack: Any) -> None:
    with pytest.raises(WireError, match="no multiple"):
        unpack(b"123")
