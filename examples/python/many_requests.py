"""Many requests at once, from one event loop."""

from __future__ import annotations

import asyncio
import os

from pagewire.client import Ask, AsyncClient, DeadlineExceeded

ADDRESS = os.environ.get("PAGEWIRE_ADDRESS", "127.0.0.1:50051")
COLOURS = ["red", "green", "blue", "black", "white", "amber", "violet", "grey"]


async def main() -> None:
    async with AsyncClient(ADDRESS, timeout=60) as client:

        async def describe(colour: str) -> str:
            ask = Ask(prompt=f"The colour {colour} is", sampling={"max_tokens": 12, "seed": 7})
            async with client.stream(ask) as stream:
                return "".join([text async for text in stream])

        # The prompts' common beginning is computed once.
        texts = await asyncio.gather(*map(describe, COLOURS))
        for colour, text in zip(COLOURS, texts, strict=True):
            print(f"{colour}:{text!r}")

        try:
            await client.generate(Ask(prompt="x", sampling={"ignore_eos": True}), timeout=0.05)
        except DeadlineExceeded:
            print("ended by its deadline, and the server computes no more of it")


if __name__ == "__main__":
    asyncio.run(main())
