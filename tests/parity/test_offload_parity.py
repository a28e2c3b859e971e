"""A tiny KV pool and the host behind it: the tokens of transformers, restored or not."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from tests.parity.harness import Engine, assert_same_tokens, load, transformers_greedy
from tests.support.tiny_model import TinySpec, write_hf

if TYPE_CHECKING:
    from pathlib import Path

NUM_TOKENS = 24


def test_evicted_and_restored_equals_transformers(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    spec = TinySpec(seed=31)
    path = write_hf(tmp_path / "model", spec)
    model: Any = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager").eval()
    generator = torch.Generator().manual_seed(31)
    prompts = torch.randint(2, spec.vocab_size, (6, 70), generator=generator).tolist()
    prompts += [[*prompts[0][:50], 5, 6, 7], prompts[1][:33]]
    expected = transformers_greedy(model, prompts, NUM_TOKENS)
    loaded = load(str(path), "cpu")
    for num_blocks, num_host_blocks, chunk in ((15, 200, 64), (25, 40, 23)):
        engine = Engine(
            loaded,
            num_blocks=num_blocks,
            block_size=8,
            max_num_batched_tokens=chunk,
            prefix_caching=True,
            num_host_blocks=num_host_blocks,
        )
        for _ in range(2):
            assert_same_tokens(engine.generate(prompts, NUM_TOKENS), expected)
        stats = engine.core.stats()
        assert stats.total_offloaded_blocks > 0
        assert stats.total_restored_blocks > 0
        assert stats.host_cache_hits > 0
