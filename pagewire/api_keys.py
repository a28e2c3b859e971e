"""API keys as a file has them: one a line, the key itself only as its hash.

    name:tenant:sha256hex[:role,role]

A tenant of * may act for any tenant, and then the request names it. Lines may be
empty or begin with #. Keys are random (256 bits), so a plain SHA-256 hides them: there
is nothing to guess that salt or a slow hash would protect.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from dataclasses import dataclass

from pagewire.types import MAX_TENANT_CHARS

ROLES = ("inference", "tokenize", "models", "metrics", "admin")
"""What a key may be for. admin may do everything."""
DEFAULT_ROLES = ("inference", "tokenize", "models")
ANY_TENANT = "*"
KEY_PREFIX = "pw-"

_NAME = re.compile(r"[A-Za-z0-9._@-]{1,64}")
_DIGEST = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class ApiKey:
    name: str
    """Whose it is; this is what logs show."""
    tenant: str
    """* for any."""
    digest: bytes
    """SHA-256 of the key."""
    roles: frozenset[str]

    def line(self) -> str:
        """As the file has it."""
        roles = ",".join(role for role in ROLES if role in self.roles)
        return f"{self.name}:{self.tenant}:{self.digest.hex()}:{roles}"


def new_key(name: str, tenant: str, roles: tuple[str, ...] = DEFAULT_ROLES) -> tuple[str, ApiKey]:
    """A new random key, and what to write into the file for it. Raises ValueError."""
    key = KEY_PREFIX + secrets.token_urlsafe(32)
    return key, parse_line(f"{name}:{tenant}:{key_digest(key).hex()}:{','.join(roles)}")


def key_digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def parse_line(line: str) -> ApiKey:
    """Raises ValueError, which never quotes the line: a key may stand where its hash should."""
    parts = line.split(":")
    if len(parts) not in (3, 4):
        raise ValueError("expected name:tenant:sha256hex[:roles]")
    name, tenant, digest = parts[:3]
    if not _NAME.fullmatch(name):
        raise ValueError("the name must have 1 to 64 letters, digits and ._@-")
    if len(tenant) > MAX_TENANT_CHARS or not tenant.isprintable():
        raise ValueError(f"the tenant must have at most {MAX_TENANT_CHARS} printable characters")
    if not _DIGEST.fullmatch(digest):
        raise ValueError("the third part must be a SHA-256 in 64 lower-case hex digits")
    roles = frozenset(parts[3].split(",")) if len(parts) == 4 else frozenset(DEFAULT_ROLES)
    if roles - {*ROLES}:
        raise ValueError(f"a role is none of {', '.join(ROLES)}")
    return ApiKey(name, tenant, bytes.fromhex(digest), roles)


def parse_keys(text: str) -> dict[bytes, ApiKey]:
    """By digest. Raises ValueError naming the line; a file without a key is one too."""
    keys: dict[bytes, ApiKey] = {}
    names: set[str] = set()
    for number, line in enumerate(text.splitlines(), start=1):
        stripped = line.strip()
        if not stripped or stripped.startswith("#"):
            continue
        try:
            key = parse_line(stripped)
        except ValueError as error:
            raise ValueError(f"line {number}: {error}") from None
        if key.digest in keys or key.name in names:
            raise ValueError(f"line {number}: {key.name} or its key is there twice")
        keys[key.digest] = key
        names.add(key.name)
    if not keys:
        raise ValueError("there is no key in it")
    return keys
