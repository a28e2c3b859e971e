"""The model configuration in a GGUF file's metadata.

It is read as a config.json would be: metadata keys stand for the keys of Hugging Face, so
that each architecture reads one set of fields, and complaints name the metadata.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from engine_core.model.fields import Fields
from engine_core.model.gguf_tensors import read_small_tensor, type_name
from engine_core.model.model_fields import read_model_fields
from engine_core.model.registry import find_gguf_architecture
from pagewire.errors import ModelLoadError

if TYPE_CHECKING:
    from engine_core.model.config import CheckpointDtype, ModelConfig
    from engine_core.model.layout import GgufDialect
    from pagewire.gguf_file import GgufFile

_KEYS = {
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.sliding_window": "sliding_window",
    "rope.freq_base": "rope_theta",
    "rope.dimension_count": "rotary_dim",
}
"""Of all architectures, below general.architecture."""
_ROPE_KEYS = {
    "rope.scaling.factor": "factor",
    "rope.scaling.original_context_length": "original_max_position_embeddings",
    "rope.scaling.yarn_beta_fast": "beta_fast",
    "rope.scaling.yarn_beta_slow": "beta_slow",
}
_EOS_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
_SAMPLING_KEYS = {
    "temp": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}
_PLAIN_TYPES: dict[str, CheckpointDtype] = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def read_gguf_config(file: GgufFile) -> ModelConfig:
    """Raises ModelLoadError naming the file and the metadata key at fault."""
    metadata = Fields(file.metadata, file.path)
    arch = _text(metadata, "general.architecture")
    architecture = find_gguf_architecture(
        arch,
        str(file.path),
        has_experts=bool(metadata.optional_integer(f"{arch}.expert_count")),
        has_window=bool(metadata.optional_integer(f"{arch}.attention.sliding_window")),
    )
    assert architecture.gguf is not None
    if (splits := metadata.optional_integer("split.count") or 0) > 1:
        raise ModelLoadError(
            f"{file.path}: is one of {splits} parts; merge them with 'llama-gguf-split --merge'"
        )
    if metadata.raw.get(f"{arch}.expert_shared_count"):
        raise metadata.unsupported(f"{arch}.expert_shared_count", "0")
    fields = _as_hugging_face(file, metadata, architecture.gguf)
    _check_head(fields, metadata, architecture.gguf)
    config = read_model_fields(
        fields,
        architecture,
        eos_token_ids=_eos_token_ids(metadata),
        dtype=_stored_dtype(file),
        default_sampling=_default_sampling(metadata),
    )
    # llama.cpp's converter has added it.
    return replace(config, norm_offset=0.0)


def _as_hugging_face(file: GgufFile, metadata: Fields, dialect: GgufDialect) -> Fields:
    arch, raw, names = dialect.architecture, dict(dialect.defaults), {}
    for gguf_key, key in {**_KEYS, **dialect.keys}.items():
        names[key] = f"{arch}.{gguf_key}"
        if names[key] in metadata.raw:
            raw[key] = metadata.raw[names[key]]
    # 0 is none.
    raw["sliding_window"] = raw.get("sliding_window") or None
    _read_pattern(raw, names, metadata, arch)
    scaling = _rope_scaling(file, metadata, arch, names)
    if scaling is not None:
        raw["rope_scaling"] = scaling
    if "rope_freqs.weight" in file.tensors:
        raw["rope_freqs"] = read_small_tensor(file, "rope_freqs.weight").tolist()
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise ModelLoadError(f"{file.path}: tensor token_embd.weight is missing")
    raw["vocab_size"] = embedding.shape[0]
    raw["tie_word_embeddings"] = "output.weight" not in file.tensors
    raw["attention_bias"] = "blk.0.attn_q.bias" in file.tensors
    raw["mlp_bias"] = "blk.0.ffn_gate.bias" in file.tensors
    bos_key = "tokenizer.ggml.bos_token_id"
    names |= {"bos_token_id": bos_key}
    raw["bos_token_id"] = metadata.raw.get(bos_key)
    return Fields(raw, file.path, names)


def _read_pattern(raw: dict[str, Any], names: dict[str, str], metadata: Fields, arch: str) -> None:
    """Which layers slide: every one but each n-th, or a flag for each."""
    key = f"{arch}.attention.sliding_window_pattern"
    value = metadata.raw.get(key)
    if isinstance(value, list):
        names["layer_types"] = key
        raw["layer_types"] = ["sliding_attention" if s else "full_attention" for s in value]
    elif value is not None:
        names["sliding_window_pattern"] = key
        raw["sliding_window_pattern"] = value


def _rope_scaling(
    file: GgufFile, metadata: Fields, arch: str, names: dict[str, str]
) -> dict[str, Any] | None:
    scaling: dict[str, Any] = {}
    for gguf_key, key in _ROPE_KEYS.items():
        names[f"rope_scaling.{key}"] = name = f"{arch}.{gguf_key}"
        if name in metadata.raw:
            scaling[key] = metadata.raw[name]
    factor_key = f"{arch}.rope.scaling.attn_factor"
    if "rope_factors_long.weight" in file.tensors and "rope_factors_short.weight" in file.tensors:
        scaling["rope_type"] = "longrope"
        for kind in ("long", "short"):
            values = read_small_tensor(file, f"rope_factors_{kind}.weight").tolist()
            scaling[f"{kind}_factor"] = values
        names["rope_scaling.attention_factor"] = factor_key
        scaling["attention_factor"] = metadata.raw.get(factor_key, 1.0)
        return scaling
    rope_type = metadata.raw.get(f"{arch}.rope.scaling.type", "none")
    if rope_type == "none":
        return None
    # Writers disagree on whether it is a part or the whole of yarn's attention factor.
    for key in (factor_key, f"{arch}.rope.scaling.yarn_attn_factor"):
        if metadata.raw.get(key, 1.0) != 1.0:
            raise metadata.unsupported(key, "1.0")
    if metadata.raw.get(f"{arch}.rope.scaling.yarn_log_multiplier", 0.0) != 0.0:
        raise metadata.unsupported(f"{arch}.rope.scaling.yarn_log_multiplier", "0.0")
    scaling["rope_type"] = rope_type
    return scaling


def _check_head(fields: Fields, metadata: Fields, dialect: GgufDialect) -> None:
    num_heads = max(fields.integer("num_attention_heads"), 1)
    width = fields.integer("hidden_size") // num_heads
    head_dim = fields.optional_integer("head_dim") or width
    value_dim = metadata.optional_integer(f"{dialect.architecture}.attention.value_length")
    rotary_dim = fields.optional_integer("rotary_dim") or head_dim
    if (value_dim or head_dim) != head_dim:
        raise ModelLoadError(
            f"{fields.path}: key length {head_dim} and value length {value_dim} differ, which is "
            "not supported"
        )
    # The rows of a head that is rotated in part are not where they should be in such a file.
    if dialect.interleaved and rotary_dim != head_dim:
        raise ModelLoadError(
            f"{fields.path}: key length {head_dim} and rope dimension count {rotary_dim} differ, "
            f"which is not supported of {dialect.architecture}"
        )


def _text(metadata: Fields, key: str) -> str:
    value = metadata.raw.get(key)
    if not isinstance(value, str):
        raise metadata.wrong(key, "a string")
    return value


def _eos_token_ids(metadata: Fields) -> tuple[int, ...]:
    ids = (metadata.optional_integer(f"tokenizer.ggml.{key}") for key in _EOS_KEYS)
    return tuple(dict.fromkeys(i for i in ids if i is not None))


def _stored_dtype(file: GgufFile) -> CheckpointDtype:
    """Of the first layer's q matrix, which every quantization recipe treats like the bulk."""
    for name in ("blk.0.attn_q.weight", "blk.0.attn_qkv.weight"):
        if (matrix := file.tensors.get(name)) is not None:
            return _PLAIN_TYPES.get(type_name(matrix.type_id), "quantized")
    return "quantized"


def _default_sampling(metadata: Fields) -> dict[str, float]:
    return {
        name: metadata.number(f"general.sampling.{key}")
        for key, name in _SAMPLING_KEYS.items()
        if f"general.sampling.{key}" in metadata.raw
    }
