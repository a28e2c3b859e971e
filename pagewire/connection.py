"""How a client reaches a server: its address, TLS, and the key that it shows."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc

from pagewire.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

DEFAULT_ADDRESS = "127.0.0.1:50051"


@dataclass(frozen=True, slots=True)
class Connection:
    """PEM files; `ca` of None takes the CAs that gRPC brings."""

    address: str = DEFAULT_ADDRESS
    tls: bool = False
    """On in any case where a file is named."""
    ca: str | None = None
    cert: str | None = None
    """With `key`, what a server asks for that wants to know its clients (mTLS)."""
    key: str | None = None
    api_key: str | None = field(default=None, repr=False)

    def channel(self, options: Sequence[tuple[str, Any]] = ()) -> grpc.Channel:
        """One that shows the key with each call. Raises ConfigError."""
        if self._is_secure:
            channel = grpc.secure_channel(self.address, self._credentials(), options)
        else:
            channel = grpc.insecure_channel(self.address, options)
        return (
            grpc.intercept_channel(channel, _ShowKey(self.metadata)) if self.metadata else channel
        )

    def aio_channel(self, options: Sequence[tuple[str, Any]] = ()) -> grpc.aio.Channel:
        """One to which each call must give `metadata`. Raises ConfigError."""
        if self._is_secure:
            return grpc.aio.secure_channel(self.address, self._credentials(), options)
        return grpc.aio.insecure_channel(self.address, options)

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """What shows the key, if there is one."""
        if self.api_key is None:
            return ()
        return (("authorization", f"Bearer {self.api_key}"),)

    @property
    def _is_secure(self) -> bool:
        return self.tls or (self.ca, self.cert, self.key) != (None, None, None)

    def _credentials(self) -> grpc.ChannelCredentials:
        if (self.cert is None) != (self.key is None):
            raise ConfigError("--tls-cert and --tls-key are only of use together")
        return grpc.ssl_channel_credentials(
            _read("--tls-ca", self.ca),
            _read("--tls-key", self.key),
            _read("--tls-cert", self.cert),
        )


def _read(setting: str, path: str | None) -> bytes | None:
    if path is None:
        return None
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"{setting} {path}: {error.strerror}") from None
    # gRPC would only tell of a handshake that failed, in lines of its own.
    if b"-----BEGIN" not in content:
        raise ConfigError(f"{setting} {path}: not a PEM file")
    return content


# Generic in the stubs only.
if TYPE_CHECKING:
    _UnaryInterceptor = grpc.UnaryUnaryClientInterceptor[Any, Any]
    _StreamInterceptor = grpc.UnaryStreamClientInterceptor[Any, Any]
else:
    _UnaryInterceptor = grpc.UnaryUnaryClientInterceptor
    _StreamInterceptor = grpc.UnaryStreamClientInterceptor


class _ShowKey(_UnaryInterceptor, _StreamInterceptor):
    def __init__(self, metadata: tuple[tuple[str, str], ...]) -> None:
        self._metadata = metadata

    def intercept_unary_unary(
        self, continuation: Callable[..., Any], client_call_details: Any, request: Any
    ) -> Any:
        return continuation(self._with_key(client_call_details), request)

    def intercept_unary_stream(
        self, continuation: Callable[..., Any], client_call_details: Any, request: Any
    ) -> Any:
        return continuation(self._with_key(client_call_details), request)

    def _with_key(self, details: Any) -> Any:
        return details._replace(metadata=(*(details.metadata or ()), *self._metadata))
