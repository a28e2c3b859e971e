"""A ModelConfig from fields by their Hugging Face keys."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from engine_core.model.config import ModelConfig, check_config
from engine_core.model.rope_fields import extended_context

if TYPE_CHECKING:
    from engine_core.model.config import CheckpointDtype
    from engine_core.model.decoder import DecoderModel
    from engine_core.model.fields import Fields
    from kernels.ops import Activation

_MOST_LAYERS = 10_000
"""None has a tenth of it; a damaged file may have any number, and each costs memory here."""
_ACTIVATIONS: dict[str, Activation] = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "clip_qkv": (None,),
    "parallel_attn": (None, False),
    "use_parallel_residual": (None, False),
    "alibi": (None, False),
    "attention_chunk_size": (None,),
    "attn_output_gate": (None, False),
    "n_shared_experts": (None, 0),
    "num_shared_experts": (None, 0),
    "shared_expert_intermediate_size": (None, 0),
    "n_group": (None, 0, 1),
    "scoring_func": (None, "softmax"),
}
"""Features of other architectures, and the values that mean that a model is without them."""


def read_model_fields(
    fields: Fields,
    architecture: type[DecoderModel],
    *,
    eos_token_ids: tuple[int, ...],
    dtype: CheckpointDtype,
    default_sampling: dict[str, float],
) -> ModelConfig:
    """Raises ModelLoadError naming the file and the key at fault."""
    _refuse_features(fields)
    if not 1 <= fields.integer("num_hidden_layers") <= _MOST_LAYERS:
        raise fields.wrong("num_hidden_layers", f"1 to {_MOST_LAYERS}")
    num_heads = fields.integer("num_attention_heads")
    hidden_size = fields.integer("hidden_size")
    num_kv_heads = fields.optional_integer("num_key_value_heads")
    head_dim = fields.optional_integer("head_dim")
    if head_dim is None:
        head_dim = hidden_size // max(num_heads, 1)
    layers = architecture.read_layers(fields, head_dim)
    ropes = [layer.rope for layer in layers if layer.rope is not None]
    values: dict[str, Any] = {
        "architecture": architecture.__name__,
        "hidden_size": hidden_size,
        "intermediate_size": fields.integer("intermediate_size"),
        "num_heads": num_heads,
        "num_kv_heads": num_heads if num_kv_heads is None else num_kv_heads,
        "head_dim": head_dim,
        "vocab_size": fields.integer("vocab_size"),
        "rms_norm_eps": fields.number("rms_norm_eps"),
        "max_positions": extended_context(ropes, fields.integer("max_position_embeddings")),
        "layers": layers,
        "tie_embeddings": fields.flag("tie_word_embeddings"),
        "bos_token_id": fields.optional_integer("bos_token_id"),
        "eos_token_ids": eos_token_ids,
        "dtype": dtype,
        "activation": _activation(fields),
        "default_sampling": default_sampling,
    }
    values |= architecture.read_differences(fields, head_dim)
    return check_config(ModelConfig(**values), str(fields.path))


def _activation(fields: Fields) -> Activation:
    key = "hidden_activation" if fields.raw.get("hidden_activation") else "hidden_act"
    name = fields.raw.get(key, "silu")
    if not isinstance(name, str) or name not in _ACTIVATIONS:
        raise fields.unknown(key, ", ".join(_ACTIVATIONS))
    return _ACTIVATIONS[name]


def _refuse_features(fields: Fields) -> None:
    """What would load but compute something else than the checkpoint means."""
    for key, neutral in _NEUTRAL.items():
        value = fields.raw.get(key)
        if value not in neutral:
            raise fields.unsupported(key, " or ".join(repr(known) for known in neutral))
