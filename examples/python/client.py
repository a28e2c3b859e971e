"""pagewire.client: a conversation, a stream, and what failures look like."""

from __future__ import annotations

import os

from pagewire.client import Ask, Client, InvalidArgument, QueueFull

ADDRESS = os.environ.get("PAGEWIRE_ADDRESS", "127.0.0.1:50051")


def main() -> None:
    with Client(ADDRESS, timeout=60) as client:
        for model in client.models():
            print(f"{model['name']}, context of {model['max_model_len']} tokens")

        messages = [("system", "You answer in one sentence."), ("user", "What is a protobuf?")]
        turn = client.chat(messages, max_tokens=48, temperature=0)
        print("assistant:", turn["content"])

        ask = Ask(prompt="Once upon a time", sampling={"max_tokens": 32, "seed": 7})
        with client.stream(ask) as stream:
            for text in stream:
                print(text, end="", flush=True)
        assert stream.final is not None
        print("\ntokens:", stream.final["usage"]["completion_tokens"])

        try:
            client.generate(Ask(prompt="x", sampling={"top_p": 7}))
        except InvalidArgument as failure:
            print(f"refused: {failure.field}: {failure}")
        except QueueFull as failure:
            # The client has tried five times by then.
            print(f"too busy; again in {failure.retry_after} s")


if __name__ == "__main__":
    main()
