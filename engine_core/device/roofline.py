"""How long a GPU takes over a step, at best: bytes over bandwidth or FLOPs over peak.

The roofline model is of Williams, Waterman and Patterson (CACM 52(4), 2009). It knows
the weights, the KV cache and the logits, which are most of what a decoder moves, and a
fixed time for each kernel that is launched; it knows nothing of tile sizes, caches or
what a kernel wastes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine_core.device.memory import kv_bytes_per_token

if TYPE_CHECKING:
    import torch

    from engine_core.model.config import ModelConfig

# What was measured on an H200 (a device copy, a large bfloat16 product), of what its
# datasheet promises; assumed of the others too.
_BANDWIDTH_SHARE = 4.3 / 4.8
_FLOPS_SHARE = 790 / 989

KERNEL_S = 2e-6
"""From the end of a kernel to the work of the next in one CUDA graph: an assumption."""
_KERNELS_PER_LAYER = 9
"""Two norms, four matrix products, rope and KV write, attention, gate."""
_KERNELS_PER_STEP = 4
"""Embedding, last norm, head, sampling."""


@dataclass(frozen=True, slots=True)
class Gpu:
    name: str
    memory_bytes: int
    bandwidth: float
    """Bytes a second that a copy reaches."""
    flops: float
    """FLOP a second that a large bfloat16 product reaches; one multiply-add is two."""


def _gpu(name: str, memory_gb: float, terabytes_s: float, teraflops: float) -> Gpu:
    """From a datasheet: bfloat16 on tensor cores, without sparsity."""
    return Gpu(
        name,
        int(memory_gb * 1e9),
        terabytes_s * 1e12 * _BANDWIDTH_SHARE,
        teraflops * 1e12 * _FLOPS_SHARE,
    )


GPUS = {
    "h200": _gpu("NVIDIA H200 SXM", 141, 4.8, 989),
    "h100": _gpu("NVIDIA H100 SXM", 80, 3.35, 989),
    "a100": _gpu("NVIDIA A100 SXM 80GB", 80, 2.039, 312),
    "l4": _gpu("NVIDIA L4", 24, 0.3, 121),
}
"""Memory, bandwidth and peak of NVIDIA's datasheets. Those of the H100 and the L4 tell the
peak with sparsity, which is twice this."""


@dataclass(frozen=True, slots=True)
class ModelCost:
    """What a model's step moves and multiplies."""

    layer_params: int
    """Elements of all that every token is multiplied with, in all layers."""
    head_params: int
    vocab_size: int
    weight_bytes: int
    """All of them on the device, the embedding too."""
    num_layers: int
    query_width: int
    """Elements of a token's queries in all layers: L * Hq * D."""
    kv_bytes_per_token: int
    item_bytes: int

    @classmethod
    def of(
        cls, config: ModelConfig, num_params: int, dtype: torch.dtype, kv_dtype: torch.dtype
    ) -> ModelCost:
        """num_params: elements of all tensors that are stored. kv_dtype: of the KV cache."""
        head_params = config.vocab_size * config.hidden_size
        num_tables = 1 if config.tie_embeddings else 2
        return cls(
            layer_params=num_params - num_tables * head_params,
            head_params=head_params,
            vocab_size=config.vocab_size,
            weight_bytes=num_params * dtype.itemsize,
            num_layers=config.num_layers,
            query_width=config.num_layers * config.num_heads * config.head_dim,
            kv_bytes_per_token=kv_bytes_per_token(config, kv_dtype),
            item_bytes=dtype.itemsize,
        )


@dataclass(frozen=True, slots=True)
class StepWork:
    num_tokens: int
    num_sampled: int
    num_context_tokens: int
    """Tokens whose KV is read, the step's own among them, summed over the sequences."""
    num_pairs: int
    """(query, key) pairs that attention looks at, likewise."""
    num_copied_tokens: int = 0
    """Tokens of the KV blocks that are copied before."""


def step_seconds(gpu: Gpu, model: ModelCost, work: StepWork) -> float:
    """Layers, attention, and head with sampling run one after the other, each at its own
    roof. Weights and KV are read once a step."""

    def roof(num_bytes: float, flops: float) -> float:
        return max(num_bytes / gpu.bandwidth, flops / gpu.flops)

    num_kernels = _KERNELS_PER_LAYER * model.num_layers + _KERNELS_PER_STEP
    kv_tokens = work.num_context_tokens + work.num_tokens + 2 * work.num_copied_tokens
    seconds = num_kernels * KERNEL_S
    seconds += roof(model.layer_params * model.item_bytes, 2 * model.layer_params * work.num_tokens)
    seconds += roof(kv_tokens * model.kv_bytes_per_token, 4 * model.query_width * work.num_pairs)
    if work.num_sampled:
        # Logits are written by the head and read by the sampler.
        logits = 2 * work.num_sampled * model.vocab_size * model.item_bytes
        seconds += roof(
            model.head_params * model.item_bytes + logits,
            2 * model.head_params * work.num_sampled,
        )
    return seconds
