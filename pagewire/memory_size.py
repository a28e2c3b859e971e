"""Sizes of memory as people write them."""

from __future__ import annotations

import re

_UNITS = {
    "": 1,
    "b": 1,
    "kib": 1 << 10,
    "mib": 1 << 20,
    "gib": 1 << 30,
    "tib": 1 << 40,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
}
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([a-z]*)\s*", re.IGNORECASE | re.ASCII)
_MOST = 1 << 60


def memory_size(text: str) -> int:
    """512MiB, 4 GiB, 1.5gb or plain bytes, as bytes > 0. Raises ValueError."""
    match = _SIZE.fullmatch(text)
    unit = _UNITS.get(match[2].lower()) if match else None
    if match is None or unit is None:
        raise ValueError("expected a size such as 512MiB, 4GiB or plain bytes")
    size = float(match[1]) * unit
    if not 1 <= size <= _MOST:
        raise ValueError(f"must be at least a byte and at most {_MOST >> 40} TiB")
    return int(size)
