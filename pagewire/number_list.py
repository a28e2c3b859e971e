"""Settings that are several whole numbers, such as 1,2,4."""

from __future__ import annotations


def number_list(text: str) -> tuple[int, ...]:
    """The numbers, ascending, each once and at least 1. Raises ValueError."""
    try:
        numbers = {int(part) for part in text.split(",")}
    except ValueError:
        raise ValueError("not whole numbers with commas between them") from None
    if min(numbers) < 1:
        raise ValueError(f"{min(numbers)} is among the numbers, 1 is the least")
    return tuple(sorted(numbers))
