"""python -m deploy.ray [--engines N] [--frontends N] ... -- SETTINGS OF THE ROOMS

Runs until SIGINT or SIGTERM, then drains. Status 0 after a signal, 1 where it was not ready in
time, 2 for a wrong flag or a cluster that is too small or not there, or the status of the room
that cannot start.
"""

from __future__ import annotations

import signal
import sys
from typing import Any

from deploy.ray.plan import read_plan
from pagewire.errors import ConfigError


def main(argv: list[str] | None = None) -> int:
    try:
        plan = read_plan(sys.argv[1:] if argv is None else argv)
    except ConfigError as error:
        return _fail(error, 2)
    try:
        import ray
    except ModuleNotFoundError:
        return _fail("ray is not installed: pip install 'pagewire[ray]'", 2)

    from deploy.ray.cluster import ServerOnRay, connect
    from deploy.ray.errors import PlacementError, RoomError

    signals = {signal.SIGINT, signal.SIGTERM}
    try:
        connect(plan)
        server = ServerOnRay(plan)
    except (ConnectionError, PlacementError) as error:
        return _fail(error, 2)
    # Only now: Ray sets handlers of its own while it connects.
    for number in signals:
        signal.signal(number, _interrupt)
    try:
        _announce(server.wait_ready())
        signal.pause()
    except KeyboardInterrupt:
        pass
    except RoomError as error:
        return _fail(error, error.status)
    except TimeoutError as error:
        return _fail(error, 1)
    finally:
        for number in signals:
            signal.signal(number, signal.SIG_IGN)
        server.stop()
        ray.shutdown()
    return 0


def _interrupt(_number: int, _frame: Any) -> None:
    raise KeyboardInterrupt


def _announce(states: dict[str, dict[str, Any]]) -> None:
    for name, state in states.items():
        facts = state["facts"]
        where = [f"{key} {facts[key]}" for key in ("commands", "grpc", "http") if key in facts]
        print(f"{name:12} node {state['node'][:8]}  pid {facts['pid']}  {', '.join(where)}")  # noqa: T201
    print("ready", flush=True)  # noqa: T201


def _fail(error: object, status: int) -> int:
    print(f"deploy.ray: {error}", file=sys.stderr)  # noqa: T201
    return status


if __name__ == "__main__":
    raise SystemExit(main())
