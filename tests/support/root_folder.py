"""Folders that stand for / where what the system tells of itself is read."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


def make_root(root: Path, files: dict[str, str]) -> Path:
    """root, with the files written under it."""
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return root
