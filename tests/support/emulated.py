"""Quantized products of the avx_vnni variant on a CPU that has AVX2 alone.

The sources of these products are compiled with PAGEWIRE_EMULATED_BYTE_DOTS: the tiles, sums
and offsets of the variant, and in place of its one instruction (vpdpbusd) AVX2 arithmetic
with the same exact result. So what is not shown here is the instruction itself, what the
compiler makes of it, and its speed. All other ops are those of the avx2 library.
"""

from __future__ import annotations

import subprocess
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kernels.cpu.build import FLAGS, SOURCES, Variant, build, find_compiler, variants
from kernels.cpu.library import Library
from kernels.cpu.ops import CpuOps

if TYPE_CHECKING:
    from pathlib import Path

_SOURCES = ("parallel", "product", "quant_pack", "quant_product", "weight")


@dataclass(frozen=True, slots=True)
class _Emulated(Variant):
    file: Path

    def path(self) -> Path:
        return self.file


def emulated_avx_vnni(folder: Path) -> CpuOps:
    """Builds it in folder. The CPU must run the avx2 library."""
    build()
    (avx2,) = (variant for variant in variants() if variant.name == "avx2")
    flags = (*FLAGS, *avx2.flags, "-DPAGEWIRE_EMULATED_BYTE_DOTS")
    compiler = find_compiler()

    def compile_source(name: str) -> str:
        target = str(folder / f"{name}.o")
        source = str(SOURCES / f"{name}.cpp")
        subprocess.run([*compiler, *flags, "-c", source, "-o", target], check=True)
        return target

    with ThreadPoolExecutor(max_workers=2) as pool:
        objects = list(pool.map(compile_source, _SOURCES))
    library = folder / "emulated_avx_vnni.so"
    # Functions that are not found in it are looked up in a library that it needs.
    needed = ["-Wl,--no-as-needed", str(avx2.path())]
    subprocess.run([*compiler, "-shared", *objects, *needed, "-o", str(library)], check=True)
    return CpuOps(Library(_Emulated("avx_vnni", flags, library)))
