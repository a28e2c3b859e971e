"""python -m frontend: the gRPC and HTTP front door."""

from __future__ import annotations

import os
import sys

import uvloop

from pagewire.config import FrontendConfig
from pagewire.errors import ConfigError
from pagewire.obs.logging import setup_logging
from pagewire.settings import load_config
from pagewire.wire.sockets import BindError


def main(argv: list[str] | None = None) -> int:
    """0 after a signal and a drain, 2 for a configuration that cannot work."""
    # Before grpc is imported: C-core has a line of its own for each connection that
    # speaks no TLS, and strangers could fill the log with them.
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
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

    await Frontend(config).run()


if __name__ == "__main__":
    raise SystemExit(main())
