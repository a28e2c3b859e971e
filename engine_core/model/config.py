"""What a checkpoint says about its model, whatever file format says it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from pagewire.errors import ModelLoadError

if TYPE_CHECKING:
    from engine_core.model.quantized.scheme import Scheme
    from kernels.ops import Activation

CheckpointDtype = Literal["float32", "float16", "bfloat16", "quantized"]

_TOO_LARGE = 1 << 31
"""Kernels count the elements of one dimension in 32 bits."""
ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn", "longrope", "proportional")


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding parameters (RoFormer, arXiv:2104.09864) and their scaling;
    engine_core/model/rope.py says what each type does with them."""

    theta: float = 10_000.0
    rope_type: str = "default"
    """One of ROPE_TYPES."""
    factor: float = 1.0
    rotary_dim: int | None = None
    """Elements of a head that are rotated, the first ones; None rotates all."""
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    """Both of llama3 only."""
    original_max_positions: int = 8192
    """Of llama3, yarn and longrope: the context before it was extended."""
    attention_factor: float = 1.0
    """Of yarn and longrope: multiplies cosines and sines."""
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    """The three above are of yarn only."""
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()
    """Of longrope: one divisor for each frequency, [rotary_dim / 2]."""
    freq_divisors: tuple[float, ...] = ()
    """GGUF's rope_freqs.weight: divides frequency i by element i, [rotary_dim / 2]."""


@dataclass(frozen=True, slots=True)
class ExpertsConfig:
    """A sparse mixture of experts in place of the MLP, as kernels.ops.MoeBlock has it."""

    num_experts: int
    top_k: int
    intermediate_size: int
    renormalizes: bool


@dataclass(frozen=True, slots=True)
class LayerConfig:
    """What may differ from layer to layer."""

    rope: RopeConfig | None
    """None: no positions (NoPE)."""
    window: int | None = None
    """Tokens that attention sees at most, its own among them; None sees all."""
    experts: ExpertsConfig | None = None


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder-only transformer with RMS norms, rotary positions and gated MLPs."""

    architecture: str
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    max_positions: int
    """Context length of the checkpoint, in tokens."""
    layers: tuple[LayerConfig, ...]
    tie_embeddings: bool
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    dtype: CheckpointDtype
    """How the checkpoint stores its matrices."""
    qkv_bias: bool = False
    output_bias: bool = False
    """Of attention's last product."""
    mlp_bias: bool = False
    activation: Activation = "silu"
    norm_offset: float = 0.0
    """Added to the stored weights of all norms."""
    embedding_scale: float = 1.0
    """Multiplies what the embedding gives."""
    attention_scale: float | None = None
    """Multiplies the scores; None is head_dim ** -0.5."""
    attention_soft_cap: float | None = None
    logit_scale: float = 1.0
    logit_soft_cap: float | None = None
    """Logits l become cap * tanh(l / cap), as in attention; after logit_scale."""
    quantization: Scheme | None = None
    """Of a Hugging Face checkpoint whose matrices are codes; dtype is then of the rest."""
    default_sampling: dict[str, float] = field(default_factory=dict)
    """temperature, top_p, top_k and min_p, where the checkpoint's author set them."""

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def window(self) -> int | None:
        """Tokens that any layer sees at most; None if one of them sees all."""
        windows = [layer.window for layer in self.layers]
        return None if None in windows else max(filter(None, windows), default=None)

    @property
    def has_experts(self) -> bool:
        return any(layer.experts is not None for layer in self.layers)


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
        if not 1 <= size < _TOO_LARGE:
            raise ModelLoadError(f"{origin}: {name} is {size}, expected 1 to {_TOO_LARGE - 1}")
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
    caps = {"attention": config.attention_soft_cap, "logit": config.logit_soft_cap}
    for name, cap in caps.items():
        if cap is not None and not cap > 0:
            raise ModelLoadError(f"{origin}: {name} soft cap is {cap}, expected > 0")
    outside = [i for i in config.eos_token_ids if not 0 <= i < config.vocab_size]
    if outside:
        raise ModelLoadError(
            f"{origin}: end-of-sequence id {outside[0]} is outside the vocabulary of "
            f"{config.vocab_size}"
        )
    for layer in dict.fromkeys(config.layers):
        _check_layer(layer, config, origin)
    return config


def _check_layer(layer: LayerConfig, config: ModelConfig, origin: str) -> None:
    if layer.rope is not None:
        _check_rope(layer.rope, config.head_dim, origin)
    if layer.window is not None and layer.window < 1:
        raise ModelLoadError(f"{origin}: sliding window is {layer.window}, expected at least 1")
    experts = layer.experts
    if experts is None:
        return
    if not 1 <= experts.top_k <= experts.num_experts:
        raise ModelLoadError(
            f"{origin}: {experts.top_k} experts for each token of {experts.num_experts} experts"
        )
    if experts.intermediate_size < 1:
        raise ModelLoadError(
            f"{origin}: intermediate size of the experts is {experts.intermediate_size}, "
            "expected at least 1"
        )


def _check_rope(rope: RopeConfig, head_dim: int, origin: str) -> None:
    if rope.rope_type not in ROPE_TYPES:
        raise ModelLoadError(
            f"{origin}: rope type {rope.rope_type!r} is unknown; known: {', '.join(ROPE_TYPES)}"
        )
    if not (rope.theta > 0 and rope.factor > 0 and rope.attention_factor > 0):
        raise ModelLoadError(
            f"{origin}: rope theta {rope.theta}, factor {rope.factor} and attention factor "
            f"{rope.attention_factor} must be above 0"
        )
    if rope.rope_type == "llama3" and not (
        0 < rope.low_freq_factor < rope.high_freq_factor and rope.original_max_positions > 0
    ):
        raise ModelLoadError(
            f"{origin}: llama3 rope scaling needs 0 < low_freq_factor < high_freq_factor and "
            f"original_max_position_embeddings > 0, got {rope.low_freq_factor}, "
            f"{rope.high_freq_factor} and {rope.original_max_positions}"
        )
    if rope.rope_type == "yarn" and not (
        0 < rope.beta_slow <= rope.beta_fast and rope.original_max_positions > 0 and rope.theta > 1
    ):
        raise ModelLoadError(
            f"{origin}: yarn rope scaling needs 0 < beta_slow <= beta_fast, "
            f"original_max_position_embeddings > 0 and rope_theta > 1, got {rope.beta_slow}, "
            f"{rope.beta_fast}, {rope.original_max_positions} and {rope.theta}"
        )
    rotary_dim = head_dim if rope.rotary_dim is None else rope.rotary_dim
    if not 0 < rotary_dim <= head_dim or rotary_dim % 2:
        raise ModelLoadError(
            f"{origin}: {rotary_dim} elements of a head of {head_dim} are to be rotated; "
            "expected an even number from 2 to the whole head"
        )
    lists = {"rope_freqs.weight": rope.freq_divisors}
    if rope.rope_type == "longrope":
        lists |= {"short_factor": rope.short_factors, "long_factor": rope.long_factors}
        if rope.original_max_positions < 2:
            raise ModelLoadError(
                f"{origin}: longrope needs original_max_position_embeddings of at least 2, got "
                f"{rope.original_max_positions}"
            )
    for name, values in lists.items():
        is_wanted = name != "rope_freqs.weight" or values
        if is_wanted and len(values) != rotary_dim // 2:
            raise ModelLoadError(
                f"{origin}: {name} has {len(values)} elements, expected {rotary_dim // 2}"
            )
        if not all(value > 0 for value in values):
            raise ModelLoadError(f"{origin}: {name} has an element that is not above 0")
