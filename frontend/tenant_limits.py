"""What each tenant may use: tokens a second with a burst, and requests at the same time.

    [default]                    # each tenant without a table of its own, also the one named ""
    tokens_per_second = 500      # prompt and output
    burst_tokens = 20000         # what a tenant that was quiet may use at once
    max_requests = 16            # in flight

    [tenants.acme]               # instead of the default; what is absent is not limited
    max_requests = 200

A request takes from its tenant's bucket what it may cost, the prompt and max_tokens of each
sequence, before any work is done for it, and gives back at its end what it did not use.
Nobody waits here: who finds too little is refused, and told when there will be enough.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from frontend.admission import CompletionRate
from frontend.branches import branches_of
from frontend.watched_file import WatchedFiles
from pagewire.errors import QuotaExceeded

if TYPE_CHECKING:
    from collections.abc import Callable

    from frontend.admission import RejectReason
    from frontend.request import Job, RequestState

_MANY_ACCOUNTS = 1024
"""From here on, accounts of tenants that are at rest are forgotten."""


class TenantLimit(BaseModel):
    """None: not limited."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    tokens_per_second: Annotated[float, Field(gt=0, allow_inf_nan=False, strict=False)] | None = (
        None
    )
    burst_tokens: Annotated[int, Field(ge=1)] | None = None
    max_requests: Annotated[int, Field(ge=0)] | None = None

    @model_validator(mode="after")
    def _both_or_none(self) -> TenantLimit:
        if (self.tokens_per_second is None) != (self.burst_tokens is None):
            raise ValueError("tokens_per_second and burst_tokens are only of use together")
        return self


class LimitsFile(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    default: TenantLimit = TenantLimit()
    tenants: dict[str, TenantLimit] = {}

    def of(self, tenant: str) -> TenantLimit:
        return self.tenants.get(tenant, self.default)


class _Account:
    """One tenant's bucket, which may be in debt, and its requests in flight."""

    __slots__ = ("filled_at", "level", "rate", "requests")

    def __init__(self, clock: Callable[[], float]) -> None:
        self.requests = 0
        self.level: float | None = None
        """Tokens it may still use; None: the burst, whatever that is."""
        self.filled_at = clock()
        self.rate = CompletionRate(clock)

    def fill(self, limit: TenantLimit, now: float) -> float:
        """The level now."""
        assert limit.tokens_per_second is not None
        assert limit.burst_tokens is not None
        level = limit.burst_tokens if self.level is None else self.level
        level = min(limit.burst_tokens, level + (now - self.filled_at) * limit.tokens_per_second)
        self.level, self.filled_at = level, now
        return level


class TenantShare:
    """What a request has of its tenant's limits."""

    __slots__ = ("_account", "_cost", "_held", "_limits")

    def __init__(self, limits: TenantLimits, account: _Account, cost: int) -> None:
        self._limits = limits
        self._account = account
        self._cost = cost
        self._held = True

    def correct(self, cost: int) -> None:
        """Replaces the estimate by a better one, or by what it cost in the end."""
        if self._held and self._account.level is not None:
            self._account.level += self._cost - cost
        self._cost = cost

    def release(self, *, completed: bool = False) -> None:
        """Idempotent. `completed` feeds the measured rate."""
        if not self._held:
            return
        self._held = False
        self._account.requests -= 1
        if completed:
            self._account.rate.note()


class TenantLimits:
    """`path` of None: nobody is limited. Raises ConfigError."""

    def __init__(
        self,
        path: str | None,
        *,
        clock: Callable[[], float],
        on_reject: Callable[[RejectReason], None] = lambda _: None,
    ) -> None:
        self._clock = clock
        self._on_reject = on_reject
        self._accounts: dict[str, _Account] = {}
        self._sweep_at = _MANY_ACCOUNTS
        self.limits: WatchedFiles[LimitsFile] | None = None
        if path is not None:
            file = Path(path)
            self.limits = WatchedFiles(
                "--tenant-limits", [path], lambda: parse_limits(file.read_text("utf-8"))
            )

    def reserve(self, tenant: str, cost: int) -> TenantShare:
        """Takes `cost` tokens and a place. Raises QuotaExceeded.

        A request that costs more than the whole burst enters when the bucket is full,
        since otherwise it never could, and leaves it in debt.
        """
        limit = TenantLimit() if self.limits is None else self.limits.content.of(tenant)
        account = self._account(tenant)
        now = self._clock()
        if limit.max_requests is not None and account.requests >= limit.max_requests:
            self._on_reject("tenant_requests")
            raise QuotaExceeded(
                f"{account.requests} requests of this tenant are in flight, the most it may have",
                tenant=tenant,
                quota="max_requests",
                retry_after=account.rate.seconds_for(max(1, account.requests // 8)),
            )
        if limit.tokens_per_second is None or limit.burst_tokens is None:
            account.level = None
        else:
            level = account.fill(limit, now)
            missing = min(cost, limit.burst_tokens) - level
            if missing > 0:
                self._on_reject("tenant_tokens")
                raise QuotaExceeded(
                    f"this request may cost {cost} tokens, and this tenant has "
                    f"{max(0, int(level))} left of {limit.burst_tokens}, with "
                    f"{limit.tokens_per_second:g} more a second",
                    tenant=tenant,
                    quota="tokens_per_second",
                    retry_after=missing / limit.tokens_per_second,
                )
            account.level = level - cost
        account.requests += 1
        return TenantShare(self, account, cost)

    def _account(self, tenant: str) -> _Account:
        account = self._accounts.get(tenant)
        if account is None:
            if len(self._accounts) >= self._sweep_at:
                self._sweep()
            account = self._accounts[tenant] = _Account(self._clock)
        return account

    def _sweep(self) -> None:
        """Forgets accounts at rest: names may be made up by whoever asks."""
        now = self._clock()
        for tenant, account in list(self._accounts.items()):
            if account.requests:
                continue
            limit = TenantLimit() if self.limits is None else self.limits.content.of(tenant)
            if limit.tokens_per_second is None or account.fill(limit, now) == limit.burst_tokens:
                del self._accounts[tenant]
        self._sweep_at = max(_MANY_ACCOUNTS, 2 * len(self._accounts))


def cost_of(job: Job, num_prompt_tokens: int, max_tokens: int) -> int:
    """Tokens that a request may come to at most."""
    beam = job.sampling.beam
    return num_prompt_tokens + max_tokens * (job.best_of if beam is None else beam.width)


def cost_so_far(state: RequestState) -> int:
    """Tokens that it has come to: none before the engine was given it."""
    if not state.submitted_at:
        return 0
    return len(state.prompt_ids) + sum(len(it.output_ids) for it in branches_of(state))


def parse_limits(text: str) -> LimitsFile:
    """Raises ValueError naming the key."""
    try:
        return LimitsFile.model_validate(tomllib.loads(text))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise ValueError(f"{where}: {first['msg'].removeprefix('Value error, ')}") from None
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"not TOML: {error}") from None
