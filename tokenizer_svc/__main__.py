"""python -m tokenizer_svc: text to ids and back, over gRPC.

Exit status: 0 after a signal and a drain, 2 for a configuration that cannot work,
3 for a model whose tokenizer cannot be loaded, 1 for any other failure.
"""

from __future__ import annotations

import sys

from pagewire import grpc_core
from pagewire.config import TokenizerConfig
from pagewire.errors import ConfigError, InternalError, ModelLoadError
from pagewire.model_source import resolve_model
from pagewire.obs.logging import setup_logging
from pagewire.settings import load_config
from tokenizer_svc.messages import Load
from tokenizer_svc.pool import WorkerPool

_WAITING_MESSAGES = 4
"""Texts of the largest size that may wait to be tokenized at a time."""


def main(argv: list[str] | None = None) -> int:
    try:
        config = load_config(TokenizerConfig, argv, prog="python -m tokenizer_svc")
        setup_logging("tokenizer_svc", config.log_level, config.log_format)
        _serve(config)
    except (ConfigError, ModelLoadError, InternalError) as error:
        print(f"tokenizer_svc: {error}", file=sys.stderr)  # noqa: T201
        if isinstance(error, ConfigError):
            return 2
        return 3 if isinstance(error, ModelLoadError) else 1
    return 0


def _serve(config: TokenizerConfig) -> None:
    source = resolve_model(config.model, config.served_model_name)
    load = Load(
        str(source.path),
        config.chat_template,
        config.log_level,
        config.log_format,
        config.tool_call_parser,
    )
    # The workers load while this process imports gRPC, and exist before it has threads.
    pool = WorkerPool(
        load,
        config.tokenizer_workers,
        max_waiting_bytes=_WAITING_MESSAGES * config.tokenizer_max_message_mib << 20,
        hang_timeout=config.tokenizer_hang_timeout,
    )
    grpc_core.configure()
    import uvloop

    from tokenizer_svc.server import run

    uvloop.run(run(config, pool, source.name))


if __name__ == "__main__":
    raise SystemExit(main())
