"""Certificates of a CA of our own, made by the openssl command."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


@dataclass(frozen=True)
class Pair:
    cert: Path
    key: Path


def make_ca(directory: Path, name: str) -> Pair:
    pair = Pair(directory / f"{name}.pem", directory / f"{name}.key")
    _openssl(pair, f"/CN={name}", "-addext", "basicConstraints=critical,CA:TRUE")
    return pair


def make_certificate(directory: Path, name: str, ca: Pair) -> Pair:
    """For localhost and 127.0.0.1."""
    pair = Pair(directory / f"{name}.pem", directory / f"{name}.key")
    _openssl(
        pair,
        f"/CN={name}",
        *("-addext", "basicConstraints=critical,CA:FALSE"),
        *("-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"),
        *("-CA", str(ca.cert), "-CAkey", str(ca.key)),
    )
    return pair


def _openssl(pair: Pair, subject: str, *more: str) -> None:
    curve = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")
    files = ("-keyout", str(pair.key), "-out", str(pair.cert))
    subprocess.run(
        ["openssl", "req", "-x509", "-days", "2", "-subj", subject, *curve, *files, *more],
        check=True,
        capture_output=True,
    )
