"""OpenAI's client (pip install openai), with nothing changed but the address."""

from __future__ import annotations

import json
import os

from openai import OpenAI

URL = os.environ.get("PAGEWIRE_URL", "http://127.0.0.1:8000/v1")
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}, "sunny": {"type": "boolean"}},
    "required": ["city", "sunny"],
    "additionalProperties": False,
}


def main() -> None:
    with OpenAI(base_url=URL, api_key="none") as client:
        model = client.models.list().data[0].id
        stream = client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": "Name three colours."}],
            max_tokens=32,
            stream=True,
        )
        for chunk in stream:
            if chunk.choices:
                print(chunk.choices[0].delta.content or "", end="", flush=True)

        answer = client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": "The weather in Oslo, as JSON."}],
            response_format={
                "type": "json_schema",
                "json_schema": {"name": "weather", "schema": SCHEMA},
            },
            max_tokens=100,
        )
        weather = json.loads(answer.choices[0].message.content or "")
        print(f"\ncity {weather['city']!r}, sunny {weather['sunny']}")


if __name__ == "__main__":
    main()
