"""Where `pagewire top` has its figures from: /live and /metrics of a server's HTTP port."""

from __future__ import annotations

import http.client
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from prometheus_client.parser import text_string_to_metric_families

from pagewire.cli.connection import client_tls
from pagewire.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

TIMEOUT_S = 5.0


class SourceFailed(Exception):
    """The server did not tell. `reached`: it answered, with a refusal."""

    def __init__(self, message: str, *, reached: bool) -> None:
        super().__init__(message)
        self.reached = reached


class Page:
    """A /metrics page, by name and labels."""

    def __init__(self, text: str) -> None:
        self._samples: dict[str, list[tuple[Mapping[str, str], float]]] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                entry = (sample.labels, float(sample.value))
                self._samples.setdefault(sample.name, []).append(entry)

    def by(self, name: str, *labels: str) -> dict[tuple[str, ...], float]:
        """A family's values, added up over all labels but these."""
        sums: dict[tuple[str, ...], float] = {}
        for found, value in self._samples.get(name, ()):
            key = tuple(found[label] for label in labels)
            sums[key] = sums.get(key, 0.0) + value
        return sums

    def buckets(self, name: str) -> list[tuple[float, float]]:
        """A histogram's (upper bound, count so far), in rising order."""
        sums = self.by(f"{name}_bucket", "le")
        return sorted((float(bound), count) for (bound,), count in sums.items())


@dataclass(frozen=True, slots=True)
class Sample:
    """Both at nearly the same time."""

    live: dict[str, Any]
    """frontend/web/live.py says what is in it."""
    page: Page


class Source:
    """One connection, made anew where it is lost. Raises ConfigError for a bad address or file."""

    def __init__(
        self,
        address: str,
        *,
        tls: bool = False,
        ca: str | None = None,
        cert: str | None = None,
        key: str | None = None,
        api_key: str | None = None,
    ) -> None:
        is_secure = tls or address.startswith("https://") or (ca, cert, key) != (None, None, None)
        host, port = _split(address)
        self.url = f"{'https' if is_secure else 'http'}://{address.rpartition('://')[2]}"
        self._connection: http.client.HTTPConnection
        if is_secure:
            self._connection = http.client.HTTPSConnection(
                host, port, timeout=TIMEOUT_S, context=client_tls(ca, cert, key)
            )
        else:
            self._connection = http.client.HTTPConnection(host, port, timeout=TIMEOUT_S)
        self._headers = {} if api_key is None else {"authorization": f"Bearer {api_key}"}

    def sample(self) -> Sample:
        """Raises SourceFailed."""
        live = self._get("/live")
        try:
            told = json.loads(live)
            page = Page(self._get("/metrics"))
            if not isinstance(told, dict) or "life" not in told:
                raise ValueError
        except (ValueError, KeyError):
            raise SourceFailed(f"{self.url} is no Pagewire server", reached=True) from None
        return Sample(told, page)

    def close(self) -> None:
        self._connection.close()

    def _get(self, path: str) -> str:
        try:
            try:
                return self._ask(path)
            except (http.client.RemoteDisconnected, ConnectionResetError, BrokenPipeError):
                # An idle connection may have been closed meanwhile.
                self._connection.close()
                return self._ask(path)
        except (OSError, http.client.HTTPException) as error:
            self._connection.close()
            reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
            raise SourceFailed(f"no answer from {self.url}: {reason}", reached=False) from None

    def _ask(self, path: str) -> str:
        self._connection.request("GET", path, headers=self._headers)
        response = self._connection.getresponse()
        body = response.read().decode("utf-8", "replace")
        if response.status == http.client.NOT_FOUND:
            raise SourceFailed(f"{self.url} has no {path}: is it Pagewire's?", reached=True)
        if response.status != http.client.OK:
            raise SourceFailed(f"{self.url}{path}: {_told(response.status, body)}", reached=True)
        return body


def _split(address: str) -> tuple[str, int]:
    """host:port, [host]:port, or a URL of such."""
    url = urlsplit(address if "://" in address else f"//{address}")
    try:
        port = url.port
    except ValueError:
        port = None
    if url.scheme not in ("", "http", "https") or not url.hostname or port is None:
        raise ConfigError(f"--http: must be HOST:PORT, got {address!r}")
    if url.path not in ("", "/") or url.query:
        raise ConfigError(f"--http: must be HOST:PORT without a path, got {address!r}")
    return url.hostname, port


def _told(status: int, body: str) -> str:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"status {status}"
