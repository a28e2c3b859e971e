"""A stream that goes on after its connection broke. The server needs --resume-ttl."""

from __future__ import annotations

import os
import sys

from pagewire.client import Ask, Client, FailedPrecondition

ADDRESS = os.environ.get("PAGEWIRE_ADDRESS", "127.0.0.1:50051")


def main() -> int:
    ask = Ask(prompt="The longest story begins", sampling={"max_tokens": 64, "seed": 7})
    with Client(ADDRESS) as client:
        try:
            # Restart a proxy, or pull a cable, while it runs: no text is lost, none comes twice.
            for text in client.resumable_stream(ask, timeout=120):
                print(text, end="", flush=True)
        except FailedPrecondition as failure:
            print(f"{failure.field}: {failure}", file=sys.stderr)
            return 1
    print()
    return 0


if __name__ == "__main__":
    sys.exit(main())
