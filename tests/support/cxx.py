"""The C++ sources of the CPU kernels, compiled by tests."""

from __future__ import annotations

import re
import subprocess
from typing import TYPE_CHECKING

from kernels.cpu.build import SOURCES, find_compiler

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


def compile_cxx(*arguments: str) -> None:
    """Runs the compiler; raises AssertionError with what it says if it fails."""
    command = [*find_compiler(), *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def headers_read_once(
    folder: Path, flags: Sequence[str], first: Path | None = None
) -> tuple[str, str]:
    """Flags by which a source gets `first` and all system headers from a precompiled file in
    folder. Without it a compiler spends most of its time on them, for every source again; one
    that does not take the file, for other flags or another compiler's, reads the headers."""
    written = "".join(path.read_text() for path in sorted(SOURCES.iterdir()))
    names = sorted(set(re.findall(r"^#include (<.+>)$", written, re.MULTILINE)))
    lines = [f'#include "{first}"\n'] if first else []
    lines += [f"#if __has_include({name})\n#include {name}\n#endif\n" for name in names]
    header = folder / "headers.h"
    header.write_text("".join(lines))
    compile_cxx(*flags, "-x", "c++-header", str(header), "-o", f"{header}.gch")
    return "-include", str(header)
