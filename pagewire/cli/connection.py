"""The flags of commands that talk to a server: where it is, and how it knows them."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import argparse

    from pagewire.connection import Connection

_API_KEY_VARIABLE = "PAGEWIRE_API_KEY"


def add_security(parser: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    parser.add_argument("--tls", action="store_true", help="Speak TLS; --tls-ca implies it.")
    parser.add_argument("--tls-ca", metavar="FILE", help="PEM file of the server's CA.")
    parser.add_argument("--tls-cert", metavar="FILE", help="PEM file of your own certificate.")
    parser.add_argument("--tls-key", metavar="FILE", help="PEM file of its private key.")
    parser.add_argument(
        "--api-key",
        metavar="KEY",
        help=f"Better {_API_KEY_VARIABLE}: flags are seen by every user of the machine.",
    )


def connection_of(options: argparse.Namespace) -> Connection:
    from pagewire.connection import Connection

    return Connection(
        options.address,
        tls=options.tls,
        ca=options.tls_ca,
        cert=options.tls_cert,
        key=options.tls_key,
        api_key=options.api_key or os.environ.get(_API_KEY_VARIABLE) or None,
    )
