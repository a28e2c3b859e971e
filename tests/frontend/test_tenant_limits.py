"""Token buckets and concurrency of each tenant, by themselves and at the door."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import grpc
import pytest

from frontend.tenant_limits import TenantLimits, parse_limits
from pagewire.errors import ConfigError, QuotaExceeded
from pagewire.v1 import common_pb2

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.frontend.conftest import Stack

BUCKET = """
[default]
tokens_per_second = 10
burst_tokens = 100
[tenants.big]
max_requests = 2
[tenants.off]
max_requests = 0
"""


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def limits(tmp_path: Path, clock: Clock) -> TenantLimits:
    (tmp_path / "limits.toml").write_text(BUCKET)
    return TenantLimits(str(tmp_path / "limits.toml"), clock=clock)


def refused(limits: TenantLimits, tenant: str, cost: int) -> QuotaExceeded:
    with pytest.raises(QuotaExceeded) as raised:
        limits.reserve(tenant, cost)
    return raised.value


def test_a_bucket_gives_its_burst_then_its_rate(limits: TenantLimits, clock: Clock) -> None:
    limits.reserve("a", 60)
    error = refused(limits, "a", 60)
    assert (error.tenant, error.quota) == ("a", "tokens_per_second")
    assert error.retry_after == pytest.approx(2.0)  # 20 are missing
    clock.now += error.retry_after
    limits.reserve("a", 60)
    limits.reserve("b", 60)  # another's bucket is its own
    clock.now += 1e6
    limits.reserve("a", 100)
    assert refused(limits, "a", 1).retry_after == pytest.approx(0.1)


def test_what_was_not_used_is_given_back(limits: TenantLimits, clock: Clock) -> None:
    share = limits.reserve("a", 90)
    share.correct(120)  # the prompt was longer than it looked: a debt
    assert refused(limits, "a", 1).retry_after == pytest.approx(2.1)
    share.correct(30)
    share.release()
    share.release()
    share.correct(0)  # it is over
    assert refused(limits, "a", 71).retry_after == pytest.approx(0.1)
    limits.reserve("a", 70)


def test_more_than_a_burst_enters_a_full_bucket_and_leaves_a_debt(
    limits: TenantLimits, clock: Clock
) -> None:
    limits.reserve("a", 1)
    assert refused(limits, "a", 300).retry_after == pytest.approx(0.1)
    clock.now += 0.1
    limits.reserve("a", 300)
    assert refused(limits, "a", 1).retry_after == pytest.approx(20.1)


def test_requests_in_flight_are_bounded_and_the_wait_is_measured(
    limits: TenantLimits, clock: Clock
) -> None:
    shares = [limits.reserve("big", 10**9) for _ in range(2)]
    error = refused(limits, "big", 1)
    assert (error.quota, error.retry_after) == ("max_requests", 1.0)  # nothing is measured yet
    for _ in range(8):
        clock.now += 4
        shares.pop().release(completed=True)
        shares.append(limits.reserve("big", 1))
    assert refused(limits, "big", 1).retry_after == pytest.approx(3.5)  # 8 in the last 28 s
    assert refused(limits, "off", 1).quota == "max_requests"


def test_a_new_file_counts_from_the_next_request(limits: TenantLimits, tmp_path: Path) -> None:
    file = tmp_path / "limits.toml"
    share = limits.reserve("a", 100)
    refused(limits, "a", 1)
    file.write_text("[default]\nmax_requests = 1")
    assert limits.limits is not None
    assert limits.limits.look()
    assert refused(limits, "a", 1).quota == "max_requests"
    share.release()
    file.write_text("[default]\ntokens_per_second = 'many'")
    assert not limits.limits.look()
    limits.reserve("a", 1)
    assert refused(limits, "a", 1).quota == "max_requests"


def test_made_up_names_are_forgotten(limits: TenantLimits, clock: Clock) -> None:
    held = limits.reserve("held", 1)
    for index in range(5000):
        limits.reserve(f"t{index}", 1).release()
        clock.now += 0.1
    assert len(limits._accounts) < 1100
    assert "held" in limits._accounts
    held.release()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[default]\nmax_request = 1", "default.max_request: Extra inputs"),
        ("[tenants.a]\nburst_tokens = 5", "tenants.a: tokens_per_second and burst_tokens"),
        ("[tenants.a]\ntokens_per_second = inf\nburst_tokens = 5", "tenants.a.tokens_per_second"),
        ("[default]\nmax_requests = -1", "default.max_requests: Input should be greater"),
        ("[a]", "a: Extra inputs"),
        ("[", "not TOML"),
    ],
)
def test_bad_files_name_what_is_wrong(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(ValueError, match="^" + said.replace(".", r"\.")):
        parse_limits(text)
    (tmp_path / "limits.toml").write_text(text)
    with pytest.raises(ConfigError, match="--tenant-limits: "):
        TenantLimits(str(tmp_path / "limits.toml"), clock=Clock())


async def test_at_the_door(make_stack: Callable[..., Any], tmp_path: Path) -> None:
    file = tmp_path / "limits.toml"
    file.write_text("[default]\ntokens_per_second = 0.5\nburst_tokens = 50\n[tenants.free]\n")
    stack: Stack = await make_stack(step_s=0.002, config={"tenant_limits": str(file)})
    few = common_pb2.SamplingParams(max_tokens=10)
    await stack.stream(prompt="abcd", sampling_params=few, tenant="a")
    level = stack.frontend.dispatcher.tenants._accounts["a"].level
    assert level == pytest.approx(50 - 4 - 10, abs=0.5)  # what it cost, not the estimate
    # What the context has room for is what it may cost.
    failure = await stack.fails(stack.open(prompt="abcd", tenant="a"))
    assert failure.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert failure.info.reason == "QUOTA_EXCEEDED"
    assert failure.info.metadata["quota"] == "tokens_per_second"
    assert failure.quota == "tenant:a"
    assert failure.retry_s == pytest.approx(28, abs=1)
    assert 0 < int(failure.trailing["grpc-retry-pushback-ms"]) <= 28_001
    assert failure.initial == {}
    beams = common_pb2.SamplingParams(max_tokens=20, n=2)
    failure = await stack.fails(stack.open(prompt="a", sampling_params=beams, tenant="a"))
    assert failure.info.reason == "QUOTA_EXCEEDED"
    # A request that is refused for what it says costs nothing.
    wrong = common_pb2.SamplingParams(max_tokens=20, bad_words=[""])
    assert (await stack.fails(stack.open(prompt="a", sampling_params=wrong, tenant="a"))).fields
    await stack.stream(prompt="abcd", sampling_params=few, tenant="a")
    await stack.stream(prompt="abcd", sampling_params=few, tenant="free")
    text = stack.frontend.metrics.exposition().decode()
    assert 'vllm:admission_rejections_total{reason="tenant_tokens"} 2.0' in text
    assert stack.frontend.dispatcher.admission.requests == 0


async def test_a_burst_of_one_tenant_leaves_the_others_their_places(
    make_stack: Callable[..., Any], tmp_path: Path
) -> None:
    (tmp_path / "limits.toml").write_text("[default]\nmax_requests = 3")
    config = {"tenant_limits": str(tmp_path / "limits.toml"), "max_requests": 8}
    stack: Stack = await make_stack(auto=False, config=config)
    greedy = [stack.open(prompt="a", tenant="greedy") for _ in range(20)]
    ends = [asyncio.ensure_future(stack.fails(call)) for call in greedy]
    await stack.until(lambda: sum(end.done() for end in ends) == 17)
    await stack.engine.wait_running(3)
    other = stack.open(prompt="a", tenant="other")
    await stack.engine.wait_running(4)
    for call in (*greedy, other):
        call.cancel()
    await asyncio.gather(*ends, return_exceptions=True)
    await stack.until(lambda: stack.frontend.dispatcher.admission.requests == 0)
    assert all(not it.requests for it in stack.frontend.dispatcher.tenants._accounts.values())


async def test_a_refusal_by_the_servers_bound_costs_the_tenant_nothing(
    make_stack: Callable[..., Any], tmp_path: Path
) -> None:
    (tmp_path / "limits.toml").write_text("[default]\ntokens_per_second = 1e-3\nburst_tokens = 99")
    config = {"tenant_limits": str(tmp_path / "limits.toml"), "max_requests": 1}
    stack: Stack = await make_stack(auto=False, config=config)
    few = common_pb2.SamplingParams(max_tokens=10)
    first = stack.open(prompt="a", sampling_params=few, tenant="first")
    await stack.engine.wait_running(1)
    for _ in range(20):
        failure = await stack.fails(stack.open(prompt="a", sampling_params=few, tenant="b"))
        assert failure.info.reason == "QUEUE_FULL"
        assert failure.info.metadata["queued_tokens"] == "1"
    account = stack.frontend.dispatcher.tenants._accounts["b"]
    assert (account.requests, account.level) == (0, pytest.approx(99))
    first.cancel()
