"""Is a room healthy? For container health checks:

    python -m pagewire.obs.probe grpc HOST:PORT      asks grpc.health.v1
        [--tls] [--tls-ca FILE] [--tls-cert FILE --tls-key FILE]
    python -m pagewire.obs.probe ready-file PATH     the file's process is alive

The key of a server that asks for one even here is that of PAGEWIRE_API_KEY.
Ends with 0 for yes, 1 for no (one line on stderr says why), 2 for wrong usage.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from pagewire.errors import ConfigError
from pagewire.obs.ready import read_ready_file

if TYPE_CHECKING:
    from pagewire.connection import Connection

_TIMEOUT_S = 3.0
_FILE_FLAGS = {"--tls-ca": "ca", "--tls-cert": "cert", "--tls-key": "key"}


def main(argv: list[str] | None = None) -> int:
    match sys.argv[1:] if argv is None else argv:
        case ["grpc", address, *flags] if (connection := _connection(address, flags)) is not None:
            trouble = check_grpc(connection)
        case ["ready-file", path]:
            trouble = check_ready_file(Path(path))
        case _:
            sys.stderr.write(__doc__ or "")
            return 2
    if trouble:
        sys.stderr.write(f"{trouble}\n")
    return 1 if trouble else 0


def _connection(address: str, flags: list[str]) -> Connection | None:
    """None for flags that it does not know."""
    from pagewire.connection import Connection

    files: dict[str, str] = {}
    tls = False
    rest = iter(flags)
    for flag in rest:
        if flag == "--tls":
            tls = True
        elif flag in _FILE_FLAGS and (path := next(rest, None)) is not None:
            files[_FILE_FLAGS[flag]] = path
        else:
            return None
    api_key = os.environ.get("PAGEWIRE_API_KEY") or None
    return Connection(address, tls=tls, api_key=api_key, **files)


def check_grpc(connection: Connection) -> str | None:
    """What is wrong with the server as a whole, or None where it is SERVING."""
    import grpc
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    address = connection.address
    try:
        opened = connection.channel()
    except ConfigError as error:
        return str(error)
    with opened as channel:
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
