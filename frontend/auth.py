"""Who may do what: the one place that decides it, for gRPC methods and HTTP routes alike.

    path + Authorization: Bearer KEY -> Principal, or Unauthenticated or PermissionDenied

Who asks is frontend/gate.py: an interceptor of every gRPC server, and a wrapper around
the whole HTTP application. So what a server comes to serve later is behind it too, and a
path that no rule names is for admins.
"""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from frontend.watched_file import WatchedFiles
from pagewire.api_keys import ANY_TENANT, ApiKey, key_digest, parse_keys
from pagewire.errors import ConfigError, PermissionDenied, Unauthenticated

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

EXEMPTIBLE = ("health", "reflection", "metrics")
ANY_ROLE = "any"
"""Any known key will do."""


@dataclass(frozen=True, slots=True)
class Rule:
    """What paths that begin with `prefix` ask for."""

    prefix: str
    role: str
    group: str = ""
    """Its name in --auth-exempt."""


RULES = (
    Rule("/grpc.health.v1.Health/", ANY_ROLE, "health"),
    Rule("/grpc.reflection.v1.ServerReflection/", ANY_ROLE, "reflection"),
    Rule("/grpc.reflection.v1alpha.ServerReflection/", ANY_ROLE, "reflection"),
    Rule("/pagewire.v1.InferenceService/", "inference"),
    Rule("/pagewire.v1.TokenizerService/", "tokenize"),
    Rule("/pagewire.v1.ModelService/", "models"),
    Rule("/inference.GRPCInferenceService/ServerLive", ANY_ROLE, "health"),
    Rule("/inference.GRPCInferenceService/ServerReady", ANY_ROLE, "health"),
    Rule("/inference.GRPCInferenceService/ModelReady", ANY_ROLE, "health"),
    Rule("/inference.GRPCInferenceService/ServerMetadata", "models"),
    Rule("/inference.GRPCInferenceService/ModelMetadata", "models"),
    Rule("/inference.GRPCInferenceService/", "inference"),
    Rule("/vllm.grpc.engine.VllmEngine/HealthCheck", ANY_ROLE, "health"),
    Rule("/vllm.grpc.engine.VllmEngine/FlushCache", "admin"),
    Rule("/vllm.grpc.engine.VllmEngine/StartProfile", "admin"),
    Rule("/vllm.grpc.engine.VllmEngine/StopProfile", "admin"),
    Rule("/vllm.grpc.engine.VllmEngine/", "inference"),
    Rule("/healthz", ANY_ROLE, "health"),
    Rule("/readyz", ANY_ROLE, "health"),
    Rule("/health", ANY_ROLE, "health"),
    Rule("/ping", ANY_ROLE, "health"),
    Rule("/metrics", "metrics", "metrics"),
    Rule("/live", "metrics", "metrics"),
    Rule("/version", ANY_ROLE),
    Rule("/tokenize", "tokenize"),
    Rule("/detokenize", "tokenize"),
    Rule("/v1/models", "models"),
    Rule("/v1/load_lora_adapter", "admin"),
    Rule("/v1/unload_lora_adapter", "admin"),
    Rule("/v1/", "inference"),
)
"""The first that fits; paths that none fits are for admins."""
_OTHERS = Rule("/", "admin")


@dataclass(frozen=True, slots=True)
class Principal:
    """Who is asking."""

    name: str
    tenant: str
    """* for any."""

    def acts_for(self, tenant: str) -> bool:
        return self.tenant in (ANY_TENANT, tenant)

    def tenant_of(self, named: str) -> str:
        """The tenant of a request that names one, or none (""). Raises PermissionDenied."""
        if self.tenant == ANY_TENANT:
            return named
        if named and named != self.tenant:
            raise PermissionDenied("this key may not act for the tenant that the request names")
        return self.tenant


ANYONE = Principal("", ANY_TENANT)
"""Where no key is asked for."""

_principal: ContextVar[Principal] = ContextVar("frontend_principal", default=ANYONE)


def current_principal() -> Principal:
    """Of the call that this task serves."""
    return _principal.get()


def enter(principal: Principal) -> None:
    """This task, and those it starts, serve a call of `principal`."""
    _principal.set(principal)


class Auth:
    """`keys_file` of None: nobody needs a key. `open_paths` need none in any case, and are
    exact. Raises ConfigError."""

    def __init__(self, keys_file: str | None, exempt: str, open_paths: Iterable[str] = ()) -> None:
        self._exempt = _exempt_groups(exempt)
        self._open_paths = frozenset(open_paths)
        self.keys: WatchedFiles[dict[bytes, ApiKey]] | None = None
        if keys_file is not None:
            path = Path(keys_file)
            self.keys = WatchedFiles(
                "--api-keys", [keys_file], lambda: parse_keys(path.read_text("utf-8"))
            )

    def authorize(self, path: str, authorization: Sequence[str | bytes]) -> Principal:
        """Who calls `path`, a gRPC method or an HTTP path; the values are those of its
        authorization headers. Raises Unauthenticated or PermissionDenied."""
        if self.keys is None or path in self._open_paths:
            return ANYONE
        rule = next((rule for rule in RULES if _fits(rule.prefix, path)), _OTHERS)
        if rule.group in self._exempt:
            return ANYONE
        # A table of digests, not of keys: the time a look-up takes tells of the digest of
        # what was tried, and nobody can choose a key by the beginning of its digest.
        key = self.keys.content.get(key_digest(_bearer(authorization)))
        if key is None:
            raise Unauthenticated("the API key is not known")
        if rule.role != ANY_ROLE and not key.roles & {rule.role, "admin"}:
            raise PermissionDenied(f"this key has not the role {rule.role}")
        return Principal(key.name, key.tenant)


def _fits(prefix: str, path: str) -> bool:
    """Whether it is the path, or one below it."""
    if not path.startswith(prefix):
        return False
    return prefix.endswith("/") or path[len(prefix) :][:1] in ("", "/")


def _bearer(authorization: Sequence[str | bytes]) -> str:
    if not authorization:
        raise Unauthenticated("an API key is needed: authorization: Bearer KEY")
    value = authorization[0]
    text = value.decode("latin-1") if isinstance(value, bytes) else value
    scheme, _, key = text.partition(" ")
    if len(authorization) > 1 or scheme.lower() != "bearer" or not key.strip():
        raise Unauthenticated("the authorization header must be one: Bearer KEY")
    return key.strip()


def _exempt_groups(exempt: str) -> frozenset[str]:
    groups = {part.strip() for part in exempt.split(",")}
    if groups == {"none"}:
        return frozenset()
    unknown = sorted(groups - {*EXEMPTIBLE})
    if unknown:
        raise ConfigError(
            f"--auth-exempt: {unknown[0]!r} is none of {', '.join(EXEMPTIBLE)}, or none alone"
        )
    return frozenset(groups)
