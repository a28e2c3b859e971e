"""Who is served, and what becomes of a request that the engine gives up in its queue."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import grpc

from pagewire.types import MAX_TENANT_CHARS
from pagewire.v1 import common_pb2
from pagewire.wire.messages import Add

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.frontend.conftest import Stack

LONG = common_pb2.SamplingParams(max_tokens=1000)
SHORT = common_pb2.SamplingParams(max_tokens=2)


def tenants(stack: Stack) -> list[str]:
    return [command.tenant for command in stack.engine.commands if isinstance(command, Add)]


async def test_tenant_from_the_field_else_the_metadata_else_none(stack: Stack) -> None:
    named: Any = (("x-tenant-id", "from-metadata"),)
    await stack.stream(prompt="a", sampling_params=SHORT)
    await stack.stream(prompt="a", sampling_params=SHORT, metadata=named)
    await stack.stream(prompt="a", sampling_params=SHORT, metadata=named, tenant="from-field")
    await stack.stream(prompt="a", sampling_params=SHORT, metadata=named, tenant="")
    await stack.unary(prompt="a", sampling_params=SHORT, tenant="unary")
    assert tenants(stack) == ["", "from-metadata", "from-field", "", "unary"]


async def test_a_tenant_may_be_so_long_and_no_longer(stack: Stack) -> None:
    longest = "t" * MAX_TENANT_CHARS
    await stack.stream(prompt="a", sampling_params=SHORT, tenant=longest)
    too_long = longest + "t"
    by_field = await stack.fails(stack.open(prompt="a", tenant=too_long))
    by_metadata = await stack.fails(stack.open(prompt="a", metadata=(("x-tenant-id", too_long),)))
    for failure, source in ((by_field, "tenant"), (by_metadata, "x-tenant-id")):
        assert failure.code is grpc.StatusCode.INVALID_ARGUMENT
        assert failure.fields == ["tenant"]
        assert failure.message.startswith(f"{source} has 129 characters")
    assert tenants(stack) == [longest]


async def test_given_up_in_the_engines_queue_long_before_the_deadline(
    make_stack: Callable[..., Any],
) -> None:
    stack = await make_stack(auto=False, max_num_seqs=1)
    running = stack.open(prompt="a", sampling_params=LONG)
    await stack.engine.wait_running(1)
    queued = stack.open(prompt="b", sampling_params=LONG, deadline_s=30)
    await stack.engine.wait_for(lambda: len(stack.engine.waiting) == 1)
    (waiting,) = stack.engine.waiting.values()
    assert 25_000 < waiting.add.deadline_ms < 31_000  # gRPC rounds a timeout up
    stack.engine.miss_deadline(waiting.id)
    failure = await stack.fails(queued)
    assert failure.code is grpc.StatusCode.DEADLINE_EXCEEDED
    assert failure.info.reason == "DEADLINE_EXCEEDED"
    assert failure.message == "the deadline could not be met any more"
    exposition = stack.frontend.dispatcher._metrics.exposition().decode()
    assert "pagewire_deadlines_given_up_total 1.0" in exposition
    # It is over for good: neither aborted nor sent again.
    await stack.until(lambda: stack.frontend.dispatcher.admission.requests == 1)
    assert stack.engine.aborted == []
    assert len(tenants(stack)) == 2
    running.cancel()
