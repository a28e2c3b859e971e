"""What is tried again by gRPC itself (gRFC A6), before any answer has come."""

from __future__ import annotations

import json
from dataclasses import dataclass

from pagewire.errors import ConfigError

_SERVICES = ("InferenceService", "TokenizerService", "ModelService")
_MAX_ATTEMPTS = 5
"""gRPC's own bound, which it would apply with no word."""


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """deploy/service_config.json, with which it agrees where nothing is changed.

    A call that is refused with UNAVAILABLE or RESOURCE_EXHAUSTED is tried again after a random
    time below the backoff, or after the time that the server's RetryInfo names. Both end with
    the call's timeout. A stream that was accepted is never started a second time.
    """

    max_attempts: int = 5
    """With the first one; 2 to 5."""
    initial_backoff: float = 0.2
    """In seconds, as is max_backoff."""
    max_backoff: float = 5.0
    backoff_multiplier: float = 3.0

    def __post_init__(self) -> None:
        if not 2 <= self.max_attempts <= _MAX_ATTEMPTS:
            raise ConfigError(
                f"max_attempts must be 2 to {_MAX_ATTEMPTS}, got {self.max_attempts}; "
                "for a single attempt give no policy"
            )
        for name in ("initial_backoff", "max_backoff", "backoff_multiplier"):
            value = getattr(self, name)
            # gRPC's durations have nine decimal places.
            if not 1e-9 <= value < 1e9:
                raise ConfigError(f"{name} must be above 0 and finite, got {value}")

    def service_config(self) -> str:
        """For the channel option grpc.service_config."""
        policy = {
            "maxAttempts": self.max_attempts,
            "initialBackoff": _duration(self.initial_backoff),
            "maxBackoff": _duration(self.max_backoff),
            "backoffMultiplier": self.backoff_multiplier,
            "retryableStatusCodes": ["UNAVAILABLE", "RESOURCE_EXHAUSTED"],
        }
        names = [{"service": f"pagewire.v1.{service}"} for service in _SERVICES]
        return json.dumps(
            {
                "loadBalancingConfig": [{"round_robin": {}}],
                "methodConfig": [{"name": names, "retryPolicy": policy}],
                # A server that refuses all it is asked is asked less.
                "retryThrottling": {"maxTokens": 100, "tokenRatio": 0.5},
            }
        )


def _duration(seconds: float) -> str:
    return f"{seconds:.9f}".rstrip("0").rstrip(".") + "s"
