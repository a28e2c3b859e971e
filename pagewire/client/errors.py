"""How calls fail, as a tree: gRPC's status, and in it what google.rpc's details say.

    CallFailed
     +- InvalidArgument     `field` is wrong
     +- NotFound            no such model or request
     +- AlreadyExists       the request id is in flight
     +- FailedPrecondition  switched off on this server, or impossible as things stand
     +- Unimplemented
     +- Unauthenticated     no key, or an unknown one
     +- PermissionDenied    the key may not do this
     +- ResourceExhausted   a message is too large
     |   +- QueueFull       the server has as many requests as it takes
     |   +- QuotaExceeded   the tenant is over a limit of its own
     +- DeadlineExceeded
     +- Cancelled           by this client, by a Cancel, or by one that resumed the stream
     +- Unavailable         loading, draining, or a process is gone: see `reason`
     |   +- Unreachable     no server answered
     +- InternalError       a bug of the server's: `error_id` is in its log

The table in docs/api.md says which code of the server becomes which status.
"""

from __future__ import annotations

from typing import Any

import grpc
from google.rpc import error_details_pb2, status_pb2

_DETAILS_KEY = "grpc-status-details-bin"
_LOST = frozenset({"UNAVAILABLE", "INTERNAL", "UNKNOWN"})
"""What gRPC itself calls a connection that broke, by the way in which it did."""


class CallFailed(Exception):
    """A call ended with a status other than OK.

    `code` is the gRPC status's name and `reason` the server's own, such as QUEUE_FULL, empty
    if it gave none. `field` is the request's field that is at fault, if the server named one.
    `retry_after` is in seconds, None where the server promises nothing. `metadata` is that of
    ErrorInfo. `reached` is False where no server answered at all.
    """

    def __init__(
        self,
        code: str,
        message: str,
        *,
        field: str | None = None,
        reached: bool = True,
        reason: str = "",
        retry_after: float | None = None,
        metadata: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.field = field
        self.reached = reached
        self.reason = reason
        self.retry_after = retry_after
        self.metadata = metadata or {}

    @property
    def lost(self) -> bool:
        """Whether it is the connection that failed: the server may be at work all the same."""
        return not self.reason and self.code in _LOST


class InvalidArgument(CallFailed):
    pass


class NotFound(CallFailed):
    pass


class AlreadyExists(CallFailed):
    pass


class FailedPrecondition(CallFailed):
    pass


class Unimplemented(CallFailed):
    pass


class Unauthenticated(CallFailed):
    pass


class PermissionDenied(CallFailed):
    pass


class ResourceExhausted(CallFailed):
    pass


class QueueFull(ResourceExhausted):
    @property
    def queue_depth(self) -> int:
        """Requests in flight at that server."""
        return int(self.metadata["queue_depth"])

    @property
    def queued_tokens(self) -> int:
        """Prompt tokens that wait there for their first output."""
        return int(self.metadata["queued_tokens"])


class QuotaExceeded(ResourceExhausted):
    @property
    def quota(self) -> str:
        """The limit's name in the server's file of limits."""
        return self.metadata["quota"]


class DeadlineExceeded(CallFailed):
    pass


class Cancelled(CallFailed):
    pass


class Unavailable(CallFailed):
    pass


class Unreachable(Unavailable):
    pass


class InternalError(CallFailed):
    @property
    def error_id(self) -> str | None:
        """None where the failure is not the server's own."""
        return self.metadata.get("error_id")


_BY_REASON: dict[str, type[CallFailed]] = {
    "QUEUE_FULL": QueueFull,
    "QUOTA_EXCEEDED": QuotaExceeded,
}
_BY_CODE: dict[str, type[CallFailed]] = {
    "INVALID_ARGUMENT": InvalidArgument,
    "NOT_FOUND": NotFound,
    "ALREADY_EXISTS": AlreadyExists,
    "FAILED_PRECONDITION": FailedPrecondition,
    "UNIMPLEMENTED": Unimplemented,
    "UNAUTHENTICATED": Unauthenticated,
    "PERMISSION_DENIED": PermissionDenied,
    "RESOURCE_EXHAUSTED": ResourceExhausted,
    "DEADLINE_EXCEEDED": DeadlineExceeded,
    "CANCELLED": Cancelled,
    "UNAVAILABLE": Unavailable,
    "INTERNAL": InternalError,
}


def invalid(field: str, message: str) -> InvalidArgument:
    """A request that is not sent."""
    return InvalidArgument("INVALID_ARGUMENT", message, field=field, reached=False)


def failure_of(error: Any) -> CallFailed:
    """From a grpc.RpcError that is a call, or an AioRpcError."""
    code = error.code().name
    fields: dict[str, Any] = {}
    # Only a server of ours sends details: a refused connection has none.
    reached = error.code() is not grpc.StatusCode.UNAVAILABLE
    for key, value in error.trailing_metadata() or ():
        if key == _DETAILS_KEY:
            reached = True
            fields = _details(value)
    kind = _BY_REASON.get(fields.get("reason", "")) or _BY_CODE.get(code, CallFailed)
    if not reached:
        kind = Unreachable
    return kind(code, error.details() or "", reached=reached, **fields)


def _details(serialized: bytes) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for detail in status_pb2.Status.FromString(serialized).details:
        info, bad = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest()
        retry = error_details_pb2.RetryInfo()
        if detail.Unpack(info):
            fields |= {"reason": info.reason, "metadata": dict(info.metadata)}
        elif detail.Unpack(bad) and bad.field_violations:
            fields["field"] = bad.field_violations[0].field
        elif detail.Unpack(retry):
            fields["retry_after"] = retry.retry_delay.ToTimedelta().total_seconds()
    return fields
