"""Llama 2 and 3, and the many models that are Llama under another name (SmolLM2)."""

from __future__ import annotations

from typing import ClassVar

from engine_core.model.decoder import DecoderModel


class LlamaForCausalLM(DecoderModel):
    hf_defaults: ClassVar[dict[str, object]] = {
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
