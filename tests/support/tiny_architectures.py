"""Tiny random checkpoints of every architecture, made and saved by transformers.

Head counts are odd where the architecture allows it, and windows shorter than prompts.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from pathlib import Path

_SIZES: dict[str, Any] = {
    "vocab_size": 160,
    "hidden_size": 48,
    "intermediate_size": 56,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "max_position_embeddings": 256,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
_LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "short_factor": [1.0 + i / 6 for i in range(6)],
    "long_factor": [1.5 + i for i in range(6)],
    "original_max_position_embeddings": 64,
}
_EXPERTS = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 24}


@dataclass(frozen=True)
class TinyArchitecture:
    name: str
    """Of the class in transformers, without ForCausalLM."""
    changes: dict[str, Any] = field(default_factory=dict)
    """To _SIZES and the class's own defaults."""
    config: str = ""
    """Of the configuration's class, where it is not name + Config."""
    max_model_len: int = 256
    prompt_lengths: tuple[int, ...] = (1, 16, 33, 90)

    @property
    def prompts(self) -> list[list[int]]:
        """The last two share most of their tokens."""
        generator = torch.Generator().manual_seed(7)
        drawn = [
            torch.randint(2, _SIZES["vocab_size"], (n,), generator=generator).tolist()
            for n in self.prompt_lengths
        ]
        return [*drawn, [*drawn[-1][:70], 5, 6, 7]]


ARCHITECTURES = {
    "mistral-window": TinyArchitecture("Mistral", {"sliding_window": 24}),
    "mixtral": TinyArchitecture("Mixtral", {"num_local_experts": 5, "tie_word_embeddings": True}),
    "mixtral-window": TinyArchitecture("Mixtral", {"num_local_experts": 3, "sliding_window": 7}),
    "qwen2": TinyArchitecture(
        "Qwen2", {"num_attention_heads": 6, "num_key_value_heads": 3, "tie_word_embeddings": True}
    ),
    "qwen2-upper-window": TinyArchitecture(
        "Qwen2", {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1}
    ),
    "qwen3": TinyArchitecture("Qwen3", {"head_dim": 24, "num_key_value_heads": 3}),
    "qwen3-biases": TinyArchitecture("Qwen3", {"head_dim": 16, "attention_bias": True}),
    "qwen3-moe": TinyArchitecture("Qwen3Moe", {**_EXPERTS, "norm_topk_prob": True, "head_dim": 8}),
    "qwen3-moe-some-dense": TinyArchitecture(
        "Qwen3Moe", {**_EXPERTS, "mlp_only_layers": [1], "num_hidden_layers": 3}
    ),
    "gemma2": TinyArchitecture(
        "Gemma2",
        {
            "head_dim": 24,
            "query_pre_attn_scalar": 20,
            "sliding_window": 18,
            "num_hidden_layers": 3,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 10.0,
        },
    ),
    "gemma3": TinyArchitecture(
        "Gemma3",
        {
            "head_dim": 24,
            "sliding_window": 18,
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention"] * 2 + ["full_attention", "sliding_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
        config="Gemma3Text",
    ),
    "phi3": TinyArchitecture("Phi3", {"sliding_window": 30}),
    "phi3-short-rope": TinyArchitecture(
        "Phi3",
        {
            "rope_parameters": {**_LONG_ROPE, "partial_rotary_factor": 0.75},
            "original_max_position_embeddings": 128,
        },
        max_model_len=128,
    ),
    "phi3-long-rope": TinyArchitecture(
        "Phi3",
        {
            "rope_parameters": {**_LONG_ROPE, "partial_rotary_factor": 0.75},
            "original_max_position_embeddings": 32,
        },
        prompt_lengths=(33, 50, 90),
    ),
    "olmo2": TinyArchitecture("Olmo2", {"num_attention_heads": 6, "num_key_value_heads": 3}),
    "smollm3": TinyArchitecture(
        "SmolLM3",
        {"num_hidden_layers": 4, "use_sliding_window": True, "sliding_window": 21},
    ),
    "granite": TinyArchitecture(
        "Granite",
        {
            "embedding_multiplier": 12.0,
            "attention_multiplier": 0.2,
            "residual_multiplier": 0.22,
            "logits_scaling": 4.0,
            "rms_norm_eps": 1e-2,
        },
    ),
    "llama-yarn": TinyArchitecture(
        "Llama",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10_000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ),
    "llama-dynamic": TinyArchitecture(
        "Llama",
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 4.0}},
    ),
    "llama-proportional": TinyArchitecture(
        "Llama",
        {
            "rope_parameters": {
                "rope_type": "proportional",
                "rope_theta": 10_000.0,
                "partial_rotary_factor": 0.5,
            }
        },
    ),
}


def make_model(tiny: TinyArchitecture, seed: int = 0) -> Any:
    """The transformers model, in float32. Matrices are drawn wide, so that the largest
    logit stands well clear of the next, and norms and biases are drawn at all."""
    import transformers

    config_class = getattr(transformers, f"{tiny.config or tiny.name}Config")
    config = config_class(**{**_SIZES, **tiny.changes})
    config._attn_implementation = "eager"
    model = getattr(transformers, f"{tiny.name}ForCausalLM")(config).float().eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            drawn = torch.randn(parameter.shape, generator=generator)
            if "norm" in name:
                # Gemma's are what is added to 1.
                parameter.copy_(0.2 * drawn + (0.0 if "Gemma" in tiny.name else 1.0))
            elif parameter.ndim == 1:
                parameter.copy_(0.5 * drawn)
            elif "embed" in name or "lm_head" in name:
                parameter.copy_(drawn)
            else:
                parameter.copy_(drawn * (1.5 * parameter.shape[-1] ** -0.5))
    return model


def save(model: Any, directory: Path) -> Path:
    model.save_pretrained(directory)
    return directory
