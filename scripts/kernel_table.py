"""Compiles every Triton kernel for every architecture and writes the tables of docs/kernels.md.

    PYTHONPATH=. python scripts/kernel_table.py [--costs]

--costs writes only what needs no compiler. Needs no GPU. Triton's cache makes a second run
quick. Ends with an error, and leaves the document alone, if a kernel does not fit.
"""

from __future__ import annotations

import sys
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from kernels.cuda import costs
from kernels.cuda.aot import all_specimens, compile_specimen
from kernels.cuda.limits import MULTIPROCESSORS
from kernels.cuda.source import digest

if TYPE_CHECKING:
    from kernels.cuda.specimen import Specimen

DOCUMENT = Path(__file__).resolve().parents[1] / "docs" / "kernels.md"


def table_row(specimen: Specimen) -> str:
    cells = [f"`{specimen.name}`", specimen.element, specimen.case]
    cells += [str(specimen.num_warps), str(specimen.num_stages)]
    for arch, sm in MULTIPROCESSORS.items():
        if arch not in specimen.archs:
            cells += ["", "", ""]
            continue
        usage = compile_specimen(specimen, arch)
        blocks = usage.blocks(sm)
        if blocks == 0:
            raise SystemExit(f"{specimen} does not fit on sm_{arch}: {usage}")
        stack = f" + {usage.stack_bytes} B" if usage.stack_bytes else ""
        cells += [f"{usage.registers}{stack}", f"{usage.shared_bytes / 1024:.1f}", str(blocks)]
    cells.append(digest(specimen))
    print("  ".join(cells), flush=True)
    return "| " + " | ".join(cells) + " |"


def usage_table() -> list[str]:
    head = ["kernel", "dtype", "case", "warps", "stages"]
    for arch in MULTIPROCESSORS:
        head += [f"sm_{arch} regs", f"sm_{arch} shared KiB", f"sm_{arch} blocks"]
    head.append("source")
    rows = [table_row(specimen) for specimen in all_specimens()]
    note = f"Compiled by Triton {version('triton')}."
    return [note, "", "| " + " | ".join(head) + " |", "|" + " --- |" * len(head), *rows]


def replace_block(text: str, name: str, lines: list[str]) -> str:
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    before, _, rest = text.partition(begin)
    _, found, after = rest.partition(end)
    if not found:
        raise SystemExit(f"{DOCUMENT} has no {begin} ... {end}")
    return before + "\n".join([begin, *lines, end]) + after


def main() -> None:
    usage = None if "--costs" in sys.argv[1:] else usage_table()
    text = replace_block(DOCUMENT.read_text(), "costs", costs.table())
    if usage is not None:
        text = replace_block(text, "kernel_table.py", usage)
    DOCUMENT.write_text(text)


if __name__ == "__main__":
    main()
