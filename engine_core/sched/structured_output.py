"""The engine's own check of what constrains the output, before it is compiled."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pagewire.types import MAX_CONSTRAINT_CHARS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pagewire.types import SamplingParams


def find_constraint_fault(sampling: SamplingParams, eos_token_ids: Sequence[int]) -> str | None:
    """What could hurt the engine, as a sentence; None if all is well."""
    wanted = sampling.structured_output
    if wanted is None:
        return None
    limit = MAX_CONSTRAINT_CHARS[wanted.kind]
    if len(wanted.text) > limit:
        return (
            f"structured_output {wanted.kind} has {len(wanted.text)} characters, "
            f"at most {limit} are allowed"
        )
    if sampling.ignore_eos:
        return "ignore_eos excludes structured_output, which ends with the end of sequence"
    if not eos_token_ids:
        return "structured_output needs an end of sequence, and the model has none"
    return None
