"""The parameters that change logits before a token is drawn: limits, and what leaves here.

Pure functions over plain values, as in frontend/validate.py.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from pagewire.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from frontend.request import SamplingCall
    from pagewire.types import SamplingParams

MAX_LOGIT_BIAS_ENTRIES = 1024
MAX_LOGIT_BIAS = 100.0
MAX_BAD_WORDS = 64
MAX_BAD_WORD_CHARS = 256
MAX_PENALTY = 2.0


def check_ids(field: str, ids: Sequence[int], vocab_size: int) -> None:
    """Raises InvalidRequest with the first id that is not in the vocabulary."""
    if not ids or (min(ids) >= 0 and max(ids) < vocab_size):
        return
    index, bad = next((i, t) for i, t in enumerate(ids) if not 0 <= t < vocab_size)
    raise InvalidRequest(
        field, f"token id {bad} at position {index} is outside the vocabulary of {vocab_size}"
    )


def logits_params(
    call: SamplingCall, defaults: Mapping[str, float], vocab_size: int
) -> dict[str, Any]:
    """Fields of SamplingParams, checked; bad_words get their ids later. Raises InvalidRequest."""
    _check_min_tokens(call)
    _check_bad_words(call.bad_words)
    _check_logit_bias(call.logit_bias, vocab_size)
    _check_allowed(call.allowed_token_ids, vocab_size)
    # NaN fails these comparisons too.
    repetition_penalty = call.repetition_penalty
    if repetition_penalty is None:
        repetition_penalty = defaults.get("repetition_penalty", 1.0)
    if not 0 < repetition_penalty < math.inf:
        raise InvalidRequest(
            "sampling_params.repetition_penalty",
            f"repetition_penalty is {repetition_penalty:g}, must be finite and above 0",
        )
    for name in ("presence_penalty", "frequency_penalty"):
        value = getattr(call, name)
        if not abs(value) <= MAX_PENALTY:
            raise InvalidRequest(
                f"sampling_params.{name}", f"{name} is {value:g}, must be in [-2, 2]"
            )
    return {
        "min_tokens": call.min_tokens,
        "repetition_penalty": repetition_penalty,
        "presence_penalty": call.presence_penalty,
        "frequency_penalty": call.frequency_penalty,
        "logit_bias": call.logit_bias,
        "allowed_token_ids": call.allowed_token_ids,
    }


def check_drawable(sampling: SamplingParams, eos_token_ids: Sequence[int]) -> None:
    """Refuses allowed_token_ids that the other bans leave nothing of from the start.

    What bans of several ids do later, only the engine can see.
    """
    if sampling.allowed_token_ids is None:
        return
    left = set(sampling.allowed_token_ids)
    left.difference_update(word[0] for word in sampling.bad_words if len(word) == 1)
    if sampling.min_tokens:
        left.difference_update(eos_token_ids, sampling.stop_token_ids)
    if not left:
        raise InvalidRequest(
            "sampling_params.allowed_token_ids",
            "bad_words and min_tokens ban every one of allowed_token_ids",
        )


def _check_min_tokens(call: SamplingCall) -> None:
    field = "sampling_params.min_tokens"
    if call.min_tokens < 0:
        raise InvalidRequest(field, f"min_tokens is {call.min_tokens}, must not be negative")
    if call.max_tokens is not None and call.min_tokens > call.max_tokens:
        raise InvalidRequest(
            field, f"min_tokens is {call.min_tokens}, above max_tokens {call.max_tokens}"
        )


def _check_bad_words(words: Sequence[str]) -> None:
    field = "sampling_params.bad_words"
    if len(words) > MAX_BAD_WORDS:
        raise InvalidRequest(field, f"{len(words)} bad words, at most {MAX_BAD_WORDS} are allowed")
    for index, word in enumerate(words):
        if not 1 <= len(word) <= MAX_BAD_WORD_CHARS:
            raise InvalidRequest(
                f"{field}[{index}]",
                f"a bad word has {len(word)} characters, must have 1 to {MAX_BAD_WORD_CHARS}",
            )


def _check_logit_bias(bias: Sequence[tuple[int, float]], vocab_size: int) -> None:
    field = "sampling_params.logit_bias"
    if len(bias) > MAX_LOGIT_BIAS_ENTRIES:
        raise InvalidRequest(
            field, f"{len(bias)} entries, at most {MAX_LOGIT_BIAS_ENTRIES} are allowed"
        )
    for token_id, value in bias:
        if not 0 <= token_id < vocab_size:
            raise InvalidRequest(
                field, f"token id {token_id} is outside the vocabulary of {vocab_size}"
            )
        if not abs(value) <= MAX_LOGIT_BIAS:
            raise InvalidRequest(
                field, f"the bias of token id {token_id} is {value:g}, must be in [-100, 100]"
            )


def _check_allowed(ids: Sequence[int] | None, vocab_size: int) -> None:
    field = "sampling_params.allowed_token_ids"
    if ids is None:
        return
    if not ids:
        raise InvalidRequest(field, "allowed_token_ids is empty")
    if len(ids) > vocab_size:
        raise InvalidRequest(
            field, f"{len(ids)} allowed tokens, but the vocabulary has only {vocab_size}"
        )
    check_ids(field, ids, vocab_size)
