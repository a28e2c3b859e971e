"""The errors that cross rooms, as a tree. Each class has a stable code.

    PagewireError
     +- ClientError             the caller can mend it
     |   +- InvalidRequest      a field is wrong; names it
     |   +- NotFound            no such model or request
     |   +- AlreadyExists       request id in flight
     |   +- QueueFull           admission bounds reached; says when to retry
     |   +- QuotaExceeded       a tenant's own limit reached; says when to retry
     |   +- Unauthenticated     no key, or an unknown one
     |   +- PermissionDenied    the key may not do this
     |   +- MessageTooLarge     over the size limit
     |   +- FeatureDisabled     switched off on this server
     |   +- Unimplemented       part of a protocol that this server does not have
     |   +- FailedPrecondition  cannot be done as things stand
     |   +- NoRoom              something of a fixed number is used up
     |   +- DeadlineExceeded
     |   +- Cancelled
     +- ServerError             the caller may try again, elsewhere or later
         +- Unavailable         loading, draining, or a process is gone
         +- InternalError       our bug; carries an id to find in the log
    ConfigError                 a setting is wrong: the process ends with status 2
    ModelLoadError              the model cannot be served: names the file, status 3

frontend/status.py maps codes to gRPC statuses, and is the only place that does.
"""

from __future__ import annotations


class PagewireError(Exception):
    """A failure with a stable code and one sentence for the client."""

    code = "internal"

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class ClientError(PagewireError):
    code = "invalid_request"


class InvalidRequest(ClientError):
    """A field is wrong. `field` is the dotted path as the API spells it."""

    code = "invalid_request"

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field


class NotFound(ClientError):
    """`resource` is "model", "request", "engine" or "adapter"; `field` is where the caller
    named it."""

    code = "not_found"

    def __init__(self, resource: str, name: str, *, field: str = "") -> None:
        super().__init__(f"{resource} {name!r} does not exist")
        self.resource = resource
        self.name = name
        self.field = field


class AlreadyExists(ClientError):
    """`field` is where the caller named it."""

    code = "already_exists"

    def __init__(self, message: str, *, field: str = "request_id") -> None:
        super().__init__(message)
        self.field = field


class QueueFull(ClientError):
    """Admission bounds are reached.

    retry_after is in seconds; queue_depth counts the requests in flight, queued_tokens
    the prompt tokens that wait for their first output.
    """

    code = "queue_full"

    def __init__(
        self, message: str, *, retry_after: float, queue_depth: int, queued_tokens: int = 0
    ) -> None:
        super().__init__(message)
        self.retry_after = retry_after
        self.queue_depth = queue_depth
        self.queued_tokens = queued_tokens


class QuotaExceeded(ClientError):
    """A limit of the tenant's own is reached. `quota` is its name in the limits file.

    retry_after is in seconds.
    """

    code = "quota_exceeded"

    def __init__(self, message: str, *, tenant: str, quota: str, retry_after: float) -> None:
        super().__init__(message)
        self.tenant = tenant
        self.quota = quota
        self.retry_after = retry_after


class Unauthenticated(ClientError):
    """The caller did not say who it is, or nobody knows it."""

    code = "unauthenticated"


class PermissionDenied(ClientError):
    """The caller is known, and may not do this."""

    code = "permission_denied"


class MessageTooLarge(ClientError):
    code = "message_too_large"


class FeatureDisabled(ClientError):
    """`field` asked for it."""

    code = "feature_disabled"

    def __init__(self, message: str, *, field: str = "") -> None:
        super().__init__(message)
        self.field = field


class Unimplemented(ClientError):
    """Part of somebody else's protocol, which this server speaks without it."""

    code = "unimplemented"


class FailedPrecondition(ClientError):
    """What is asked for cannot be done as things stand."""

    code = "failed_precondition"


class NoRoom(ClientError):
    """There is a fixed number of what is asked for, and all of it is taken."""

    code = "no_room"


class DeadlineExceeded(ClientError):
    code = "deadline_exceeded"


class Cancelled(ClientError):
    code = "cancelled"


class ServerError(PagewireError):
    code = "internal"


class Unavailable(ServerError):
    """`reason` is one of loading, draining, engine_dead, tokenizer_dead.

    retry_after is in seconds, None where waiting here does not help.
    """

    code = "unavailable"

    def __init__(self, reason: str, message: str, *, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.reason = reason
        self.retry_after = retry_after


class InternalError(ServerError):
    code = "internal"


class ConfigError(Exception):
    """A setting is unknown, malformed or contradicts another; names it."""


class ModelLoadError(Exception):
    """The model path is missing or not a model; names the file."""
