"""Is a room healthy? For container health checks:

    python -m pagewire.obs.probe grpc HOST:PORT      asks grpc.health.v1
    python -m pagewire.obs.probe ready-file PATH     the file's process is alive

Ends with 0 for yes, 1 for no (one line on stderr says why), 2 for wrong usage.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from pagewire.obs.ready import read_ready_file

_TIMEOUT_S = 3.0


def main(argv: list[str] | None = None) -> int:
    match sys.argv[1:] if argv is None else argv:
        case ["grpc", address]:
            trouble = check_grpc(address)
        case ["ready-file", path]:
            trouble = check_ready_file(Path(path))
        case _:
            sys.stderr.write(__doc__ or "")
            return 2
    if trouble:
        sys.stderr.write(f"{trouble}\n")
    return 1 if trouble else 0


def check_grpc(address: str) -> str | None:
    """What is wrong with the server as a whole, or None where it is SERVING."""
    import grpc
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    with grpc.insecure_channel(address) as channel:
        try:
            response = health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(), timeout=_TIMEOUT_S
            )
        except grpc.RpcError as error:
            return f"{address}: {error.code().name}: {error.details()}"
    if response.status != health_pb2.HealthCheckResponse.SERVING:
        return f"{address}: {health_pb2.HealthCheckResponse.ServingStatus.Name(response.status)}"
    return None


def check_ready_file(path: Path) -> str | None:
    """What is wrong, or None where the file's process is alive."""
    facts = read_ready_file(path)
    if facts is None:
        return f"{path}: not there"
    try:
        os.kill(facts["pid"], 0)
    except ProcessLookupError:
        return f"{path}: process {facts['pid']} is gone"
    except PermissionError:
        pass
    return None


if __name__ == "__main__":
    raise SystemExit(main())
