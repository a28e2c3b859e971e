"""A thin client of the public gRPC services, synchronous and asynchronous.

Plain values in and out; failures are typed; it needs no torch. docs/client.md is the guide.
"""

from __future__ import annotations

from pagewire.client.aio import AsyncClient, AsyncResumingStream, AsyncTextStream
from pagewire.client.ask import Ask
from pagewire.client.errors import (
    AlreadyExists,
    CallFailed,
    Cancelled,
    DeadlineExceeded,
    FailedPrecondition,
    InternalError,
    InvalidArgument,
    NotFound,
    PermissionDenied,
    QueueFull,
    QuotaExceeded,
    ResourceExhausted,
    Unauthenticated,
    Unavailable,
    Unimplemented,
    Unreachable,
)
from pagewire.client.retry import RetryPolicy
from pagewire.client.sync import Client, ResumingStream, TextStream
from pagewire.connection import DEFAULT_ADDRESS, Connection

__all__ = [
    "DEFAULT_ADDRESS",
    "AlreadyExists",
    "Ask",
    "AsyncClient",
    "AsyncResumingStream",
    "AsyncTextStream",
    "CallFailed",
    "Cancelled",
    "Client",
    "Connection",
    "DeadlineExceeded",
    "FailedPrecondition",
    "InternalError",
    "InvalidArgument",
    "NotFound",
    "PermissionDenied",
    "QueueFull",
    "QuotaExceeded",
    "ResourceExhausted",
    "ResumingStream",
    "RetryPolicy",
    "TextStream",
    "Unauthenticated",
    "Unavailable",
    "Unimplemented",
    "Unreachable",
]
