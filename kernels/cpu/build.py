"""Builds the C++ ops: python -m kernels.cpu.build

One shared library per instruction set, next to this file, named after a hash of
the sources and flags: a library that does not match the sources is never
loaded. The compiler is $CXX, g++, clang++ or the zig of the ziglang wheel,
whichever is found first. There is no dependency on torch's headers or version.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import importlib.util
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
SOURCES = FOLDER / "csrc"
COMMAND = "python -m kernels.cpu.build"

FLAGS = ("-std=c++17", "-O2", "-fPIC", "-fvisibility=hidden", "-fno-math-errno",
          "-fno-trapping-math", "-ffp-contract=fast", "-Wno-psabi")  # fmt: skip
_X86_V3 = ("-mavx2", "-mfma", "-mf16c", "-mbmi", "-mbmi2", "-mlzcnt", "-mmovbe")
_X86_V4 = (*_X86_V3, "-mavx512f", "-mavx512bw", "-mavx512cd", "-mavx512dq", "-mavx512vl")
_X86_VNNI = (*_X86_V4, "-mavx512vnni")
_X86_DOTS = (*_X86_VNNI, "-mavx512bf16")


class BuildError(Exception):
    """No compiler, or the compiler failed; the message holds what it printed."""


@dataclass(frozen=True, slots=True)
class Variant:
    """The same sources for one instruction set."""

    name: str
    """As csrc/machine.cpp knows it too."""
    flags: tuple[str, ...]
    uses_tiles: bool = False
    """Registers that a process must ask for: request_tiles()."""

    def path(self) -> Path:
        digest = hashlib.sha256(repr((FLAGS, self.flags)).encode())
        for source in sorted(SOURCES.iterdir()):
            digest.update(source.name.encode() + b"\0" + source.read_bytes())
        return FOLDER / f"pagewire_{self.name}_{digest.hexdigest()[:16]}.so"


def variants() -> tuple[Variant, ...]:
    """Those of this machine's architecture, by preference, best last: the last that the CPU
    runs is used. A CPU need not run all that come before it."""
    portable = Variant("portable", ())
    if platform.machine() not in ("x86_64", "AMD64"):
        return (portable,)
    return (
        portable,
        Variant("avx2", _X86_V3),
        Variant("avx_vnni", (*_X86_V3, "-mavxvnni")),
        Variant("avx512", _X86_V4),
        Variant("avx512_vnni", _X86_VNNI),
        Variant("avx512_bf16", _X86_DOTS),
        Variant("amx", (*_X86_DOTS, "-mamx-tile", "-mamx-bf16", "-mamx-int8"), uses_tiles=True),
    )


def find_compiler() -> list[str]:
    """The command to which arguments are added. Raises BuildError if there is none."""
    if os.environ.get("CXX"):
        return shlex.split(os.environ["CXX"])
    for name in ("g++", "clang++"):
        if shutil.which(name):
            return [name]
    if importlib.util.find_spec("ziglang") is not None:
        # Its default is the machine at hand, which would make the portable variant anything but.
        return [sys.executable, "-m", "ziglang", "c++", "-mcpu=baseline"]
    raise BuildError("no C++ compiler: set CXX, or install g++, clang++ or the ziglang wheel")


def cpu_runs(portable: Path, variant: Variant) -> bool:
    """Whether this CPU runs variant, by asking the portable one's library."""
    answer = ctypes.CDLL(str(portable)).pagewire_cpu_runs(variant.name.encode())
    assert answer in (0, 1), f"machine.cpp does not know the variant {variant.name}"
    return bool(answer)


def request_tiles(portable: Path) -> int:
    """Asks the system, through the portable library, to let this process use tile registers.
    Returns 0, or the errno of the refusal."""
    error = ctypes.CDLL(str(portable)).pagewire_request_tiles()
    assert isinstance(error, int)
    return error


def build(*, every: bool = False, force: bool = False) -> list[Path]:
    """Builds the variants that this CPU runs (every: all of its architecture, for an image
    that travels) where missing; returns their libraries. Leaves out, and says so on stderr,
    those whose flags the compiler does not know. Raises BuildError."""
    portable, *others = variants()
    with (
        tempfile.TemporaryDirectory(prefix=".build-", dir=FOLDER) as scratch,
        ThreadPoolExecutor(max_workers=os.cpu_count()) as pool,
    ):
        try:
            libraries = [_Build(portable, Path(scratch), pool, force=force).finish()]
            # All at once: no core waits while a variant's last source is compiled.
            builds = [
                _Build(variant, Path(scratch), pool, force=force)
                for variant in others
                if (every or cpu_runs(libraries[0], variant)) and _can_build(variant, Path(scratch))
            ]
            libraries += [it.finish() for it in builds]
        except BuildError:
            pool.shutdown(cancel_futures=True)
            raise
    current = {variant.path() for variant in variants()}
    for path in FOLDER.glob("pagewire_*.so"):
        if path not in current:
            path.unlink(missing_ok=True)
    return libraries


def refusal(variant: Variant, scratch: Path) -> str:
    """What the compiler says against the flags of variant; empty if it knows them."""
    source = scratch / "empty.cpp"
    source.touch()
    command = [*find_compiler(), *variant.flags, "-c", str(source), "-o", f"{source}.o"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 - our own command
    return (done.stderr or done.stdout).strip() if done.returncode else ""


def _can_build(variant: Variant, scratch: Path) -> bool:
    if variant.path().exists():
        return True
    said = refusal(variant, scratch)
    if said:
        sys.stderr.write(
            f"kernels.cpu: WITHOUT the variant {variant.name}, whose instructions the compiler "
            f"does not know: {said}\n"
        )
    return not said


class _Build:
    """One variant's library, whose sources are being compiled in the pool."""

    def __init__(
        self, variant: Variant, scratch: Path, pool: ThreadPoolExecutor, *, force: bool
    ) -> None:
        self._variant = variant
        self._path = variant.path()
        self._scratch = scratch
        self._started = time.monotonic()
        self._is_current = self._path.exists() and not force
        self._objects = []
        if not self._is_current:
            self._compiler = find_compiler()
            sources = sorted(SOURCES.glob("*.cpp"))
            self._objects = [pool.submit(self._compile, source) for source in sources]

    def finish(self) -> Path:
        """Raises BuildError."""
        path = self._path
        if self._is_current:
            sys.stdout.write(f"kernels.cpu: up to date: {path.name}\n")
            return path
        objects = [str(done.result()) for done in self._objects]
        library = self._scratch / path.name
        _run([*self._compiler, "-shared", "-pthread", *objects, "-o", str(library)])
        # Atomic, for a server that starts while this runs.
        library.replace(path)
        seconds = time.monotonic() - self._started
        name = self._compiler[0]
        sys.stdout.write(f"kernels.cpu: built {path.name} with {name} in {seconds:.1f} s\n")
        return path

    def _compile(self, source: Path) -> Path:
        target = self._scratch / f"{self._variant.name}-{source.stem}.o"
        flags = [*FLAGS, *self._variant.flags]
        _run([*self._compiler, *flags, "-c", str(source), "-o", str(target)])
        return target


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 - our own command
    if done.returncode:
        raise BuildError(f"{shlex.join(command)} failed:\n{done.stderr or done.stdout}")


def main() -> int:
    parser = argparse.ArgumentParser(prog=COMMAND, description="Builds the C++ ops.")
    parser.add_argument("--all", action="store_true", help="every variant of this architecture")
    parser.add_argument("--force", action="store_true", help="even what is up to date")
    arguments = parser.parse_args()
    try:
        build(every=arguments.all, force=arguments.force)
    except BuildError as error:
        sys.stderr.write(f"kernels.cpu: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
