"""What is asked of Ray: how many of each room, with what, and each room's flags."""

from __future__ import annotations

import argparse
import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

from pagewire.config import (
    CHOSEN_BY_LAUNCHER,
    EngineConfig,
    FrontendConfig,
    ServeConfig,
    TokenizerConfig,
)
from pagewire.errors import ConfigError
from pagewire.settings import as_flags, flag_name, load_config

if TYPE_CHECKING:
    from collections.abc import Sequence

_PORTS = ("port", "http_port", "admin_port")
_DESCRIPTION = """Serves with Ray: engines, tokenizers and frontends as actors on any nodes.
Settings of the rooms follow --, as flags of `pagewire serve`."""


@dataclass(frozen=True)
class Plan:
    """Resources are for each replica; the tokenizer of a frontend is part of the frontend's."""

    id: str
    """Of this server among all that use the same nodes."""
    address: str
    """Of the cluster's head, or auto."""
    namespace: str
    num_engines: int
    num_frontends: int
    engine_cpus: float
    engine_gpus: float
    frontend_cpus: float
    engine_port: int
    """Of the first engine; the others have those after it, wherever they run."""
    placement_timeout_s: float
    config: ServeConfig

    def engine_flags(self, index: int, host: str) -> list[str]:
        config = self.config
        threads = config.cpu_threads
        if threads is None and not self.engine_gpus:
            threads = max(1, int(self.engine_cpus))
        mine = {"engine_bind": self.engine_endpoint(index, host), "cpu_threads": threads}
        return as_flags(config.model_copy(update=mine), EngineConfig)

    def engine_endpoint(self, index: int, host: str) -> str:
        return f"tcp://{host}:{self.engine_port + index}"

    def tokenizer_flags(self, bind: str) -> list[str]:
        return as_flags(self.config.model_copy(update={"tokenizer_bind": bind}), TokenizerConfig)

    def frontend_flags(
        self, index: int, host: str, tokenizer: str, engines: Sequence[str]
    ) -> list[str]:
        """Ports follow each other, so that two frontends may share a node."""
        ports = {name: getattr(self.config, name) for name in _PORTS}
        mine = {
            **{name: port + index if port else 0 for name, port in ports.items()},
            "tokenizer_address": tokenizer,
            "engine_address": ",".join(engines),
            "outputs_bind": f"tcp://{host}:0",
        }
        return as_flags(self.config.model_copy(update=mine), FrontendConfig)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(message.removeprefix("argument "))


def read_plan(argv: Sequence[str]) -> Plan:
    """Raises ConfigError, naming the flag."""
    own, serve = _split(argv)
    parser = _Parser(prog="python -m deploy.ray", description=_DESCRIPTION, allow_abbrev=False)
    parser.add_argument("--address", default="auto", help="the cluster's head [auto]")
    parser.add_argument("--namespace", default="pagewire", help="where the actors have their names")
    parser.add_argument("--engines", type=_count, default=1)
    parser.add_argument("--frontends", type=_count, default=1)
    parser.add_argument("--engine-cpus", type=_amount, default=1.0, help="for each engine")
    parser.add_argument("--engine-gpus", type=_amount, default=0.0, help="for each engine")
    parser.add_argument("--frontend-cpus", type=_amount, default=1.0, help="with its tokenizer")
    parser.add_argument("--engine-port", type=_port, default=5600, help="of the first engine")
    parser.add_argument("--placement-timeout", type=_amount, default=60.0, help="seconds")
    given = parser.parse_args(own)
    config = load_config(ServeConfig, serve, prog="python -m deploy.ray --")
    _check(config)
    return Plan(
        id=secrets.token_hex(4),
        address=given.address,
        namespace=given.namespace,
        num_engines=given.engines,
        num_frontends=given.frontends,
        engine_cpus=given.engine_cpus,
        engine_gpus=given.engine_gpus,
        frontend_cpus=given.frontend_cpus,
        engine_port=given.engine_port,
        placement_timeout_s=given.placement_timeout,
        config=config,
    )


def _split(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    at = list(argv).index("--") if "--" in argv else len(argv)
    return list(argv[:at]), list(argv[at + 1 :])


def _check(config: ServeConfig) -> None:
    for name in (*CHOSEN_BY_LAUNCHER, "ready_file"):
        if name in config.model_fields_set:
            raise ConfigError(f"{flag_name(name)}: the actors connect the rooms themselves")
    if "num_engines" in config.model_fields_set:
        raise ConfigError("--num-engines: it is --engines here, before the --")
    if not config.allow_remote_engine:
        raise ConfigError(
            "--allow-remote-engine: rooms on several nodes need it (after the --); it says that "
            "the network between them is private"
        )


def _count(text: str) -> int:
    if not text.isdigit() or not 1 <= int(text) <= 64:
        raise argparse.ArgumentTypeError(f"expected 1 to 64, got {text!r}")
    return int(text)


def _amount(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1e6:
        raise argparse.ArgumentTypeError(f"expected a number that is not negative, got {text!r}")
    return value


def _port(text: str) -> int:
    if not text.isdigit() or not 1 <= int(text) <= 65000:
        raise argparse.ArgumentTypeError(f"expected a port from 1 to 65000, got {text!r}")
    return int(text)
