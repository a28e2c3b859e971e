"""Plain values that every room shares: no torch, no protobuf, no transformers."""

from __future__ import annotations

import enum
from typing import Final, Literal

import msgspec

MAX_LOGPROBS = 20
"""Likeliest tokens that can be reported at a position."""
MAX_TENANT_CHARS = 128
MAX_SEQUENCES = 64
"""Sequences that one request can ask for."""

ConstraintKind = Literal["json_schema", "regex", "grammar", "choice", "json_object"]
MAX_CONSTRAINT_CHARS: Final[dict[ConstraintKind, int]] = {
    "json_schema": 65_536,
    "regex": 8192,
    "grammar": 16_384,
    "choice": 65_536,
    "json_object": 0,
}
"""Of StructuredOutput.text. What is compiled recurses as deep as these nest."""
EarlyStopping = Literal["true", "false", "never"]
MAX_BEAM_WIDTH = 16
MAX_JSON_WHITESPACE = 12
"""White space that may stand between two JSON tokens, in characters."""


class StructuredOutput(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What the output's text must be as a whole. Equal ones are compiled once."""

    kind: ConstraintKind
    text: str
    """A JSON schema, a regular expression in Rust's syntax, a grammar in llguidance's
    Lark dialect, or a JSON array of the choices; empty for json_object."""


class BeamParams(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Beam search in place of sampling, as transformers' generate does it."""

    width: int
    """Sequences kept at each step, in [1, MAX_BEAM_WIDTH]."""
    num_return: int
    """Of which the best are returned, <= width."""
    length_penalty: float = 1.0
    """score = sum of logprobs / length ** length_penalty."""
    early_stopping: EarlyStopping = "false"
    stop: tuple[str, ...] = ()
    """A sequence is complete once its text holds one of these: the engine looks for their
    UTF-8 in the bytes of the output's tokens."""


class SamplingParams(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """How the engine picks tokens and when it stops; validated by the frontend.

    Every value is final: the frontend has filled in defaults and drawn a seed.
    Stop strings are not here, because the engine sees no text.
    """

    max_tokens: int
    """Upper bound on output tokens; prompt + max_tokens <= max_model_len. 0 computes the
    prompt (for its logprobs) and ends with LENGTH."""
    temperature: float = 1.0
    """>= 0; 0 is greedy."""
    top_p: float = 1.0
    """In (0, 1]."""
    top_k: int = 0
    """0 keeps all."""
    min_p: float = 0.0
    """In [0, 1]."""
    seed: int = 0
    """Unsigned 64 bit, keys the counter-based random numbers."""
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    """Output tokens before which neither EOS nor a stop id is drawn."""
    repetition_penalty: float = 1.0
    """> 0; over prompt and output."""
    presence_penalty: float = 0.0
    """Over the output only."""
    frequency_penalty: float = 0.0
    """Over the output only."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token id, what is added to its logit)."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Token id sequences whose last id is never drawn after the others."""
    allowed_token_ids: tuple[int, ...] | None = None
    """None allows all."""
    logprobs: int | None = None
    """How many likeliest tokens to report beside each drawn one; None reports nothing."""
    prompt_logprobs: int | None = None
    structured_output: StructuredOutput | None = None
    beam: BeamParams | None = None


class FinishReason(enum.IntEnum):
    """Why a sequence ended, as it crosses the wire."""

    STOP = 1
    """End of sequence, stop token or stop string."""
    LENGTH = 2
    """max_tokens or max_model_len."""
    ABORT = 3
    """Cancelled, past its deadline, drained, or lost with its connection."""
    ERROR = 4
    """The engine could not serve it; the message says why."""


class Usage(msgspec.Struct, frozen=True, gc=False):
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


class Timings(msgspec.Struct, frozen=True, gc=False):
    """Seconds, measured by the engine's monotonic clock."""

    queue: float
    prefill: float
    decode: float
