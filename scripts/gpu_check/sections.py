"""What the check is made of, in the order of what matters most."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Section:
    name: str
    place: str
    """module:function of scripts.gpu_check, which takes (Bench, work directory)."""
    limit_s: float
    is_parity: bool = False
    """Whether the check fails with it."""
    is_rival: bool = False
    """Whether others' code is at fault where it does not finish."""


SECTIONS = (
    Section("kernels", "parity:kernels", 150, is_parity=True),
    Section("models", "parity:models", 75, is_parity=True),
    Section("decode_attention", "attention:decode", 40),
    Section("engine", "serving:engine", 80),
    Section("prefill_attention", "attention:prefill", 60),
    Section("transformers_batching", "rivals:batching", 60, is_rival=True),
    Section("transformers_compiled", "rivals:compiled", 75, is_rival=True),
)
BY_NAME = {section.name: section for section in SECTIONS}
