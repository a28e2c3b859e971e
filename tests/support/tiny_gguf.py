"""The tiny models of tiny_architectures.py as llama.cpp's converter lays them out.

Names are those of the gguf package's tables; where transformers reads such a file, a test
compares (tests/parity/test_gguf_architectures.py).
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import gguf
import numpy as np
import torch
from gguf.quants import quantize
from safetensors.torch import load_file

from tests.support.tiny_architectures import save

if TYPE_CHECKING:
    from pathlib import Path

# What the converter calls "llama" or derives from it: RoPE pairs neighbours there.
_INTERLEAVED = {"llama", "smollm3", "granite"}
_NAMES = {
    "gemma3_text": "gemma3",
    "mistral": "llama",
    "mixtral": "llama",
    "qwen3_moe": "qwen3moe",
}
_EXPERT = re.compile(r"model\.layers\.(\d+)\..*experts\.(\d+)\.(\w+)\.weight")
_EXPERT_KINDS = {
    "w1": "gate",
    "w2": "down",
    "w3": "up",
    "gate_proj": "gate",
    "down_proj": "down",
    "up_proj": "up",
}


def architecture_of(model: Any) -> str:
    model_type = model.config.model_type
    return _NAMES.get(model_type, model_type)


def write_gguf(model: Any, path: Path, kind: str = "F32") -> Path:
    """kind is the gguf type of the matrices but routers; those and vectors are F32."""
    arch = architecture_of(model)
    writer = gguf.GGUFWriter(path, arch)
    _write_metadata(writer, model, arch)
    tensors = load_file(save(model, path.with_suffix(".hf")) / "model.safetensors")
    for name, tensor in _gguf_tensors(tensors, model, arch).items():
        values = np.ascontiguousarray(tensor.numpy())
        if values.ndim == 1 or "ffn_gate_inp" in name:
            writer.add_tensor(name, values)
        else:
            matrix_type = gguf.GGMLQuantizationType[kind]
            writer.add_tensor(name, quantize(values, matrix_type), raw_dtype=matrix_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _gguf_tensors(
    tensors: dict[str, torch.Tensor], model: Any, arch: str
) -> dict[str, torch.Tensor]:
    config = model.config
    (arch_id,) = (key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == arch)
    names = gguf.get_tensor_name_map(arch_id, config.num_hidden_layers)
    found: dict[str, torch.Tensor] = {}
    experts: dict[str, dict[int, torch.Tensor]] = {}
    for name, tensor in sorted(tensors.items()):
        if (match := _EXPERT.fullmatch(name)) is not None:
            stacked = f"blk.{match[1]}.ffn_{_EXPERT_KINDS[match[3]]}_exps.weight"
            experts.setdefault(stacked, {})[int(match[2])] = tensor
            continue
        gguf_name = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert gguf_name is not None, name
        if arch in _INTERLEAVED:
            tensor = _interleave(name, tensor, config)
        if arch.startswith("gemma") and name.endswith("norm.weight"):
            tensor = tensor + 1
        found[gguf_name] = tensor
    for name, parts in experts.items():
        found[name] = torch.stack([parts[number] for number in range(len(parts))])
    scaling = config.rope_parameters
    if "long_factor" in scaling:
        for length in ("long", "short"):
            values = torch.tensor(scaling[f"{length}_factor"], dtype=torch.float32)
            found[f"rope_factors_{length}.weight"] = values
    return found


def _interleave(name: str, tensor: torch.Tensor, config: Any) -> torch.Tensor:
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for part, num_heads in heads.items():
        if part in name:
            pairs = tensor.view(num_heads, 2, -1, *tensor.shape[1:])
            return pairs.transpose(1, 2).reshape(tensor.shape)
    return tensor


def _write_metadata(writer: Any, model: Any, arch: str) -> None:
    config = model.config
    head_dim = getattr(config, "head_dim", None) or (
        config.hidden_size // config.num_attention_heads
    )
    rope = config.rope_parameters
    rope = rope.get("full_attention", rope)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 1.0)))
    writer.add_vocab_size(config.vocab_size)
    writer.add_bos_token_id(config.bos_token_id)
    writer.add_eos_token_id(config.eos_token_id)
    if getattr(config, "head_dim", None) is not None:
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    if getattr(config, "sliding_window", None) is not None and arch != "smollm3":
        writer.add_sliding_window(config.sliding_window)
    if rope["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    if "original_max_position_embeddings" in rope:
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if rope["rope_type"] == "longrope":
        writer.add_rope_scaling_attn_factors(model.model.rotary_emb.attention_scaling)
    if arch.startswith("gemma"):
        for key in ("attn_logit_softcapping", "final_logit_softcapping"):
            if getattr(config, key) is not None:
                getattr(writer, f"add_{key}")(getattr(config, key))
    if getattr(config, "num_local_experts", None) is not None:
        writer.add_expert_count(config.num_local_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
    if getattr(config, "moe_intermediate_size", None) is not None:
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    if arch == "granite":
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_attention_scale(config.attention_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_logit_scale(config.logits_scaling)
