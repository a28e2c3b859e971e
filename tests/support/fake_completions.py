"""A server of /v1/completions without a model, for bench/peers.py: it answers as many tokens as
are asked for, or does not.

    python -m tests.support.fake_completions --port 8101 [--end-after 20]
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


def _end(message: str) -> None:
    print(message, file=sys.stderr, flush=True)
    os._exit(3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--refuse", action="store_true", help="End before anything.")
    parser.add_argument("--mute", action="store_true", help="Take requests and never answer.")
    parser.add_argument("--end-after", type=int, help="Streams that it answers before it ends.")
    parser.add_argument("--stop-after", type=int, help="Streams, and none after these.")
    options = parser.parse_args()
    if options.refuse:
        _end("no such model")
    never = threading.Event()
    numbers = itertools.count()
    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, format: str, *args: Any) -> None:
            pass

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            if options.mute:
                never.wait()
            if not body.get("stream"):
                self._write(b"application/json", [b"{}"])
                return
            with lock:
                # Numbered and answered one at a time, so that all before it were answered.
                number = next(numbers)
                if number == options.end_after:
                    _end("out of memory")
                if number != options.stop_after:
                    self._stream(body)
                    return
            never.wait()

        def _stream(self, body: dict[str, Any]) -> None:
            count = body["max_tokens"]
            events: list[Any] = [{"choices": [{"index": 0, "text": "a"}]} for _ in range(count)]
            usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": count}
            lines = [json.dumps(event) for event in (*events, {"choices": [], "usage": usage})]
            self._write(
                b"text/event-stream", [f"data: {x}\n\n".encode() for x in (*lines, "[DONE]")]
            )

        def _write(self, content_type: bytes, parts: list[bytes]) -> None:
            self.send_response(200)
            self.send_header("content-type", content_type.decode())
            self.end_headers()
            for part in parts:
                self.wfile.write(part)

    class Server(ThreadingHTTPServer):
        request_queue_size = 128

    Server(("127.0.0.1", options.port), Handler).serve_forever()


if __name__ == "__main__":
    main()
