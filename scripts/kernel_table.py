"""Compiles every Triton kernel for every architecture and writes the table of docs/kernels.md.

    PYTHONPATH=. python scripts/kernel_table.py

Needs no GPU. Triton's cache makes a second run quick.
"""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

from kernels.cuda.aot import SHARED_MEMORY_LIMIT, Specimen, all_specimens, compile_specimen

DOCUMENT = Path(__file__).resolve().parents[1] / "docs" / "kernels.md"
BEGIN = "<!-- kernel_table.py: begin -->"
END = "<!-- kernel_table.py: end -->"


def table_row(specimen: Specimen) -> str:
    cells = [f"`{specimen.name}`", specimen.element, specimen.case]
    cells += [str(specimen.num_warps), str(specimen.num_stages)]
    for arch, limit in SHARED_MEMORY_LIMIT.items():
        usage = compile_specimen(specimen, arch)
        if usage.shared_bytes > limit:
            raise SystemExit(
                f"{specimen} wants {usage.shared_bytes} bytes of shared memory; "
                f"sm_{arch} has {limit}"
            )
        stack = f" + {usage.stack_bytes} B" if usage.stack_bytes else ""
        cells += [f"{usage.registers}{stack}", f"{usage.shared_bytes / 1024:.1f}"]
    print("  ".join(cells), flush=True)
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    head = ["kernel", "dtype", "case", "warps", "stages"]
    for arch in SHARED_MEMORY_LIMIT:
        head += [f"sm_{arch} regs", f"sm_{arch} shared KiB"]
    lines = ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    lines += [table_row(specimen) for specimen in all_specimens()]
    text = DOCUMENT.read_text()
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    note = f"Compiled by Triton {version('triton')}."
    DOCUMENT.write_text("\n".join([before + BEGIN, note, "", *lines, END]) + after)


if __name__ == "__main__":
    main()
