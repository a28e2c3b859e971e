"""Plain values that every room shares: no torch, no protobuf, no transformers."""

from __future__ import annotations

import enum

import msgspec


class SamplingParams(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """How the engine picks tokens and when it stops; validated by the frontend.

    Every value is final: the frontend has filled in defaults and drawn a seed.
    Stop strings are not here, because the engine sees no text.
    """

    max_tokens: int
    """Upper bound on output tokens, >= 1; prompt + max_tokens <= max_model_len."""
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


class FinishReason(enum.IntEnum):
    """Why a sequence ended, as it crosses the wire."""

    STOP = 1
    """End of sequence, stop token or stop string."""
    LENGTH = 2
    """max_tokens or max_model_len."""
    ABORT = 3
    """Cancelled, disconnected, past its deadline or drained."""
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
