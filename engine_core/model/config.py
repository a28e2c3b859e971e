"""What a checkpoint says about its model, whatever file format says it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from pagewire.errors import ModelLoadError

CheckpointDtype = Literal["float32", "float16", "bfloat16", "quantized"]

ROPE_TYPES = ("default", "linear", "llama3")


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding parameters (RoFormer, arXiv:2104.09864) and their scaling."""

    theta: float = 10_000.0
    rope_type: str = "default"
    """One of ROPE_TYPES."""
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 8192
    """The three above are of llama3 scaling only."""
    freq_divisors: tuple[float, ...] = ()
    """GGUF's rope_freqs.weight: divides frequency i by element i, [head_dim / 2]."""


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder-only transformer of the Llama family."""

    architecture: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    max_positions: int
    """Context length of the checkpoint, in tokens."""
    rope: RopeConfig
    tie_embeddings: bool
    attention_bias: bool
    """Biases on the q, k, v and o products."""
    mlp_bias: bool
    sliding_window: int | None
    """Tokens that attention sees at most; None sees all."""
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    dtype: CheckpointDtype
    """How the checkpoint stores its matrices."""
    default_sampling: dict[str, float] = field(default_factory=dict)
    """temperature, top_p, top_k and min_p, where the checkpoint's author set them."""


def check_config(config: ModelConfig, origin: str) -> ModelConfig:
    """Returns config; raises ModelLoadError naming `origin` (a file) and the value at fault."""
    sizes = {
        "hidden size": config.hidden_size,
        "intermediate size": config.intermediate_size,
        "number of layers": config.num_layers,
        "number of attention heads": config.num_heads,
        "number of key-value heads": config.num_kv_heads,
        "head dimension": config.head_dim,
        "vocabulary size": config.vocab_size,
        "context length": config.max_positions,
    }
    for name, size in sizes.items():
        if size < 1:
            raise ModelLoadError(f"{origin}: {name} is {size}, expected at least 1")
    if config.num_heads % config.num_kv_heads:
        raise ModelLoadError(
            f"{origin}: {config.num_heads} attention heads are not a multiple of "
            f"{config.num_kv_heads} key-value heads"
        )
    if config.head_dim % 2:
        raise ModelLoadError(
            f"{origin}: head dimension {config.head_dim} is odd; RoPE pairs need it even"
        )
    if not config.rms_norm_eps > 0:
        raise ModelLoadError(f"{origin}: RMS norm epsilon is {config.rms_norm_eps}, expected > 0")
    outside = [i for i in config.eos_token_ids if not 0 <= i < config.vocab_size]
    if outside:
        raise ModelLoadError(
            f"{origin}: end-of-sequence id {outside[0]} is outside the vocabulary of "
            f"{config.vocab_size}"
        )
    _check_rope(config.rope, config.head_dim, origin)
    return config


def _check_rope(rope: RopeConfig, head_dim: int, origin: str) -> None:
    if rope.rope_type not in ROPE_TYPES:
        raise ModelLoadError(
            f"{origin}: rope type {rope.rope_type!r} is unknown; known: {', '.join(ROPE_TYPES)}"
        )
    if not (rope.theta > 0 and rope.factor > 0):
        raise ModelLoadError(
            f"{origin}: rope theta {rope.theta} and factor {rope.factor} must be above 0"
        )
    if rope.rope_type == "llama3" and not (
        0 < rope.low_freq_factor < rope.high_freq_factor and rope.original_max_positions > 0
    ):
        raise ModelLoadError(
            f"{origin}: llama3 rope scaling needs 0 < low_freq_factor < high_freq_factor and "
            f"original_max_position_embeddings > 0, got {rope.low_freq_factor}, "
            f"{rope.high_freq_factor} and {rope.original_max_positions}"
        )
    if rope.freq_divisors and len(rope.freq_divisors) != head_dim // 2:
        raise ModelLoadError(
            f"{origin}: rope_freqs.weight has {len(rope.freq_divisors)} elements, expected "
            f"{head_dim // 2}"
        )


def check_window(config: ModelConfig, max_model_len: int, origin: str) -> None:
    """Raises ModelLoadError where a sliding window would cut what attention sees.

    A window of at least max_model_len hides nothing, so full attention equals it.
    """
    if config.sliding_window is not None and config.sliding_window < max_model_len:
        raise ModelLoadError(
            f"{origin}: {config.architecture} with sliding_window {config.sliding_window} is not "
            f"served at a context of {max_model_len}; full attention only: set --max-model-len to "
            f"at most {config.sliding_window}"
        )
