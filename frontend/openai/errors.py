"""Errors in OpenAI's shape; the table of HTTP statuses, printed in docs/api.md."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from frontend.openai.responses import Error, ErrorAnswer, encode
from frontend.status import reason_of
from pagewire.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Callable

    from pagewire.errors import PagewireError

STATUS = {
    "invalid_request": 400,
    "not_found": 404,
    "already_exists": 409,
    "queue_full": 429,
    "quota_exceeded": 429,
    "unauthenticated": 401,
    "permission_denied": 403,
    "message_too_large": 413,
    "feature_disabled": 400,
    "failed_precondition": 400,
    "no_room": 429,
    "unimplemented": 501,
    "deadline_exceeded": 504,
    "cancelled": 499,
    "unavailable": 503,
    "internal": 500,
}
"""As google.rpc.Code maps to HTTP, but 413, which HTTP has a number of its own for."""

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    429: "rate_limit_error",
    499: "request_cancelled",
    500: "server_error",
    503: "server_error",
    504: "timeout_error",
}
_OTHER_TYPE = "invalid_request_error"
_AT = re.compile(r"(?P<text>.*?)(?: - at (?P<key>`key` in )?`\$(?P<path>.*?)`)?", re.DOTALL)
_UNKNOWN = re.compile(r"Object contains unknown field `(?P<name>.*)`", re.DOTALL)
_MISSING = re.compile(r"Object missing required field `(?P<name>.*)`", re.DOTALL)
MAX_MESSAGE_CHARS = 2000


@dataclass(frozen=True, slots=True)
class HttpError:
    """What a client is told."""

    status: int
    body: bytes
    """JSON on one line, so that it is an event's data too."""
    headers: tuple[tuple[bytes, bytes], ...]


def http_error(
    error: PagewireError,
    *,
    error_id: str | None = None,
    name_field: Callable[[str], str] = str,
) -> HttpError:
    """`name_field` turns a path of pagewire.v1 into what the body calls it; `error_id` finds
    the error in the log."""
    status = STATUS[error.code]
    message = error.message[:MAX_MESSAGE_CHARS]
    if error_id is not None:
        message = f"{message} (error id {error_id})"
    field: str = getattr(error, "field", "")
    answer = Error(
        message=message,
        type=_TYPES.get(status, _OTHER_TYPE),
        param=name_field(field) if field else None,
        code=reason_of(error).lower(),
    )
    headers: tuple[tuple[bytes, bytes], ...] = ()
    retry_after: float | None = getattr(error, "retry_after", None)
    if retry_after is not None:
        # Whole seconds are the standard's; OpenAI's clients read the finer one first.
        headers = (
            (b"retry-after", b"%d" % max(1, math.ceil(retry_after))),
            (b"retry-after-ms", b"%d" % math.ceil(retry_after * 1000)),
        )
    return HttpError(status, encode(ErrorAnswer(answer)), headers)


def plain_error(status: int, message: str) -> HttpError:
    """For what is wrong before any route is asked."""
    answer = Error(
        message, _TYPES.get(status, _OTHER_TYPE), None, message.lower().replace(" ", "_")
    )
    return HttpError(status, encode(ErrorAnswer(answer)), ())


def bad_body(error: msgspec.MsgspecError | UnicodeDecodeError) -> InvalidRequest:
    """What a decoder did not like, with the field where it knows it."""
    if not isinstance(error, msgspec.ValidationError):
        return InvalidRequest("", f"the body is not JSON: {error}")
    found = _AT.fullmatch(str(error))
    assert found is not None
    text, path = found["text"], (found["path"] or "").removeprefix(".")
    unknown = _UNKNOWN.fullmatch(text) or _MISSING.fullmatch(text)
    if unknown is not None:
        path = f"{path}.{unknown['name']}" if path else unknown["name"]
        text = "is unknown" if text.startswith("Object contains") else "is missing"
        return InvalidRequest(path[:256], f"{path[:256]} {text}")
    where = f"a key of {path}" if found["key"] else path or "the body"
    return InvalidRequest(path, f"{where}: {text[:1].lower()}{text[1:]}")
