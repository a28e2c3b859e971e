"""The model configuration in a GGUF file's metadata."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from engine_core.model.config import CheckpointDtype, ModelConfig, RopeConfig, check_config
from engine_core.model.gguf_tensors import read_small_tensor, type_name
from pagewire.errors import ModelLoadError

if TYPE_CHECKING:
    from pagewire.gguf_file import GgufFile

T = TypeVar("T")

# llama.cpp's converter writes Llama and Mistral alike as "llama"; the mathematics is the same.
_ARCHITECTURES = {"llama": "LlamaForCausalLM"}

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
    reader = _Metadata(file)
    arch = reader.get("general.architecture", str)
    if arch not in _ARCHITECTURES:
        raise ModelLoadError(
            f"{file.path}: architecture {arch!r} is unknown; known in GGUF: "
            f"{', '.join(_ARCHITECTURES)}"
        )
    if reader.get(f"{arch}.expert_count", int, 0):
        raise ModelLoadError(f"{file.path}: mixtures of experts are not supported")
    if (splits := reader.get("split.count", int, 0)) > 1:
        raise ModelLoadError(
            f"{file.path}: is one of {splits} parts; merge them with 'llama-gguf-split --merge'"
        )
    hidden_size = reader.get(f"{arch}.embedding_length", int)
    num_heads = reader.get(f"{arch}.attention.head_count", int)
    head_dim = reader.get(f"{arch}.attention.key_length", int, hidden_size // max(num_heads, 1))
    value_dim = reader.get(f"{arch}.attention.value_length", int, head_dim)
    rotary_dim = reader.get(f"{arch}.rope.dimension_count", int, head_dim)
    if not head_dim == value_dim == rotary_dim:
        raise ModelLoadError(
            f"{file.path}: key length {head_dim}, value length {value_dim} and rope dimension "
            f"count {rotary_dim} differ, which is not supported"
        )
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise ModelLoadError(f"{file.path}: tensor token_embd.weight is missing")
    return check_config(
        ModelConfig(
            architecture=_ARCHITECTURES[arch],
            hidden_size=hidden_size,
            intermediate_size=reader.get(f"{arch}.feed_forward_length", int),
            num_layers=reader.get(f"{arch}.block_count", int),
            num_heads=num_heads,
            num_kv_heads=reader.get(f"{arch}.attention.head_count_kv", int, num_heads),
            head_dim=head_dim,
            vocab_size=embedding.shape[0],
            rms_norm_eps=reader.get(f"{arch}.attention.layer_norm_rms_epsilon", float),
            max_positions=reader.get(f"{arch}.context_length", int),
            rope=_rope(reader, arch),
            tie_embeddings="output.weight" not in file.tensors,
            attention_bias="blk.0.attn_q.bias" in file.tensors,
            mlp_bias="blk.0.ffn_gate.bias" in file.tensors,
            sliding_window=reader.get(f"{arch}.attention.sliding_window", int, 0) or None,
            bos_token_id=reader.optional_id("bos_token_id"),
            eos_token_ids=_eos_token_ids(reader),
            dtype=_stored_dtype(file),
            default_sampling=_default_sampling(reader),
        ),
        str(file.path),
    )


class _Metadata:
    def __init__(self, file: GgufFile) -> None:
        self.file = file

    def get(self, key: str, kind: type[T], default: T | None = None) -> T:
        value = self.file.metadata.get(key, default)
        if kind is float and isinstance(value, int):
            value = float(value)
        if not isinstance(value, kind):
            found = "is missing" if value is None else f"is {value!r}, expected {kind.__name__}"
            raise ModelLoadError(f"{self.file.path}: {key} {found}")
        return value

    def optional_id(self, name: str) -> int | None:
        key = f"tokenizer.ggml.{name}"
        return self.get(key, int) if key in self.file.metadata else None


def _rope(reader: _Metadata, arch: str) -> RopeConfig:
    theta = reader.get(f"{arch}.rope.freq_base", float, 10_000.0)
    scaling = reader.get(f"{arch}.rope.scaling.type", str, "none")
    divisors: tuple[float, ...] = ()
    if "rope_freqs.weight" in reader.file.tensors:
        divisors = tuple(read_small_tensor(reader.file, "rope_freqs.weight").tolist())
    if scaling == "linear":
        factor = reader.get(f"{arch}.rope.scaling.factor", float)
        return RopeConfig(theta, "linear", factor, freq_divisors=divisors)
    return RopeConfig(theta, "default" if scaling == "none" else scaling, freq_divisors=divisors)


def _eos_token_ids(reader: _Metadata) -> tuple[int, ...]:
    ids = (reader.optional_id(key) for key in _EOS_KEYS)
    return tuple(dict.fromkeys(i for i in ids if i is not None))


def _stored_dtype(file: GgufFile) -> CheckpointDtype:
    """Of the first layer's q matrix, which every quantization recipe treats like the bulk."""
    matrix = file.tensors.get("blk.0.attn_q.weight")
    return _PLAIN_TYPES.get(type_name(matrix.type_id), "quantized") if matrix else "quantized"


def _default_sampling(reader: _Metadata) -> dict[str, float]:
    return {
        name: reader.get(f"general.sampling.{key}", float)
        for key, name in _SAMPLING_KEYS.items()
        if f"general.sampling.{key}" in reader.file.metadata
    }
