"""SmolLM3: Llama where every fourth layer has no positions (NoPE, arXiv:2501.18795)."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from engine_core.model.config import LayerConfig
from engine_core.model.layer_windows import read_layer_types, windows_by_type
from engine_core.model.layout import GgufDialect
from engine_core.model.llama import LlamaForCausalLM
from engine_core.model.rope_fields import read_rope

if TYPE_CHECKING:
    from engine_core.model.fields import Fields


class SmolLM3ForCausalLM(LlamaForCausalLM):
    hf_defaults: ClassVar[dict[str, object]] = {
        "vocab_size": 128256,
        "hidden_size": 2048,
        "intermediate_size": 11008,
        "num_hidden_layers": 36,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "rope_theta": 2_000_000.0,
        "bos_token_id": 128000,
        "eos_token_id": 128001,
        "tie_word_embeddings": True,
        "no_rope_layer_interval": 4,
    }
    gguf = GgufDialect("smollm3", defaults={"no_rope_layer_interval": 4}, interleaved=True)

    @classmethod
    def read_layers(cls, fields: Fields, head_dim: int) -> tuple[LayerConfig, ...]:
        num_layers = fields.integer("num_hidden_layers")
        if fields.raw.get("no_rope_layers") is not None:
            # 1 has positions, in spite of the name.
            rotates = fields.integers("no_rope_layers")
            if len(rotates) < num_layers or any(value not in (0, 1) for value in rotates):
                raise fields.wrong("no_rope_layers", "0 or 1 for each of num_hidden_layers")
        else:
            interval = fields.integer("no_rope_layer_interval")
            if interval < 1:
                raise fields.wrong("no_rope_layer_interval", "at least 1")
            rotates = [int((index + 1) % interval != 0) for index in range(num_layers)]
        windows: list[int | None] = [None] * num_layers
        if fields.flag("use_sliding_window"):
            default = [
                "full_attention" if rotates[index] else "sliding_attention"
                for index in range(num_layers)
            ]
            windows = windows_by_type(fields, read_layer_types(fields, default))
        rope = read_rope(fields, head_dim)
        return tuple(
            LayerConfig(rope if rotates[index] else None, windows[index])
            for index in range(num_layers)
        )
