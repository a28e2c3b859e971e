"""The actors: each keeps one room's process running on the node where Ray put it.

Their names are engine-0, engine-1, tokenizer-0, frontend-0 and so on. All restart for ever; one
that comes back elsewhere has another address, which the frontends find out.
"""

from __future__ import annotations

import contextlib
import functools
import tempfile
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
import ray.util
from deploy.ray.endpoints import Endpoints
from deploy.ray.supervisor import Supervisor

if TYPE_CHECKING:
    from collections.abc import Callable

    from deploy.ray.plan import Plan

_POLL_S = 5.0
_STOP_S = 10.0


class Room:
    """What all three have: a process and what it says of itself."""

    def __init__(self, plan: Plan, module: str, name: str) -> None:
        self.directory = Path(tempfile.gettempdir()) / f"pagewire-ray-{plan.id}"
        self.directory.mkdir(mode=0o700, exist_ok=True)
        self.host = ray.util.get_node_ip_address()
        self._module, self._name = module, name

    def supervise(self, flags: Callable[[], list[str]]) -> None:
        self.supervisor = Supervisor(
            self._module,
            flags,
            self.directory / f"{self._name}.json",
            # Its predecessor may have served: what fails now, such as a port that is still
            # taken, passes.
            proven=ray.get_runtime_context().was_current_actor_reconstructed,
        )

    def state(self) -> dict[str, Any]:
        """node, host, facts (None until it serves) and status (of one that cannot)."""
        return {
            "node": ray.get_runtime_context().get_node_id(),
            "host": self.host,
            "facts": self.supervisor.facts(),
            "status": self.supervisor.status,
        }

    def stop(self, patience_s: float = _STOP_S) -> int | None:
        status = self.supervisor.stop(patience_s)
        # The last one on the node removes the directory.
        with contextlib.suppress(OSError):
            self.supervisor.ready_file.unlink(missing_ok=True)
            self.directory.rmdir()
        return status


class Engine(Room):
    def __init__(self, plan: Plan, index: int) -> None:
        super().__init__(plan, "engine_core", f"engine-{index}")
        self._endpoint = plan.engine_endpoint(index, self.host)
        flags = plan.engine_flags(index, self.host)
        self.supervise(lambda: flags)

    def endpoint(self) -> str:
        """Where it is, or will be once it serves."""
        return self._endpoint


class Tokenizer(Room):
    def __init__(self, plan: Plan, index: int) -> None:
        super().__init__(plan, "tokenizer_svc", f"tokenizer-{index}")
        flags = plan.tokenizer_flags(tokenizer_address(self.directory, index))
        self.supervise(lambda: flags)


class Frontend(Room):
    """Its tokenizer is on the same node. With other addresses of engines its process drains
    and starts again."""

    def __init__(self, plan: Plan, index: int, engines: list[Any]) -> None:
        super().__init__(plan, "frontend", f"frontend-{index}")
        self._plan, self._index = plan, index
        self._endpoints = Endpoints(
            [functools.partial(_ask, engine) for engine in engines],
            ray.get([engine.endpoint.remote() for engine in engines]),
        )
        self.supervise(self._flags)
        threading.Thread(target=self._follow_engines, daemon=True).start()

    def _flags(self) -> list[str]:
        tokenizer = tokenizer_address(self.directory, self._index)
        engines = self._endpoints.current
        return self._plan.frontend_flags(self._index, self.host, tokenizer, engines)

    def _follow_engines(self) -> None:
        pause = threading.Event()
        while not pause.wait(_POLL_S):
            if self._endpoints.refresh():
                self.supervisor.renew()


def _ask(engine: Any) -> str | None:
    try:
        endpoint: str = ray.get(engine.endpoint.remote(), timeout=_POLL_S)
    except ray.exceptions.RayError:
        return None
    return endpoint


def tokenizer_address(directory: Path, index: int) -> str:
    return f"unix:{directory}/tokenizer-{index}.sock"
