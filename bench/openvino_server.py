"""An OpenAI-like server around OpenVINO GenAI, for bench/peers.py: it has none for Python.

    python bench/openvino_server.py MODEL_DIR [--port 8103]

Runs in OpenVINO's own environment, with aiohttp beside openvino-genai. One thread steps
the continuous batching pipeline and reads what each request has got; the event loop
writes one server-sent event a step and request. Prompts are token ids, output is greedy
and of full length.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import threading
from typing import Any

import numpy as np
import openvino
import openvino_genai
from aiohttp import web


class Engine:
    """The pipeline and the one thread that uses it."""

    def __init__(self, directory: str, cache_gib: int, batched_tokens: int) -> None:
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.cache_size = cache_gib
        scheduler.max_num_batched_tokens = batched_tokens
        scheduler.dynamic_split_fuse = True
        scheduler.enable_prefix_caching = True
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(directory, scheduler, "CPU")
        self._tokenizer = self._pipeline.get_tokenizer()
        self._ids = itertools.count()
        self._new: list[tuple[Any, int, Any]] = []
        self._has_new = threading.Condition()

    def start(self) -> None:
        threading.Thread(target=self._run, daemon=True).start()

    def add(self, ids: list[int], max_tokens: int, put: Any) -> None:
        """put(text, number of tokens so far, ended) is called from the engine's thread."""
        with self._has_new:
            self._new.append((ids, max_tokens, put))
            self._has_new.notify()

    def _run(self) -> None:
        running: list[list[Any]] = []
        while True:
            with self._has_new:
                while not self._new and not running:
                    self._has_new.wait()
                new, self._new = self._new, []
            for ids, max_tokens, put in new:
                config = openvino_genai.GenerationConfig()
                config.max_new_tokens = max_tokens
                config.ignore_eos = True
                config.do_sample = False
                tensor = openvino.Tensor(np.array([ids], dtype=np.int64))
                handle = self._pipeline.add_request(next(self._ids), tensor, config)
                running.append([handle, put, max_tokens, 0])
            self._pipeline.step()
            for entry in list(running):
                handle, put, max_tokens, _ = entry
                while handle.can_read():
                    for output in handle.read().values():
                        entry[3] += len(output.generated_ids)
                        text = self._tokenizer.decode(output.generated_ids)
                        put(text or " ", entry[3], entry[3] >= max_tokens)
                if entry[3] >= max_tokens:
                    running.remove(entry)


async def complete(request: web.Request) -> web.StreamResponse:
    body = await request.json()
    loop, queue = asyncio.get_running_loop(), asyncio.Queue[tuple[str, int, bool]]()

    def put(*item: Any) -> None:
        loop.call_soon_threadsafe(queue.put_nowait, item)

    request.app["engine"].add(body["prompt"], body["max_tokens"], put)
    response = web.StreamResponse(headers={"content-type": "text/event-stream"})
    await response.prepare(request)
    ended, tokens = False, 0
    while not ended:
        text, tokens, ended = await queue.get()
        event = {"choices": [{"index": 0, "text": text, "finish_reason": None}]}
        await response.write(b"data: %b\n\n" % json.dumps(event).encode())
    usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": tokens}
    last = json.dumps({"choices": [], "usage": usage}).encode()
    await response.write(b"data: %b\n\ndata: [DONE]\n\n" % last)
    return response


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--port", type=int, default=8103)
    parser.add_argument("--cache-gib", type=int, default=4)
    parser.add_argument("--max-num-batched-tokens", type=int, default=512)
    options = parser.parse_args()
    app = web.Application()
    app["engine"] = Engine(options.model, options.cache_gib, options.max_num_batched_tokens)
    app["engine"].start()
    app.router.add_post("/v1/completions", complete)
    web.run_app(app, host="127.0.0.1", port=options.port, print=None)


if __name__ == "__main__":
    main()
