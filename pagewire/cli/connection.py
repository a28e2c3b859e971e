"""The flags of commands that talk to a server: where it is, and how it knows them."""

from __future__ import annotations

import os
import ssl
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from pagewire.errors import ConfigError

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
        api_key=api_key_of(options),
    )


def http_tls_of(options: argparse.Namespace, url: str) -> ssl.SSLContext | None:
    """For an HTTP client of the --url; None: no flag names a file. Raises ConfigError."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"--url: must be http://HOST:PORT or https://HOST:PORT, got {url!r}")
    ca, cert, key = options.tls_ca, options.tls_cert, options.tls_key
    flags = {"--tls": options.tls, "--tls-ca": ca, "--tls-cert": cert, "--tls-key": key}
    given = [name for name, value in flags.items() if value]
    if given and parts.scheme != "https":
        raise ConfigError(f"{given[0]} is of use with an https:// --url only, got {url!r}")
    return None if (ca, cert, key) == (None, None, None) else client_tls(ca, cert, key)


def client_tls(ca: str | None, cert: str | None, key: str | None) -> ssl.SSLContext:
    """From PEM files; `ca` of None takes the system's CAs. Raises ConfigError."""
    if (cert is None) != (key is None):
        raise ConfigError("--tls-cert and --tls-key are only of use together")
    for flag, path in (("--tls-ca", ca), ("--tls-cert", cert), ("--tls-key", key)):
        _check_pem(flag, path)
    try:
        context = ssl.create_default_context(cafile=ca)
    except ssl.SSLError as error:
        raise ConfigError(f"--tls-ca {ca}: no PEM certificate ({error.reason})") from None
    if cert is not None:
        try:
            context.load_cert_chain(cert, key, password=_no_password)
        except ssl.SSLError as error:
            raise ConfigError(
                f"--tls-cert {cert} and --tls-key {key}: not a PEM certificate and its key "
                f"({error.reason})"
            ) from None
    return context


def _check_pem(flag: str, path: str | None) -> None:
    """OpenSSL would not say which of its files is not there."""
    if path is None:
        return
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"{flag} {path}: {error.strerror}") from None
    if b"-----BEGIN" not in content:
        raise ConfigError(f"{flag} {path}: not a PEM file")


def _no_password() -> str:
    # OpenSSL would ask at the terminal.
    raise ConfigError("--tls-key: the private key is encrypted; it must not be")


def api_key_of(options: argparse.Namespace) -> str | None:
    key: str | None = options.api_key or os.environ.get(_API_KEY_VARIABLE) or None
    return key
