"""The embedded SmolLM2 as transformers sees it: the reference of the parity tests."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from pagewire.config import EMBEDDED_MODEL
from pagewire.gguf_file import GgufFile
from pagewire.model_source import resolve_model

if TYPE_CHECKING:
    from pathlib import Path

NUM_LAYERS = 30


def embedded_gguf() -> Path:
    return resolve_model(EMBEDDED_MODEL).path


def transformers_model() -> Any:
    """A LlamaForCausalLM of SmolLM2's shape, with whatever weights it is born with."""
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM
    from transformers.initialization import no_init_weights

    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 100_000.0},
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
    )
    config._attn_implementation = "eager"
    with no_init_weights():
        model = LlamaForCausalLM(config).float().eval()
    model.generation_config = GenerationConfig(bos_token_id=1, eos_token_id=2, pad_token_id=2)
    return model


@cache
def load_with_transformers() -> Any:
    """SmolLM2 in float32: numbers by the gguf package, row order by transformers.

    transformers' own load_gguf_checkpoint takes half a minute for the same;
    tests/engine_core/test_gguf.py holds our reading against it on a small file.
    """
    from gguf import MODEL_ARCH, GGMLQuantizationType, dequantize, get_tensor_name_map
    from transformers.modeling_gguf_pytorch_utils import LlamaTensorProcessor

    model = transformers_model()
    processor = LlamaTensorProcessor({"num_attention_heads": 9, "num_key_value_heads": 3})
    names = get_tensor_name_map(MODEL_ARCH.LLAMA, NUM_LAYERS)
    file = GgufFile(embedded_gguf())
    with torch.no_grad():
        # Without the head, which is the embedding.
        for hf_name, parameter in model.model.named_parameters(prefix="model"):
            tensor = file.tensors[str(names.get_name(hf_name, try_suffixes=(".weight",)))]
            raw = np.frombuffer(file.bytes, np.uint8, offset=tensor.offset)
            kind = GGMLQuantizationType(tensor.type_id)
            values = _dequantize_front(raw, tensor.shape, kind, dequantize)
            parameter.copy_(torch.from_numpy(processor.process(values, tensor.name).weights))
    model.tie_weights()
    return model


def _dequantize_front(
    raw: np.ndarray, shape: tuple[int, ...], kind: Any, dequantize: Any
) -> np.ndarray:
    """The first tensor in raw [bytes]."""
    from gguf import GGML_QUANT_SIZES

    block, block_bytes = GGML_QUANT_SIZES[kind]
    size = int(np.prod(shape)) // block * block_bytes
    floats = dequantize(raw[:size].reshape(shape[0], -1), kind)
    return np.asarray(floats, np.float32).reshape(shape)


def export_safetensors(directory: Path) -> Path:
    """The same weights in Hugging Face layout, written by transformers; returns directory."""
    load_with_transformers().save_pretrained(directory)
    return directory
