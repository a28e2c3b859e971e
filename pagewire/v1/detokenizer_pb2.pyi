from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GetTokenBytesRequest(_message.Message):
    __slots__ = ("token_ids",)
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class GetTokenBytesResponse(_message.Message):
    __slots__ = ("tokens",)
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    tokens: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, tokens: _Optional[_Iterable[bytes]] = ...) -> None: ...

class GetTokenizerInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetTokenizerInfoResponse(_message.Message):
    __slots__ = ("has_chat_template", "vocab_size", "num_workers", "tool_call_format", "chat_template_has_tools", "tool_call_special_tokens")
    HAS_CHAT_TEMPLATE_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    NUM_WORKERS_FIELD_NUMBER: _ClassVar[int]
    TOOL_CALL_FORMAT_FIELD_NUMBER: _ClassVar[int]
    CHAT_TEMPLATE_HAS_TOOLS_FIELD_NUMBER: _ClassVar[int]
    TOOL_CALL_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    has_chat_template: bool
    vocab_size: int
    num_workers: int
    tool_call_format: str
    chat_template_has_tools: bool
    tool_call_special_tokens: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, has_chat_template: _Optional[bool] = ..., vocab_size: _Optional[int] = ..., num_workers: _Optional[int] = ..., tool_call_format: _Optional[str] = ..., chat_template_has_tools: _Optional[bool] = ..., tool_call_special_tokens: _Optional[_Iterable[str]] = ...) -> None: ...

class OpenSequence(_message.Message):
    __slots__ = ("sequence", "prompt_tail", "skip_special_tokens", "stop", "include_stop_str_in_output", "replay_token_ids", "replay_emitted_chars", "min_tokens", "spaces_between_special_tokens", "kept_special_tokens")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TAIL_FIELD_NUMBER: _ClassVar[int]
    SKIP_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    INCLUDE_STOP_STR_IN_OUTPUT_FIELD_NUMBER: _ClassVar[int]
    REPLAY_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    REPLAY_EMITTED_CHARS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SPACES_BETWEEN_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    KEPT_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    prompt_tail: _containers.RepeatedScalarFieldContainer[int]
    skip_special_tokens: bool
    stop: _containers.RepeatedScalarFieldContainer[str]
    include_stop_str_in_output: bool
    replay_token_ids: _containers.RepeatedScalarFieldContainer[int]
    replay_emitted_chars: int
    min_tokens: int
    spaces_between_special_tokens: bool
    kept_special_tokens: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, sequence: _Optional[int] = ..., prompt_tail: _Optional[_Iterable[int]] = ..., skip_special_tokens: _Optional[bool] = ..., stop: _Optional[_Iterable[str]] = ..., include_stop_str_in_output: _Optional[bool] = ..., replay_token_ids: _Optional[_Iterable[int]] = ..., replay_emitted_chars: _Optional[int] = ..., min_tokens: _Optional[int] = ..., spaces_between_special_tokens: _Optional[bool] = ..., kept_special_tokens: _Optional[_Iterable[str]] = ...) -> None: ...

class DetokenizeStreamRequest(_message.Message):
    __slots__ = ("step", "opens", "sequences", "counts", "token_ids", "finished", "closes")
    STEP_FIELD_NUMBER: _ClassVar[int]
    OPENS_FIELD_NUMBER: _ClassVar[int]
    SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    CLOSES_FIELD_NUMBER: _ClassVar[int]
    step: int
    opens: _containers.RepeatedCompositeFieldContainer[OpenSequence]
    sequences: _containers.RepeatedScalarFieldContainer[int]
    counts: _containers.RepeatedScalarFieldContainer[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    finished: _containers.RepeatedScalarFieldContainer[bool]
    closes: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, step: _Optional[int] = ..., opens: _Optional[_Iterable[_Union[OpenSequence, _Mapping]]] = ..., sequences: _Optional[_Iterable[int]] = ..., counts: _Optional[_Iterable[int]] = ..., token_ids: _Optional[_Iterable[int]] = ..., finished: _Optional[_Iterable[bool]] = ..., closes: _Optional[_Iterable[int]] = ...) -> None: ...

class SequenceStop(_message.Message):
    __slots__ = ("row", "stop_index", "num_tokens")
    ROW_FIELD_NUMBER: _ClassVar[int]
    STOP_INDEX_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    row: int
    stop_index: int
    num_tokens: int
    def __init__(self, row: _Optional[int] = ..., stop_index: _Optional[int] = ..., num_tokens: _Optional[int] = ...) -> None: ...

class SequenceError(_message.Message):
    __slots__ = ("sequence", "message")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    message: str
    def __init__(self, sequence: _Optional[int] = ..., message: _Optional[str] = ...) -> None: ...

class DetokenizeStreamResponse(_message.Message):
    __slots__ = ("step", "sequences", "texts", "stops", "errors")
    STEP_FIELD_NUMBER: _ClassVar[int]
    SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    TEXTS_FIELD_NUMBER: _ClassVar[int]
    STOPS_FIELD_NUMBER: _ClassVar[int]
    ERRORS_FIELD_NUMBER: _ClassVar[int]
    step: int
    sequences: _containers.RepeatedScalarFieldContainer[int]
    texts: _containers.RepeatedScalarFieldContainer[str]
    stops: _containers.RepeatedCompositeFieldContainer[SequenceStop]
    errors: _containers.RepeatedCompositeFieldContainer[SequenceError]
    def __init__(self, step: _Optional[int] = ..., sequences: _Optional[_Iterable[int]] = ..., texts: _Optional[_Iterable[str]] = ..., stops: _Optional[_Iterable[_Union[SequenceStop, _Mapping]]] = ..., errors: _Optional[_Iterable[_Union[SequenceError, _Mapping]]] = ...) -> None: ...
