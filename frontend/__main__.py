"""python -m frontend: the gRPC and HTTP front door."""

from __future__ import annotations

import sys

import uvloop

from pagewire import grpc_core
from pagewire.config import FrontendConfig
from pagewire.errors import ConfigError
from pagewire.obs.logging import setup_logging
from pagewire.settings import load_config
from pagewire.wire.sockets import BindError


def main(argv: list[str] | None = None) -> int:
    """0 after a signal and a drain, 2 for a configuration that cannot work."""
    grpc_core.configure()
    try:
        config = load_config(FrontendConfig, argv, prog="python -m frontend")
        setup_logging("frontend", config.log_level, config.log_format)
        uvloop.run(_run(config))
    except (ConfigError, BindError) as error:
        print(f"frontend: {error}", file=sys.stderr)  # noqa: T201
        return 2
    return 0


async def _run(config: FrontendConfig) -> None:
    from frontend.server import Frontend

    with grpc_core.patient_threads():
        frontend = Frontend(config)
    await frontend.run()


if __name__ == "__main__":
    raise SystemExit(main())
