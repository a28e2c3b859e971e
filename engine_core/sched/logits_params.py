"""The engine's own check of what the runner indexes logits with, or computes on them."""

from __future__ import annotations

import math
from itertools import chain
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pagewire.types import SamplingParams

_MAX_BIAS = 100.0
_MAX_PENALTY = 2.0


def find_fault(sampling: SamplingParams, vocab_size: int) -> str | None:
    """The first field that could hurt a step, as a sentence; None if all is well."""
    # Written so that NaN fails every comparison.
    if not 0 <= sampling.min_tokens <= sampling.max_tokens:
        return (
            f"min_tokens is {sampling.min_tokens}, must be from 0 to max_tokens "
            f"{sampling.max_tokens}"
        )
    if not 0 < sampling.repetition_penalty < math.inf:
        return f"repetition_penalty is {sampling.repetition_penalty}, must be finite and above 0"
    for name in ("presence_penalty", "frequency_penalty"):
        if not abs(getattr(sampling, name)) <= _MAX_PENALTY:
            return f"{name} is {getattr(sampling, name)}, must be from -2 to 2"
    if not all(abs(bias) <= _MAX_BIAS for _, bias in sampling.logit_bias):
        return "logit_bias holds a bias that is not from -100 to 100"
    if len(dict(sampling.logit_bias)) < len(sampling.logit_bias):
        return "logit_bias names a token id twice"
    if not all(sampling.bad_words):
        return "bad_words holds a word without token ids"
    if sampling.allowed_token_ids is not None and not sampling.allowed_token_ids:
        return "allowed_token_ids is empty"
    indices = {
        "stop_token_ids": sampling.stop_token_ids,
        "logit_bias": [token_id for token_id, _ in sampling.logit_bias],
        "bad_words": list(chain.from_iterable(sampling.bad_words)),
        "allowed_token_ids": sampling.allowed_token_ids or (),
    }
    for name, token_ids in indices.items():
        lowest, highest = min(token_ids, default=0), max(token_ids, default=0)
        if lowest < 0 or highest >= vocab_size:
            wrong = lowest if lowest < 0 else highest
            return f"{name} holds {wrong}, outside the vocabulary of {vocab_size}"
    return None
