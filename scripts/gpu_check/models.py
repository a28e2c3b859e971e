"""Random weights of two models' shapes, written once for all sections by transformers."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from pathlib import Path

    from scripts.gpu_check.measure import Bench

_LLAMA = {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "vocab_size": 128_256,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {
        "rope_type": "llama3",
        "rope_theta": 500_000.0,
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}
_QWEN = {
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "vocab_size": 151_936,
    "max_position_embeddings": 32_768,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
}
_TINY = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 300,
    "max_position_embeddings": 1024,
}


@dataclass(frozen=True, slots=True)
class Shape:
    name: str
    config_class: str
    """In transformers."""
    fields: dict[str, Any]


LLAMA = Shape("Llama-3.2-1B", "LlamaConfig", _LLAMA)
QWEN = Shape("Qwen2.5-0.5B", "Qwen2Config", _QWEN)


def checkpoint(shape: Shape, work: Path, bench: Bench) -> Path:
    """A directory in Hugging Face layout, in bfloat16, made by the first who asks for it."""
    directory = work / f"{shape.name}{'-tiny' if bench.tiny else ''}"
    if directory.exists():
        return directory
    import transformers

    fields = {**shape.fields, **(_TINY if bench.tiny else {})}
    config = getattr(transformers, shape.config_class)(
        tie_word_embeddings=True, bos_token_id=0, eos_token_id=1, **fields
    )
    with torch.device(bench.device):
        auto: Any = transformers.AutoModelForCausalLM
        model = auto.from_config(config, dtype=torch.bfloat16)
    _draw(model, bench)
    # A section that is stopped on the way leaves nothing that looks finished.
    unfinished = directory.with_name(directory.name + ".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    model.save_pretrained(unfinished)
    return unfinished.rename(directory)


@torch.no_grad()
def _draw(model: torch.nn.Module, bench: Bench) -> None:
    """Wide enough that attention looks at few tokens, and that the largest logit stands clear
    of the next: initialized as for training, all tokens would look alike."""
    generator = torch.Generator(bench.device).manual_seed(0)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator, device=bench.device)
        if "norm" in name:
            noise = 1 + 0.2 * noise
        elif "embed_tokens" not in name:
            noise *= 0.5 if parameter.dim() == 1 else 1.5 * parameter.shape[1] ** -0.5
        parameter.copy_(noise)


def reference(directory: Path, bench: Bench, dtype: torch.dtype, attention: str = "eager") -> Any:
    """transformers' own, on the device."""
    import transformers

    auto: Any = transformers.AutoModelForCausalLM
    model = auto.from_pretrained(
        directory, dtype=dtype, attn_implementation=attention, local_files_only=True
    )
    return model.to(bench.device).eval()


def prompts(num: int, length: int, vocab_size: int, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2, vocab_size, (num, length), generator=generator).tolist()
