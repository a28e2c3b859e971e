"""Settings that are adapters by name, such as sql=/adapters/sql,chat=/adapters/chat."""

from __future__ import annotations

MAX_NAME_CHARS = 128


def adapter_list(text: str) -> dict[str, str]:
    """Paths by name, in order. Raises ValueError."""
    adapters: dict[str, str] = {}
    for item in text.split(","):
        name, separator, path = item.partition("=")
        if not separator or not path:
            raise ValueError(f"{item!r} is not NAME=PATH")
        fault = find_name_fault(name)
        if fault is not None:
            raise ValueError(fault)
        if name in adapters:
            raise ValueError(f"{name} is there twice")
        adapters[name] = path
    return adapters


def find_name_fault(name: str) -> str | None:
    """A sentence if no adapter can be called so: 1 to 128 printable ASCII characters without
    spaces, commas and =."""
    if not 1 <= len(name) <= MAX_NAME_CHARS:
        return f"a name of {len(name)} characters, must have 1 to {MAX_NAME_CHARS}"
    if any(not "!" <= char <= "~" or char in ",=" for char in name):
        return "a name may only hold printable ASCII without spaces, commas and ="
    return None
