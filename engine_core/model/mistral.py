"""Mistral 7B (arXiv:2310.06825) where its sliding window does not bind."""

from __future__ import annotations

from typing import ClassVar

from engine_core.model.decoder import DecoderModel


class MistralForCausalLM(DecoderModel):
    hf_defaults: ClassVar[dict[str, object]] = {
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-6,
        "sliding_window": 4096,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
