"""Compiles every Triton kernel for every architecture and writes the tables of docs/kernels.md.

    PYTHONPATH=. python scripts/kernel_table.py [--changed | --costs]

--changed keeps the rows whose digest and Triton are still those of the document, which is what
the tests hold them to; --costs writes only what needs no compiler. Needs no GPU. Triton's
cache makes a second run quick. Ends with an error, and leaves the document alone, if a kernel
does not fit.
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


def key_cells(specimen: Specimen) -> list[str]:
    return [f"`{specimen.name}`", specimen.element, specimen.case]


def rows_that_hold(text: str, specimens: list[Specimen]) -> dict[str, str]:
    """The document's rows, by specimen, of kernels that are what they were, compiled by this
    Triton."""
    if _compiled_by() not in text:
        return {}
    written = {}
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        written[(*cells[:3], cells[-1])] = line
    rows = {
        str(specimen): written.get((*key_cells(specimen), digest(specimen)))
        for specimen in specimens
    }
    return {name: row for name, row in rows.items() if row is not None}


def _compiled_by() -> str:
    return f"Compiled by Triton {version('triton')}."


def table_row(specimen: Specimen) -> str:
    cells = key_cells(specimen)
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


def usage_table(text: str, *, only_changed: bool) -> list[str]:
    head = ["kernel", "dtype", "case", "warps", "stages"]
    for arch in MULTIPROCESSORS:
        head += [f"sm_{arch} regs", f"sm_{arch} shared KiB", f"sm_{arch} blocks"]
    head.append("source")
    specimens = all_specimens()
    kept = rows_that_hold(text, specimens) if only_changed else {}
    rows = [kept.get(str(specimen)) or table_row(specimen) for specimen in specimens]
    return [_compiled_by(), "", "| " + " | ".join(head) + " |", "|" + " --- |" * len(head), *rows]


def replace_block(text: str, name: str, lines: list[str]) -> str:
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    before, _, rest = text.partition(begin)
    _, found, after = rest.partition(end)
    if not found:
        raise SystemExit(f"{DOCUMENT} has no {begin} ... {end}")
    return before + "\n".join([begin, *lines, end]) + after


def main() -> None:
    text = DOCUMENT.read_text()
    if "--costs" not in sys.argv[1:]:
        usage = usage_table(text, only_changed="--changed" in sys.argv[1:])
        text = replace_block(text, "kernel_table.py", usage)
    text = replace_block(text, "costs", costs.table())
    DOCUMENT.write_text(text)


if __name__ == "__main__":
    main()
