"""What walks between the server process and its workers, over one socket pair each.

A frame is a little-endian uint32 length and a msgpack array whose first element
names the message. `call` pairs a reply with its request. Batches of ids are int32,
little-endian.
"""

from __future__ import annotations

import sys
from array import array
from struct import Struct
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from pagewire.tools import Tool, ToolCall, ToolCallFormat

if TYPE_CHECKING:
    from collections.abc import Iterable

LENGTH = Struct("<I")


class Message(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=True):
    """Base of all messages."""


# Server to worker.


class Load(Message, frozen=True):
    """The first message: what to load."""

    path: str
    """Of a resolved model: an HF directory or a GGUF file."""
    chat_template: str | None
    log_level: str
    log_format: str
    tool_call_parser: ToolCallFormat | Literal["auto"] = "auto"


class Encode(Message, frozen=True):
    call: int
    text: str
    add_special_tokens: bool


class Decode(Message, frozen=True):
    call: int
    token_ids: bytes
    skip_special_tokens: bool
    spaces_between_special_tokens: bool = True
    complete_characters_only: bool = False


class Spell(Message, frozen=True):
    """Asks for the bytes of single tokens."""

    call: int
    token_ids: bytes


class ChatMessage(Message, frozen=True):
    role: str
    content: str
    tool_calls: list[ToolCall] = []
    tool_call_id: str | None = None
    name: str | None = None


class Chat(Message, frozen=True):
    """Renders a conversation and encodes it."""

    call: int
    messages: list[ChatMessage]
    add_generation_prompt: bool | None
    continue_final_message: bool
    template_kwargs: dict[str, Any]
    tools: list[Tool] = []


class Open(Message, frozen=True):
    """Begins or resumes a sequence; see OpenSequence in detokenizer.proto."""

    sequence: int
    prompt_tail: list[int]
    skip_special_tokens: bool
    stop: list[str]
    include_stop_str_in_output: bool
    replay_token_ids: list[int]
    replay_emitted_chars: int
    min_tokens: int = 0
    spaces_between_special_tokens: bool = True
    kept_special_tokens: list[str] = []


class Step(Message, frozen=True):
    """One worker's share of a DetokenizeStreamRequest, in the same columns."""

    call: int
    stream: int
    """The server's number of the stream: sequence ids are unique within it."""
    opens: list[Open]
    sequences: list[int]
    counts: list[int]
    token_ids: list[int]
    finished: list[bool]
    closes: list[int]


class DropStream(Message, frozen=True):
    """A stream has ended: forget its sequences. Not answered."""

    stream: int


class Ping(Message, frozen=True):
    """Asks the thread that serves steps whether it still does."""


# Worker to server.


class Loaded(Message, frozen=True):
    """The first reply: the worker serves."""

    has_chat_template: bool
    vocab_size: int
    tool_call_format: ToolCallFormat = "none"
    template_has_tools: bool = False
    tool_call_special_tokens: list[str] = []


class LoadFailed(Message, frozen=True):
    """The first reply otherwise; the worker ends."""

    message: str
    is_config_error: bool


class Encoded(Message, frozen=True):
    call: int
    token_ids: bytes
    text: str = ""
    """The rendered conversation, for Chat."""


class Decoded(Message, frozen=True):
    call: int
    text: str


class Spelled(Message, frozen=True):
    call: int
    tokens: list[bytes]


class Stop(Message, frozen=True):
    """See SequenceStop in detokenizer.proto."""

    row: int
    stop_index: int
    num_tokens: int


class Lost(Message, frozen=True):
    """See SequenceError in detokenizer.proto."""

    sequence: int
    message: str


class StepDone(Message, frozen=True):
    """Rows with new text, a stop or a finish."""

    call: int
    sequences: list[int]
    texts: list[str]
    stops: list[Stop]
    errors: list[Lost]


class Pong(Message, frozen=True):
    """Answers a Ping, behind the steps that came before it."""


class Failed(Message, frozen=True):
    """A call failed; `field` names what the caller sent wrong, None is our bug."""

    call: int
    field: str | None
    message: str


ToWorker = Load | Encode | Decode | Spell | Chat | Step | DropStream | Ping
FromWorker = Loaded | LoadFailed | Encoded | Decoded | Spelled | StepDone | Pong | Failed

_encoder = msgspec.msgpack.Encoder()
_to_worker = msgspec.msgpack.Decoder(ToWorker)
_from_worker = msgspec.msgpack.Decoder(FromWorker)


def encode_frame(message: ToWorker | FromWorker) -> bytearray:
    """Raises UnicodeEncodeError if a text holds a lone surrogate."""
    frame = bytearray(LENGTH.size)
    _encoder.encode_into(message, frame, LENGTH.size)
    LENGTH.pack_into(frame, 0, len(frame) - LENGTH.size)
    return frame


def decode_to_worker(body: bytes | memoryview) -> ToWorker:
    return _to_worker.decode(body)


def decode_from_worker(body: bytes | memoryview) -> FromWorker:
    return _from_worker.decode(body)


def pack_ids(ids: Iterable[int]) -> bytes:
    """Ids in [-2^31, 2^31) as int32, little-endian; raises OverflowError past that."""
    packed = array("i", ids)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def unpack_ids(data: bytes) -> array[int]:
    ids = array("i")
    ids.frombytes(data)
    if sys.byteorder == "big":
        ids.byteswap()
    return ids
