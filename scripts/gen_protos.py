"""Generates pagewire/v1 from protos/pagewire/v1.

The proto path is the package is the module path, so what protoc writes is
importable as it is.
"""

from __future__ import annotations

import argparse
import importlib.resources
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent.parent


def generate(out: Path) -> None:
    """Writes the stubs under `out`/pagewire/v1. Raises RuntimeError where protoc fails."""
    protos = ROOT / "protos"
    files = sorted(str(path.relative_to(protos)) for path in protos.rglob("*.proto"))
    well_known = importlib.resources.files("grpc_tools") / "_proto"
    status = protoc.main(
        [
            "protoc",
            f"-I{protos}",
            f"-I{well_known}",
            f"--python_out={out}",
            f"--pyi_out={out}",
            f"--grpc_python_out={out}",
            *files,
        ]
    )
    if status != 0:
        raise RuntimeError(f"protoc ended with status {status}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT, help="default: the repository")
    generate(parser.parse_args().out)


if __name__ == "__main__":
    main()
