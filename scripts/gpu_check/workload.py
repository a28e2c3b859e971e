"""What tokens a second are counted on, the same for the engine and for transformers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from scripts.gpu_check import models

if TYPE_CHECKING:
    from scripts.gpu_check.measure import Bench


@dataclass(frozen=True, slots=True)
class Workload:
    """Prompts of one length, which all arrive at once; every output has the same length."""

    batch: int
    prompt: int
    output: int
    warm_up_output: int
    vocab_size: int
    kv_bytes_per_token: int

    @classmethod
    def of(cls, bench: Bench) -> Workload:
        if bench.tiny:
            return cls(4, 12, 8, 4, 300, 2 * 2 * 2 * 16 * 4)
        shape = models.LLAMA.fields
        elements = 2 * shape["num_hidden_layers"] * shape["num_key_value_heads"] * shape["head_dim"]
        return cls(256, 128, 128, 8, shape["vocab_size"], elements * bench.dtype.itemsize)

    def prompts(self, seed: int) -> list[list[int]]:
        return models.prompts(self.batch, self.prompt, self.vocab_size, seed)
