"""A whole frontend over real sockets, with a fake engine and a fake tokenizer."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc

from frontend.server import Frontend
from pagewire.config import FrontendConfig
from pagewire.v1 import (
    admin_pb2_grpc,
    inference_pb2,
    inference_pb2_grpc,
    model_pb2_grpc,
    tokenizer_pb2_grpc,
)
from tests.support.fake_engine import FakeEngine
from tests.support.fake_tokenizer import FakeTokenizer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from frontend.engine_client import EngineClient

WAIT_S = 60.0
RICH = "grpc-status-details-bin"


class Failure:
    """A call's non-OK end, taken apart."""

    def __init__(self, error: grpc.aio.AioRpcError) -> None:
        self.code = error.code()
        self.message = error.details() or ""
        self.initial = dict(error.initial_metadata() or ())
        self.trailing = dict(error.trailing_metadata() or ())
        self.info = error_details_pb2.ErrorInfo()
        self.fields: list[str] = []
        self.retry_s: float | None = None
        self.resource = ""
        self.quota = ""
        for detail in status_pb2.Status.FromString(self.trailing[RICH]).details:
            bad, retry = error_details_pb2.BadRequest(), error_details_pb2.RetryInfo()
            resource, quota = error_details_pb2.ResourceInfo(), error_details_pb2.QuotaFailure()
            if detail.Unpack(self.info):
                continue
            if detail.Unpack(bad):
                self.fields += [violation.field for violation in bad.field_violations]
            elif detail.Unpack(retry):
                self.retry_s = retry.retry_delay.seconds + retry.retry_delay.nanos / 1e9
            elif detail.Unpack(resource):
                self.resource = resource.resource_name
            elif detail.Unpack(quota):
                self.quota = quota.violations[0].subject


class Collected:
    """A finished stream."""

    def __init__(self, frames: list[Any]) -> None:
        assert [f.WhichOneof("frame") for f in frames] == ["delta"] * (len(frames) - 1) + ["final"]
        self.deltas = [f.delta for f in frames[:-1]]
        assert all(d.text or d.token_ids or d.tool_calls for d in self.deltas)
        self.text = "".join(d.text for d in self.deltas)
        self.ids = [t for d in self.deltas for t in d.token_ids]
        self.final = frames[-1].final


class Stack:
    """The frontend, its fakes, and a client of each service."""

    def __init__(self, engine: FakeEngine, tokenizer: FakeTokenizer, **config: Any) -> None:
        self.engine = engine
        self.tokenizer = tokenizer
        self._config = config
        self._extra = AsyncExitStack()

    async def start(self, *, serving: bool = True) -> None:
        await self.tokenizer.start()
        engine_address = await self.start_engines()
        values: dict[str, Any] = {
            "port": 0,
            "http_port": 0,
            "admin_port": 0,
            "tokenizer_address": self.tokenizer.address,
            "engine_address": engine_address,
            "outputs_bind": "tcp://127.0.0.1:0",
            "drain_timeout": WAIT_S,
        }
        self.frontend = Frontend(FrontendConfig(**(values | self._config)))
        await self.frontend.start()
        self.channel = grpc.aio.insecure_channel(self.frontend.address)
        self.inference: Any = inference_pb2_grpc.InferenceServiceStub(self.channel)
        self.models: Any = model_pb2_grpc.ModelServiceStub(self.channel)
        self.tokens: Any = tokenizer_pb2_grpc.TokenizerServiceStub(self.channel)
        self.health: Any = health_pb2_grpc.HealthStub(self.channel)
        self.admin_channel = grpc.aio.insecure_channel(self.frontend.admin_address)
        self.admin: Any = admin_pb2_grpc.AdminServiceStub(self.admin_channel)
        if serving:
            await self.until(lambda: self.frontend.health.serving)

    @property
    def engine_client(self) -> EngineClient:
        """The frontend's session with its (first) engine."""
        return self.frontend.dispatcher.engine_side.pool.links[0].client

    async def start_engines(self) -> str:
        """Their addresses, as the setting takes them."""
        await self.engine.start()
        return str(self.engine.address)

    async def close(self) -> None:
        await self.channel.close()
        await self.admin_channel.close()
        await self.frontend.close()
        await self._extra.aclose()
        await self.engine.kill()
        await self.tokenizer.close()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Until the frontend's state is so; it has no event for every condition."""
        async with asyncio.timeout(WAIT_S):
            while not condition():  # noqa: ASYNC110
                await asyncio.sleep(0.002)

    async def restart_engine(self, **options: Any) -> None:
        """Another engine process at the same address."""
        bind = self.engine.address
        self.engine = FakeEngine(bind=bind, **options)
        await self.engine.start()

    async def stream(self, **fields: Any) -> Collected:
        metadata = fields.pop("metadata", None)
        call = self.open(metadata=metadata, **fields)
        return Collected([frame async for frame in call])

    def open(self, *, metadata: Any = None, deadline_s: float = WAIT_S, **fields: Any) -> Any:
        request = inference_pb2.GenerateStreamRequest(**fields)
        return self.inference.GenerateStream(request, timeout=deadline_s, metadata=metadata)

    async def unary(self, **fields: Any) -> Any:
        return await self.inference.Generate(
            inference_pb2.GenerateRequest(**fields), timeout=WAIT_S
        )

    async def fails(self, call: Any) -> Failure:
        """The failure of a unary call or of a stream, which is read to its end."""
        try:
            if hasattr(call, "read"):
                while await call.read() is not grpc.aio.EOF:
                    pass
            else:
                await call
        except grpc.aio.AioRpcError as error:
            return Failure(error)
        raise AssertionError("the call ended with OK")

    async def rest(self, call: Any) -> list[Any]:
        """What is left of a stream that has been read from."""
        frames = []
        while (frame := await call.read()) is not grpc.aio.EOF:
            frames.append(frame)
        return frames

    async def check(self, service: str = "") -> int:
        response = await self.health.Check(
            health_pb2.HealthCheckRequest(service=service), timeout=WAIT_S
        )
        return int(response.status)


@pytest.fixture
async def make_stack() -> AsyncIterator[Callable[..., Any]]:
    """make_stack(engine options, tokenizer_options=..., serving=..., config=...) -> Stack."""
    stacks: list[Stack] = []

    async def make(
        *,
        config: dict[str, Any] | None = None,
        tokenizer_options: dict[str, Any] | None = None,
        serving: bool = True,
        **engine: Any,
    ) -> Stack:
        stack = Stack(
            FakeEngine(**engine), FakeTokenizer(**(tokenizer_options or {})), **(config or {})
        )
        stacks.append(stack)
        await stack.start(serving=serving)
        return stack

    yield make
    for stack in stacks:
        await stack.close()


@pytest.fixture
async def stack(make_stack: Callable[..., Any]) -> Stack:
    """Steps by itself."""
    return await make_stack(step_s=0.002)


@pytest.fixture
async def manual(make_stack: Callable[..., Any]) -> Stack:
    """The test says when the engine steps."""
    return await make_stack(auto=False)


@pytest.fixture
async def impatient(make_stack: Callable[..., Any]) -> Stack:
    """Like manual, and no request waits for a lost engine."""
    return await make_stack(auto=False, config={"engine_restart_timeout": 0})
