"""The same requests through transformers, on the same device and weights."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch

from scripts.gpu_check.models import LLAMA, checkpoint, reference
from scripts.gpu_check.outcome import BATCHING, COMPILED, Outcome
from scripts.gpu_check.workload import Workload

if TYPE_CHECKING:
    from pathlib import Path

    from scripts.gpu_check.measure import Bench


def batching(bench: Bench, work: Path) -> Outcome:
    """generate_batch with what it chooses itself; the second run counts."""
    import transformers

    load = Workload.of(bench)
    model = reference(checkpoint(LLAMA, work, bench), bench, bench.dtype, attention="sdpa")
    # No token has id -1, so none ends an output.
    greedy = transformers.GenerationConfig(  # type: ignore[no-untyped-call]
        max_new_tokens=load.output, do_sample=False, eos_token_id=-1, pad_token_id=0
    )
    # Left to itself it takes nine tenths of what memory there is.
    sizes: dict[str, Any] = {}
    if bench.tiny:
        sizes = {"num_blocks": 16, "block_size": 32, "max_batch_tokens": 64}
    for seed in (1, load.output):
        inputs = load.prompts(seed)
        bench.wait()
        began = time.perf_counter()
        answers = model.generate_batch(
            inputs,
            generation_config=greedy,
            continuous_batching_config=transformers.ContinuousBatchingConfig(**sizes),
            persistent_manager=True,
        )
        bench.wait()
        seconds = time.perf_counter() - began
        lengths = [len(answer.generated_tokens) for answer in answers.values()]
        if lengths != [load.output] * load.batch:
            raise RuntimeError(f"generate_batch answered {len(lengths)} of {load.batch} in full")
    model.destroy_cached_continuous_batching_manager()
    outcome = Outcome()
    outcome.add(BATCHING, load.batch * load.output / seconds, "tokens/s")
    return outcome


def compiled(bench: Bench, work: Path) -> Outcome:
    """generate, which compiles its decode step by itself on a GPU; the second run counts."""
    load = Workload.of(bench)
    model = reference(checkpoint(LLAMA, work, bench), bench, bench.dtype, attention="sdpa")
    for seed in (1, load.output):
        inputs = torch.tensor(load.prompts(seed), device=bench.device)
        bench.wait()
        began = time.perf_counter()
        ids = model.generate(
            inputs,
            attention_mask=torch.ones_like(inputs),
            max_new_tokens=load.output,
            do_sample=False,
            eos_token_id=-1,
            pad_token_id=0,
            cache_implementation="static",
        )
        bench.wait()
        seconds = time.perf_counter() - began
        if ids.shape != (load.batch, load.prompt + load.output):
            raise RuntimeError(f"generate returned {tuple(ids.shape)}")
    outcome = Outcome()
    outcome.add(COMPILED, load.batch * load.output / seconds, "tokens/s")
    return outcome
