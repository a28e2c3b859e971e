"""The wheels that a GPU machine without a package registry lacks.

pack() downloads what REQUIRED needs, but for EXPECTED, at the versions of the environment it
runs in. resolve() says which of them the GPU machine needs, by the metadata of what is
installed there and of the wheels.
"""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
import tomllib
import zipfile
from email.parser import Parser
from typing import TYPE_CHECKING, NamedTuple

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name, parse_wheel_filename

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from packaging.version import Version

REQUIRED = (
    "torch",
    "triton",
    "transformers",
    "numpy",
    "safetensors",
    "gguf",
    "msgspec",
    "pydantic",
    "pytest",
    "pytest-asyncio",
    "pytest-timeout",
    "hypothesis",
)
"""What the engine's room and tests/gpu import, in pyproject.toml's ranges."""
EXPECTED = frozenset({"torch", "triton", "transformers", "numpy", "safetensors"})
"""Never packed: too large, or built for the machine's own CUDA."""
_PYTHON = "3.12"
_GLIBC_MINORS = (17, 24, 27, 28, 31, 34)
"""pip takes a wheel for no other than the platforms it is told."""
_PLATFORMS = (
    *(f"manylinux_2_{minor}_x86_64" for minor in _GLIBC_MINORS),
    "manylinux2014_x86_64",
    "manylinux1_x86_64",
)


class Missing(Exception):
    """What is neither installed nor among the wheels, one line each."""


class _Wheel(NamedTuple):
    path: Path
    version: Version
    requires: list[str]


def requirements(pyproject: Path) -> list[Requirement]:
    """REQUIRED, with the ranges of pyproject.toml and its extras."""
    project = tomllib.loads(pyproject.read_text())["project"]
    texts = project["dependencies"] + [
        text for extra in ("cuda", "test") for text in project["optional-dependencies"][extra]
    ]
    ranges = {canonicalize_name((r := Requirement(text)).name): r for text in texts}
    return [ranges[canonicalize_name(name)] for name in REQUIRED]


def pack(directory: Path, pyproject: Path) -> None:
    """Raises Missing if this environment lacks one, CalledProcessError if pip fails."""
    directory.mkdir(parents=True, exist_ok=True)
    for old in directory.glob("*.whl"):
        old.unlink()  # of two versions of one package the older could be taken
    pins: dict[str, str] = {}
    todo = requirements(pyproject)
    while todo:
        name = canonicalize_name(todo.pop().name)
        if name in pins or name in EXPECTED:
            continue
        try:
            found = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError as error:
            raise Missing(f"{name} is not installed here, so it has no tested version") from error
        pins[name] = found.version
        todo += _applicable(found.requires or [])
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--only-binary=:all:", "--implementation=cp", f"--python-version={_PYTHON}"]
    command += [f"--platform={platform}" for platform in _PLATFORMS]
    command += [f"--dest={directory}", *(f"{name}=={pin}" for name, pin in sorted(pins.items()))]
    subprocess.run(command, check=True)


def resolve(wanted: Iterable[Requirement], directory: Path | None) -> list[Path]:
    """The wheels of directory that this environment needs. Raises Missing."""
    wheels = {} if directory is None else _wheels(directory)
    chosen: dict[str, Path] = {}
    asked: dict[str, list[tuple[Requirement, str]]] = {}
    missing = []
    todo = [(requirement, "pyproject.toml") for requirement in wanted]
    while todo:
        requirement, asker = todo.pop()
        name = canonicalize_name(requirement.name)
        asked.setdefault(name, []).append((requirement, asker))
        installed = _installed_version(name)
        # What is installed has what it needs: it is in use there.
        if name not in chosen and installed and _allows(requirement, installed):
            continue
        wheel = wheels.get(name)
        unmet = [
            f"{who} wants {what}"
            for what, who in asked[name]
            if wheel is None or not _allows(what, wheel.version)
        ]
        if wheel is None or unmet:
            has = f"{installed} is installed" if installed else "it is not installed"
            packed = f"{wheel.version} is packed" if wheel else "it is not packed"
            missing.append(f"{'; '.join(unmet)}: {has}, {packed}")
        elif name not in chosen:
            chosen[name] = wheel.path
            todo += [(needed, wheel.path.name) for needed in _applicable(wheel.requires)]
    if missing:
        raise Missing("\n".join(sorted(missing)))
    return sorted(chosen.values())


def install(wheels: Iterable[Path], target: Path) -> None:
    """Beside what is installed, which stays as it is. Raises CalledProcessError."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps"]
    command += ["--upgrade", "--disable-pip-version-check", f"--target={target}"]
    subprocess.run([*command, *map(str, wheels)], check=True)


def _installed_version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _allows(requirement: Requirement, version: Version | str) -> bool:
    return requirement.specifier.contains(version, prereleases=True)


def _applicable(requires: Iterable[str]) -> list[Requirement]:
    """Without extras; for the Python that is packed for."""
    parsed = (Requirement(text) for text in requires)
    environment = {"extra": "", "python_version": _PYTHON, "python_full_version": f"{_PYTHON}.0"}
    return [r for r in parsed if r.marker is None or r.marker.evaluate(environment)]


def _wheels(directory: Path) -> dict[str, _Wheel]:
    found = {}
    for path in sorted(directory.glob("*.whl")):
        name, version, _, _ = parse_wheel_filename(path.name)
        with zipfile.ZipFile(path) as archive:
            (member,) = (
                entry
                for entry in archive.namelist()
                if entry.endswith(".dist-info/METADATA") and entry.count("/") == 1
            )
            metadata = Parser().parsestr(archive.read(member).decode())
        found[name] = _Wheel(path, version, metadata.get_all("Requires-Dist") or [])
    return {str(name): wheel for name, wheel in found.items()}
