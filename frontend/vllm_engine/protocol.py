"""Whether the protocol's messages are installed, and adding its service to a server.

They come from the package smg-grpc-proto, an extra, so that only this file may be imported
without it.
"""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

from pagewire.errors import ConfigError

if TYPE_CHECKING:
    import grpc

    from frontend.dispatcher import Dispatcher
    from frontend.health import HealthBoard
    from frontend.resume import Resumables

SERVICE = "vllm.grpc.engine.VllmEngine"
PACKAGE = "smg_grpc_proto"


def check_installed() -> None:
    """Raises ConfigError."""
    if importlib.util.find_spec(PACKAGE) is None:
        raise ConfigError(
            "--vllm-protocol: the package smg-grpc-proto is not installed; "
            "pip install 'pagewire[vllm-protocol]' brings it"
        )


def add_to(
    server: grpc.aio.Server, dispatcher: Dispatcher, resumables: Resumables, health: HealthBoard
) -> None:
    """Once check_installed() has passed."""
    from smg_grpc_proto import vllm_engine_pb2_grpc

    from frontend.vllm_engine.servicer import VllmEngineServicer

    vllm_engine_pb2_grpc.add_VllmEngineServicer_to_server(
        VllmEngineServicer(dispatcher, resumables, health), server
    )
