"""What constrains the output's text: its limits, and what leaves here.

Whether a text compiles is for the engine to find out, off its loop.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from pagewire.errors import InvalidRequest
from pagewire.types import MAX_CONSTRAINT_CHARS, StructuredOutput

if TYPE_CHECKING:
    from collections.abc import Sequence

    from frontend.request import SamplingCall, StructuredOutputCall

FIELD = "sampling_params.structured_output"
MAX_CHOICES = 1024


def structured_output(call: SamplingCall, eos_token_ids: Sequence[int]) -> StructuredOutput | None:
    """Raises InvalidRequest naming the constraint at fault."""
    asked = call.structured_output
    if asked is None:
        return None
    if asked.kind is None:
        raise InvalidRequest(
            FIELD, "set one of json_schema, regex, grammar, choice and json_object"
        )
    wanted = StructuredOutput(asked.kind, _text(asked))
    limit = MAX_CONSTRAINT_CHARS[wanted.kind]
    if len(wanted.text) > limit:
        raise InvalidRequest(
            f"{FIELD}.{wanted.kind}",
            f"{wanted.kind} has {len(wanted.text)} characters, at most {limit} are allowed",
        )
    if call.ignore_eos:
        raise InvalidRequest(
            "sampling_params.ignore_eos",
            "ignore_eos excludes structured_output, which ends with the end of sequence",
        )
    if not eos_token_ids:
        raise InvalidRequest(FIELD, "the model has no end of sequence to end with")
    return wanted


def _text(asked: StructuredOutputCall) -> str:
    if asked.kind == "choice":
        _check_choices(asked.choices)
        return json.dumps(asked.choices, ensure_ascii=False)
    if asked.kind == "json_object":
        if not asked.json_object:
            raise InvalidRequest(f"{FIELD}.json_object", "json_object can only be true")
        return ""
    if not asked.text:
        raise InvalidRequest(f"{FIELD}.{asked.kind}", f"{asked.kind} is empty")
    return asked.text


def _check_choices(choices: Sequence[str]) -> None:
    field = f"{FIELD}.choice"
    if not choices:
        raise InvalidRequest(field, "choice is empty")
    if len(choices) > MAX_CHOICES:
        raise InvalidRequest(field, f"{len(choices)} choices, at most {MAX_CHOICES} are allowed")
    for index, choice in enumerate(choices):
        if not choice:
            raise InvalidRequest(f"{field}[{index}]", "a choice is empty")
