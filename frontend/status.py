"""Errors -> gRPC status with google.rpc details; the one table, printed in docs/api.md.

Every error carries ErrorInfo with an UPPER_SNAKE reason (https://google.aip.dev/193).
What names a field carries BadRequest, what is worth a retry carries RetryInfo and
grpc-retry-pushback-ms, which gRPC clients' retry policies obey (gRFC A6).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import grpc
from google.protobuf.any_pb2 import Any
from google.protobuf.duration_pb2 import Duration
from google.rpc import error_details_pb2, status_pb2

from pagewire.errors import (
    AlreadyExists,
    FeatureDisabled,
    InvalidRequest,
    NotFound,
    QueueFull,
    QuotaExceeded,
    Unavailable,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

    from google.protobuf.message import Message

    from pagewire.errors import PagewireError

DOMAIN = "pagewire"
DETAILS_KEY = "grpc-status-details-bin"
PUSHBACK_KEY = "grpc-retry-pushback-ms"
MAX_MESSAGE_CHARS = 1000
"""Trailers must stay well under 8 KiB, a common limit for a header block."""

STATUS = {
    "invalid_request": grpc.StatusCode.INVALID_ARGUMENT,
    "not_found": grpc.StatusCode.NOT_FOUND,
    "already_exists": grpc.StatusCode.ALREADY_EXISTS,
    "queue_full": grpc.StatusCode.RESOURCE_EXHAUSTED,
    "quota_exceeded": grpc.StatusCode.RESOURCE_EXHAUSTED,
    "unauthenticated": grpc.StatusCode.UNAUTHENTICATED,
    "permission_denied": grpc.StatusCode.PERMISSION_DENIED,
    "message_too_large": grpc.StatusCode.RESOURCE_EXHAUSTED,
    "feature_disabled": grpc.StatusCode.FAILED_PRECONDITION,
    "failed_precondition": grpc.StatusCode.FAILED_PRECONDITION,
    "no_room": grpc.StatusCode.RESOURCE_EXHAUSTED,
    "unimplemented": grpc.StatusCode.UNIMPLEMENTED,
    "deadline_exceeded": grpc.StatusCode.DEADLINE_EXCEEDED,
    "cancelled": grpc.StatusCode.CANCELLED,
    "unavailable": grpc.StatusCode.UNAVAILABLE,
    "internal": grpc.StatusCode.INTERNAL,
}


@dataclass(frozen=True, slots=True)
class RichStatus:
    """What context.abort() takes."""

    code: grpc.StatusCode
    message: str
    trailing_metadata: tuple[tuple[str, str | bytes], ...]


def rich_status(error: PagewireError, error_id: str | None = None) -> RichStatus:
    """The status of an error. `error_id` finds it in the log."""
    code = STATUS[error.code]
    message = error.message[:MAX_MESSAGE_CHARS]
    if error_id is not None:
        message = f"{message} (error id {error_id})"
    status = status_pb2.Status(code=code.value[0], message=message)
    for detail in _details(error, error_id):
        packed = Any()
        packed.Pack(detail)
        status.details.append(packed)
    trailing: list[tuple[str, str | bytes]] = [(DETAILS_KEY, status.SerializeToString())]
    retry_after = _retry_after(error)
    if retry_after is not None:
        trailing.append((PUSHBACK_KEY, str(math.ceil(retry_after * 1000))))
    return RichStatus(code, message, tuple(trailing))


def reason_of(error: PagewireError) -> str:
    """The stable reason: QUEUE_FULL, DRAINING, ENGINE_DEAD and so on."""
    return (error.reason if isinstance(error, Unavailable) else error.code).upper()


def field_violation(error: grpc.aio.AioRpcError) -> str:
    """The first field that a BadRequest of another server names; empty if none."""
    metadata: Iterable[tuple[str, str | bytes]] = error.trailing_metadata() or ()  # type: ignore[assignment]
    for key, value in metadata:
        if key != DETAILS_KEY or not isinstance(value, bytes):
            continue
        for detail in status_pb2.Status.FromString(value).details:
            bad_request = error_details_pb2.BadRequest()
            if detail.Unpack(bad_request) and bad_request.field_violations:
                return str(bad_request.field_violations[0].field)
    return ""


def _details(error: PagewireError, error_id: str | None) -> list[Message]:
    info = error_details_pb2.ErrorInfo(reason=reason_of(error), domain=DOMAIN)
    if error_id is not None:
        info.metadata["error_id"] = error_id
    details: list[Message] = [info]
    if isinstance(error, QueueFull):
        info.metadata["queue_depth"] = str(error.queue_depth)
        info.metadata["queued_tokens"] = str(error.queued_tokens)
    if isinstance(error, QuotaExceeded):
        info.metadata["quota"] = error.quota
        quota = error_details_pb2.QuotaFailure.Violation(
            subject=f"tenant:{error.tenant}", description=error.message[:MAX_MESSAGE_CHARS]
        )
        details.append(error_details_pb2.QuotaFailure(violations=[quota]))
    field = _field(error)
    if field:
        violation = error_details_pb2.BadRequest.FieldViolation(
            field=field, description=error.message[:MAX_MESSAGE_CHARS]
        )
        details.append(error_details_pb2.BadRequest(field_violations=[violation]))
    if isinstance(error, NotFound):
        details.append(
            error_details_pb2.ResourceInfo(
                resource_type=f"pagewire.{error.resource}", resource_name=error.name
            )
        )
    retry_after = _retry_after(error)
    if retry_after is not None:
        delay = Duration(seconds=int(retry_after), nanos=int(retry_after % 1 * 1e9))
        details.append(error_details_pb2.RetryInfo(retry_delay=delay))
    return details


def _field(error: PagewireError) -> str:
    if isinstance(error, InvalidRequest | NotFound | FeatureDisabled | AlreadyExists):
        return error.field
    return ""


def _retry_after(error: PagewireError) -> float | None:
    if isinstance(error, QueueFull | QuotaExceeded | Unavailable):
        return error.retry_after
    return None
