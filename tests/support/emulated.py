"""Variants of the CPU library that this machine cannot run, with their own instructions emulated.

What they do around these instructions is compiled from the sources that the real variants are
made of. So what is not shown here is the instructions themselves, what the compiler makes of
the real variant, and its speed.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kernels.cpu.build import FLAGS, SOURCES, Variant, build, variants
from kernels.cpu.library import Library
from kernels.cpu.ops import CpuOps
from tests.support.cxx import compile_cxx, headers_read_once

if TYPE_CHECKING:
    from collections.abc import Sequence

_QUANTIZED = ("parallel", "product", "quant_pack", "quant_product", "weight")
_ALL = tuple(sorted(path.stem for path in SOURCES.glob("*.cpp")))


@dataclass(frozen=True, slots=True)
class _Emulated(Variant):
    file: Path = Path()

    def path(self) -> Path:
        return self.file


def emulated_avx_vnni(folder: Path) -> CpuOps:
    """Quantized products with AVX2 arithmetic of the same exact result in place of vpdpbusd;
    all other ops are those of the avx2 library. Builds it in folder. The CPU must run avx2."""
    build()
    (avx2,) = (variant for variant in variants() if variant.name == "avx2")
    # -O2 would take twice as long to compile.
    flags = (*avx2.flags, "-Og", "-DPAGEWIRE_EMULATED_BYTE_DOTS")
    return CpuOps(_compile(folder, "avx_vnni", _QUANTIZED, flags, avx2))


def emulated_avx512_bf16(folder: Path) -> CpuOps:
    """All ops, with each AVX-512 instruction by emulated_avx512.h. Builds it in folder. The CPU
    must run avx2."""
    build()
    (avx2,) = (variant for variant in variants() if variant.name == "avx2")
    header = Path(__file__).with_name("emulated_avx512.h")
    # -O2 would take four times as long to compile.
    flags = (*avx2.flags, "-Og", "-Wno-ignored-attributes")
    flags += headers_read_once(folder, (*FLAGS, *flags), header)
    return CpuOps(_compile(folder, "avx512_bf16", _ALL, flags, avx2))


def emulated_amx(folder: Path) -> CpuOps:
    """Products and experts in C++ for any CPU, with the vectors and panels of amx and the tile
    registers of emulated_tiles.h; all other ops are those of the portable library. Stacks of blocks
    are not to be run: that library's panels are others. Builds it in folder."""
    build()
    portable, *_ = variants()
    # Vectors of 16 take GCC 26 s of quant_product.cpp alone with -O2, all sources 5 s without.
    flags = ("-DPAGEWIRE_EMULATED_TILES", f"-I{Path(__file__).parent}", "-O0")
    sources = (*_QUANTIZED, "experts")
    return CpuOps(_compile(folder, "amx", sources, flags, portable))


def _compile(
    folder: Path, name: str, sources: Sequence[str], flags: tuple[str, ...], rest: Variant
) -> Library:
    def compile_source(stem: str) -> str:
        target = str(folder / f"{stem}.o")
        source = str(SOURCES / f"{stem}.cpp")
        compile_cxx(*FLAGS, *flags, "-c", source, "-o", target)
        return target

    with ThreadPoolExecutor(max_workers=2) as pool:
        objects = list(pool.map(compile_source, sources))
    library = folder / f"emulated_{name}.so"
    # Functions that are not found in it are looked up in a library that it needs.
    needed = ["-Wl,--no-as-needed", str(rest.path())]
    compile_cxx("-shared", *objects, *needed, "-o", str(library))
    return Library(_Emulated(name, flags, file=library))
