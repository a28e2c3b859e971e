"""Certificates of the public and admin ports, for gRPC and HTTP, changed without a restart.

New connections get what the files hold now; those that are there keep what they have.
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import grpc

from frontend.watched_file import WatchedFiles
from pagewire.errors import ConfigError

if TYPE_CHECKING:
    from pagewire.config import FrontendConfig

_SETTING = "--tls-cert, --tls-key and --tls-client-ca"


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM files. With `client_ca`, clients must show a certificate of one of its CAs."""

    cert: str
    key: str
    client_ca: str | None


@dataclass(frozen=True, slots=True)
class _Loaded:
    """One consistent reading of them."""

    cert: bytes
    key: bytes
    client_ca: bytes | None
    context: ssl.SSLContext


class Tls:
    """Raises ConfigError."""

    def __init__(self, files: TlsFiles) -> None:
        paths = [path for path in (files.cert, files.key, files.client_ca) if path is not None]
        self._files = files
        self.watched = WatchedFiles(_SETTING, paths, lambda: _load(files))

    def grpc_credentials(self) -> grpc.ServerCredentials:
        """For one port. gRPC asks at each handshake, in a thread of its own."""
        served = self.watched.content

        def fetch() -> grpc.ServerCertificateConfiguration | None:
            nonlocal served
            newest = self.watched.content
            if newest is served:
                return None
            served = newest
            return _configuration(newest)

        return grpc.dynamic_ssl_server_credentials(
            _configuration(served),
            fetch,  # type: ignore[arg-type]  # None is for no change
            require_client_authentication=self._files.client_ca is not None,
        )

    def http_context(self) -> ssl.SSLContext:
        """For as long as the server listens: it hands each handshake to the newest context."""

        def hand_over(connection: ssl.SSLObject, _name: str | None, _context: object) -> None:
            connection.context = self.watched.content.context

        context = _context(self._files)
        # OpenSSL calls it for every ClientHello, also for one that names no server.
        context.sni_callback = hand_over
        return context


def tls_of(config: FrontendConfig) -> Tls | None:
    """None: the ports speak plain text. Raises ConfigError."""
    if config.tls_cert is None or config.tls_key is None:
        if (config.tls_cert, config.tls_key, config.tls_client_ca) != (None, None, None):
            raise ConfigError("--tls-cert and --tls-key are only of use together")
        return None
    return Tls(TlsFiles(config.tls_cert, config.tls_key, config.tls_client_ca))


def _configuration(loaded: _Loaded) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration(
        [(loaded.key, loaded.cert)], root_certificates=loaded.client_ca
    )


def _load(files: TlsFiles) -> _Loaded:
    """Raises OSError, or ValueError that says which file is wrong."""
    before = _contents(files)
    context = _context(files)
    if _contents(files) != before:
        raise ValueError("a file changed while it was read")
    return _Loaded(*before, context)


def _contents(files: TlsFiles) -> tuple[bytes, bytes, bytes | None]:
    client_ca = None if files.client_ca is None else Path(files.client_ca).read_bytes()
    return Path(files.cert).read_bytes(), Path(files.key).read_bytes(), client_ca


def _context(files: TlsFiles) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.set_alpn_protocols(["http/1.1"])
    try:
        context.load_cert_chain(files.cert, files.key, password=_no_password)
    except ssl.SSLError as error:
        raise ValueError(
            f"{files.cert} and {files.key} are not a PEM certificate and its key ({error.reason})"
        ) from None
    if files.client_ca is not None:
        try:
            context.load_verify_locations(files.client_ca)
        except ssl.SSLError as error:
            raise ValueError(f"{files.client_ca} has no PEM certificate ({error.reason})") from None
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def _no_password() -> str:
    # OpenSSL would ask at the terminal.
    raise ValueError("the private key is encrypted; it must not be")
