"""Tiny random checkpoints in Hugging Face layout and in GGUF, written without transformers.

Every matrix is drawn wide enough that the largest logit stands well clear of the
next: greedy tokens then do not hang on the last bit of a sum.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

if TYPE_CHECKING:
    from pathlib import Path

BOS_ID, EOS_ID = 0, 1
_NUM_SPECIAL = 2
_SPECIAL = ("<|bos|>", "<|eos|>")
CHAT_TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


@dataclass(frozen=True)
class TinySpec:
    """What a tiny model looks like. vocab_size is at least 258: bytes and two special ids."""

    architecture: str = "LlamaForCausalLM"
    hidden_size: int = 36
    intermediate_size: int = 50
    num_layers: int = 2
    num_heads: int = 9
    num_kv_heads: int = 3
    head_dim: int | None = None
    vocab_size: int = 300
    max_positions: int = 512
    rope_theta: float = 10_000.0
    rope: dict[str, Any] | None = None
    """Scaling, as config.json has it under rope_scaling."""
    rope_key: str = "rope_scaling"
    """Or rope_parameters, which holds rope_theta too."""
    tie_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    sliding_window: int | None = None
    eos_token_id: int | list[int] = EOS_ID
    dtype: torch.dtype = torch.float32
    seed: int = 0
    extra_config: dict[str, Any] = field(default_factory=dict)

    @property
    def real_head_dim(self) -> int:
        return self.head_dim or self.hidden_size // self.num_heads


LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
LINEAR_ROPE = {"type": "linear", "factor": 4.0}


def config_json(spec: TinySpec) -> dict[str, Any]:
    is_mistral = spec.architecture == "MistralForCausalLM"
    config: dict[str, Any] = {
        "architectures": [spec.architecture],
        "model_type": "mistral" if is_mistral else "llama",
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "vocab_size": spec.vocab_size,
        "max_position_embeddings": spec.max_positions,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "tie_word_embeddings": spec.tie_embeddings,
        "bos_token_id": BOS_ID,
        "eos_token_id": spec.eos_token_id,
        "torch_dtype": str(spec.dtype).removeprefix("torch."),
    }
    if spec.head_dim is not None:
        config["head_dim"] = spec.head_dim
    if is_mistral:
        config["sliding_window"] = spec.sliding_window
    else:
        config["attention_bias"] = spec.attention_bias
        config["mlp_bias"] = spec.mlp_bias
    if spec.rope_key == "rope_parameters":
        config["rope_parameters"] = {"rope_theta": spec.rope_theta, **(spec.rope or {})}
        config["rope_parameters"].setdefault("rope_type", "default")
    else:
        config["rope_theta"] = spec.rope_theta
        config["rope_scaling"] = spec.rope
    return {**config, **spec.extra_config}


def tiny_weights(spec: TinySpec) -> dict[str, torch.Tensor]:
    """Random tensors by Hugging Face name, in spec.dtype."""
    generator = torch.Generator().manual_seed(spec.seed)

    def draw(*shape: int, std: float) -> torch.Tensor:
        return (torch.randn(shape, generator=generator) * std).to(spec.dtype)

    def norm() -> torch.Tensor:
        return (1 + 0.2 * torch.randn(spec.hidden_size, generator=generator)).to(spec.dtype)

    hidden, inter = spec.hidden_size, spec.intermediate_size
    q_rows = spec.num_heads * spec.real_head_dim
    kv_rows = spec.num_kv_heads * spec.real_head_dim
    weights = {"model.embed_tokens.weight": draw(spec.vocab_size, hidden, std=1.0)}
    for i in range(spec.num_layers):
        prefix = f"model.layers.{i}"
        weights[f"{prefix}.input_layernorm.weight"] = norm()
        weights[f"{prefix}.post_attention_layernorm.weight"] = norm()
        matrices = {
            "self_attn.q_proj": (q_rows, hidden, spec.attention_bias),
            "self_attn.k_proj": (kv_rows, hidden, spec.attention_bias),
            "self_attn.v_proj": (kv_rows, hidden, spec.attention_bias),
            "self_attn.o_proj": (hidden, q_rows, spec.attention_bias),
            "mlp.gate_proj": (inter, hidden, spec.mlp_bias),
            "mlp.up_proj": (inter, hidden, spec.mlp_bias),
            "mlp.down_proj": (hidden, inter, spec.mlp_bias),
        }
        for name, (rows, columns, bias) in matrices.items():
            weights[f"{prefix}.{name}.weight"] = draw(rows, columns, std=1.5 * columns**-0.5)
            if bias:
                weights[f"{prefix}.{name}.bias"] = draw(rows, std=0.5)
    weights["model.norm.weight"] = norm()
    if not spec.tie_embeddings:
        weights["lm_head.weight"] = draw(spec.vocab_size, hidden, std=1.0)
    return weights


def write_hf(
    directory: Path,
    spec: TinySpec,
    *,
    extra_tensors: dict[str, torch.Tensor] | None = None,
    num_shards: int = 1,
) -> Path:
    """config.json, weights and a tokenizer in directory, which is made; returns it."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config_json(spec)))
    tensors = {**tiny_weights(spec), **(extra_tensors or {})}
    if num_shards == 1:
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    else:
        _write_shards(directory, tensors, num_shards)
    tiny_tokenizer(spec.vocab_size).save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "bos_token": _SPECIAL[BOS_ID],
                "eos_token": _SPECIAL[EOS_ID],
                "chat_template": CHAT_TEMPLATE,
            }
        )
    )
    return directory


def _write_shards(directory: Path, tensors: dict[str, torch.Tensor], num_shards: int) -> None:
    names = list(tensors)
    weight_map = {}
    for shard in range(num_shards):
        file = f"model-{shard + 1:05}-of-{num_shards:05}.safetensors"
        part = {name: tensors[name] for name in names[shard::num_shards]}
        save_file(part, directory / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(part, file))
    index = {"metadata": {}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


def tiny_tokenizer(vocab_size: int) -> Tokenizer:
    """Byte-level BPE without merges: ids 2 to 257 are bytes, the rest are never encoded to."""
    tokens = _tokens(vocab_size)
    tokenizer = Tokenizer(BPE({token: i for i, token in enumerate(tokens)}, []))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevelDecoder()
    tokenizer.add_special_tokens(list(_SPECIAL))
    return tokenizer


def _tokens(vocab_size: int) -> list[str]:
    alphabet = sorted(ByteLevel.alphabet())
    tokens = [*_SPECIAL, *alphabet]
    if vocab_size < len(tokens):
        raise ValueError(f"vocab_size is {vocab_size}, at least {len(tokens)} are needed")
    return tokens + [f"<unused{i}>" for i in range(vocab_size - len(tokens))]


def write_gguf(
    path: Path,
    spec: TinySpec,
    kind: str = "F32",
    *,
    kinds: dict[str, str] | None = None,
    rope_freqs: np.ndarray | None = None,
) -> Path:
    """The same model as write_hf, as llama.cpp's converter lays it out.

    kind is the gguf type of the matrices, kinds of those whose Hugging Face name has the
    key in it; vectors are F32 always. q and k rows
    are interleaved, and a tied head is left out.
    """
    import gguf
    from gguf.quants import quantize

    arch = "llama"
    writer = gguf.GGUFWriter(path, arch)
    writer.add_name(path.stem)
    writer.add_context_length(spec.max_positions)
    writer.add_embedding_length(spec.hidden_size)
    writer.add_block_count(spec.num_layers)
    writer.add_feed_forward_length(spec.intermediate_size)
    writer.add_head_count(spec.num_heads)
    writer.add_head_count_kv(spec.num_kv_heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(spec.rope_theta)
    writer.add_rope_dimension_count(spec.real_head_dim)
    if spec.head_dim is not None:
        writer.add_key_length(spec.head_dim)
        writer.add_value_length(spec.head_dim)
    if spec.rope is not None:
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(spec.rope["factor"])
    if rope_freqs is not None:
        writer.add_tensor("rope_freqs.weight", rope_freqs.astype(np.float32))
    _write_gguf_tokenizer(writer, spec)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, spec.num_layers)
    for hf_name, tensor in tiny_weights(spec).items():
        name = names.get_name(hf_name, try_suffixes=(".weight", ".bias"))
        assert name is not None, hf_name
        values = interleave(hf_name, tensor.float(), spec).numpy()
        if values.ndim == 1:
            writer.add_tensor(name, np.ascontiguousarray(values))
        else:
            named = [other for part, other in (kinds or {}).items() if part in hf_name]
            matrix_type = gguf.GGMLQuantizationType[named[0] if named else kind]
            writer.add_tensor(name, quantize(values, matrix_type), raw_dtype=matrix_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def interleave(hf_name: str, tensor: torch.Tensor, spec: TinySpec) -> torch.Tensor:
    """q and k rows in the order of neighbouring rotation pairs, as GGUF files hold them."""
    for part, heads in (("q_proj", spec.num_heads), ("k_proj", spec.num_kv_heads)):
        if part in hf_name:
            pairs = tensor.view(heads, 2, spec.real_head_dim // 2, *tensor.shape[1:])
            return pairs.transpose(1, 2).reshape(tensor.shape).contiguous()
    return tensor


def _write_gguf_tokenizer(writer: Any, spec: TinySpec) -> None:
    import gguf

    tokens = _tokens(spec.vocab_size)
    kinds = [gguf.TokenType.CONTROL] * _NUM_SPECIAL
    kinds += [gguf.TokenType.NORMAL] * (spec.vocab_size - _NUM_SPECIAL)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges([])
    writer.add_bos_token_id(BOS_ID)
    writer.add_eos_token_id(EOS_ID)
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHAT_TEMPLATE)
