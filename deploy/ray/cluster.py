"""Starts the actors, waits until all serve, and stops them in order."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
from deploy.ray.actors import Engine, Frontend, Tokenizer
from deploy.ray.errors import PlacementError, RoomError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

if TYPE_CHECKING:
    from deploy.ray.plan import Plan

_POLL_S = 0.25
_STOP_S = 15.0
_ROUND_TRIP_S = 30.0
_TOKENIZER_CPUS = 0.25
"""Of the frontend's bundle."""


class ServerOnRay:
    """Made inside ray.init(). Raises PlacementError."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        engine = {"CPU": plan.engine_cpus, "GPU": plan.engine_gpus}
        wanted = {key: value for key, value in engine.items() if value}
        self._groups: list[Any] = []
        try:
            engines = self._reserve([wanted] * plan.num_engines)
            fronts = self._reserve([{"CPU": plan.frontend_cpus}] * plan.num_frontends)
        except PlacementError:
            self._release()
            raise
        self._engines = [
            self._actor(Engine, f"engine-{i}", engines, i, wanted).remote(plan, i)
            for i in range(plan.num_engines)
        ]
        tokenizer = {"CPU": min(_TOKENIZER_CPUS, plan.frontend_cpus / 2)}
        frontend = {"CPU": plan.frontend_cpus - tokenizer["CPU"]}
        self._tokenizers = [
            self._actor(Tokenizer, f"tokenizer-{i}", fronts, i, tokenizer).remote(plan, i)
            for i in range(plan.num_frontends)
        ]
        self._frontends = [
            self._actor(Frontend, f"frontend-{i}", fronts, i, frontend).remote(
                plan, i, self._engines
            )
            for i in range(plan.num_frontends)
        ]

    def wait_ready(self) -> dict[str, dict[str, Any]]:
        """The state of each actor by its name, once all serve.

        Raises RoomError for a room that cannot start, TimeoutError after --start-timeout.
        """
        deadline = time.monotonic() + self._plan.config.start_timeout
        while True:
            states = self._states()
            for name, state in states.items():
                if state["status"] is not None:
                    raise RoomError(name, state["status"])
            waiting = [name for name, state in states.items() if state["facts"] is None]
            if not waiting:
                return states
            if time.monotonic() > deadline:
                raise TimeoutError(f"not ready (--start-timeout): {', '.join(waiting)}")
            time.sleep(_POLL_S)

    def stop(self) -> None:
        """Frontends first, which drain while there are engines to finish what runs."""
        config = self._plan.config
        drain_s = config.drain_grace + config.drain_timeout + _STOP_S
        for actors, patience_s in (
            (self._frontends, drain_s),
            ([*self._tokenizers, *self._engines], _STOP_S),
        ):
            stops = [actor.stop.remote(patience_s) for actor in actors]
            ray.wait(stops, num_returns=len(stops), timeout=patience_s + _ROUND_TRIP_S)
            for actor in actors:
                ray.kill(actor)
        self._release()

    def _states(self) -> dict[str, dict[str, Any]]:
        rooms = {
            "engine": self._engines,
            "tokenizer": self._tokenizers,
            "frontend": self._frontends,
        }
        asked = {
            f"{room}-{i}": actor.state.remote()
            for room, actors in rooms.items()
            for i, actor in enumerate(actors)
        }
        return dict(zip(asked, ray.get(list(asked.values())), strict=True))

    def _reserve(self, bundles: list[dict[str, float]]) -> Any:
        group = placement_group(bundles, strategy="SPREAD")
        self._groups.append(group)
        if not group.wait(self._plan.placement_timeout_s):
            nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
            have = "; ".join(
                ", ".join(f"{node.get(key, 0):g} {key}" for key in bundles[0]) for node in nodes
            )
            wanted = ", ".join(f"{value:g} {key}" for key, value in bundles[0].items())
            raise PlacementError(
                f"no room for {len(bundles)} times {wanted} within "
                f"{self._plan.placement_timeout_s:g} s (--placement-timeout); the nodes have {have}"
            )
        return group

    def _actor(
        self, cls: type, name: str, group: Any, bundle: int, resources: dict[str, float]
    ) -> Any:
        return ray.remote(cls).options(
            name=name,
            num_cpus=resources.get("CPU", 0),
            num_gpus=resources.get("GPU", 0),
            max_restarts=-1,
            max_task_retries=-1,
            # stop() must get through while state() is asked.
            max_concurrency=4,
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                placement_group=group, placement_group_bundle_index=bundle
            ),
        )

    def _release(self) -> None:
        for group in self._groups:
            remove_placement_group(group)


def connect(plan: Plan) -> None:
    """Raises ConnectionError where no cluster is at --address."""
    ray.init(
        address=plan.address,
        namespace=plan.namespace,
        # The nodes have Pagewire installed; this folder comes with the job.
        runtime_env={"py_modules": [str(Path(__file__).resolve().parents[1])]},
        log_to_driver=True,
    )
