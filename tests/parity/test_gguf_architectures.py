"""GGUF files of every architecture: what transformers reads of them, and its logits."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from engine_core.model.gguf_checkpoint import GgufCheckpoint
from engine_core.model.loader import open_model
from engine_core.model.registry import ARCHITECTURES as SERVED
from pagewire.model_source import resolve_model
from tests.parity.harness import Engine, assert_same_tokens, load, transformers_greedy
from tests.support.tiny_architectures import ARCHITECTURES, TinyArchitecture, make_model
from tests.support.tiny_gguf import architecture_of, write_gguf

if TYPE_CHECKING:
    from pathlib import Path

NUM_TOKENS = 8
MAX_LOGIT_DIFF = 1e-3

# What GGUF metadata cannot say is as llama.cpp takes it for granted.
CASES = {
    "llama": TinyArchitecture("Llama", {"attention_bias": True}),
    "llama-yarn": ARCHITECTURES["llama-yarn"],
    "mistral": ARCHITECTURES["mistral-window"],
    "mixtral": ARCHITECTURES["mixtral"],
    "qwen2": ARCHITECTURES["qwen2"],
    "qwen3": ARCHITECTURES["qwen3"],
    "qwen3-moe": ARCHITECTURES["qwen3-moe"],
    "gemma2": replace(
        ARCHITECTURES["gemma2"],
        changes={**ARCHITECTURES["gemma2"].changes, "query_pre_attn_scalar": 24},
    ),
    "gemma3": replace(
        ARCHITECTURES["gemma3"],
        changes={
            **ARCHITECTURES["gemma3"].changes,
            "query_pre_attn_scalar": 24,
            "num_hidden_layers": 6,
            "layer_types": None,
        },
    ),
    "phi3": ARCHITECTURES["phi3-long-rope"],
    "olmo2": ARCHITECTURES["olmo2"],
    "smollm3": replace(
        ARCHITECTURES["smollm3"],
        changes={"num_hidden_layers": 4, "tie_word_embeddings": True},
    ),
    "granite": ARCHITECTURES["granite"],
}
READ_BY_TRANSFORMERS = ("llama", "qwen2", "qwen3", "qwen3-moe", "gemma2", "gemma3", "phi3")


@pytest.fixture(scope="module")
def models() -> dict[str, Any]:
    return {name: make_model(tiny, seed=3) for name, tiny in CASES.items()}


def test_every_architecture_is_here() -> None:
    written = {name for name, cls in SERVED.items() if cls.gguf is not None}
    assert {f"{tiny.name}ForCausalLM" for tiny in CASES.values()} == written


@pytest.mark.parametrize("name", CASES)
def test_equals_transformers_on_the_same_weights(
    tmp_path: Path, models: dict[str, Any], name: str
) -> None:
    model, tiny = models[name], CASES[name]
    loaded = load(str(write_gguf(model, tmp_path / "model.gguf")), "reference", tiny.max_model_len)
    assert loaded.config.architecture == f"{tiny.name}ForCausalLM"
    for prompt in tiny.prompts:
        with torch.inference_mode():
            theirs = model(torch.tensor([prompt])).logits[0]
        difference = (loaded.logits(prompt) - theirs).abs().max().item()
        assert difference < MAX_LOGIT_DIFF, f"{len(prompt)} tokens: {difference}"
    prompts = tiny.prompts[1:]
    ours = Engine(loaded).generate(prompts, NUM_TOKENS)
    assert_same_tokens(ours, transformers_greedy(model, prompts, NUM_TOKENS))


@pytest.mark.parametrize("name", READ_BY_TRANSFORMERS)
def test_weights_equal_what_transformers_reads(
    tmp_path: Path, models: dict[str, Any], name: str
) -> None:
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    model = models[name]
    path = write_gguf(model, tmp_path / "model.gguf", "F16")
    theirs = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)["tensors"]
    opened = open_model(resolve_model(str(path)))
    assert isinstance(opened.checkpoint, GgufCheckpoint)
    offset = 1 if architecture_of(model).startswith("gemma") else 0
    seen = 0
    for their_name, tensor in theirs.items():
        for our_name, part in split_experts(their_name, tensor.float()):
            ours = torch.empty(part.shape)
            opened.checkpoint.read_into(our_name, ours)
            # Theirs are less 1 already, rounded once more.
            tolerance = 1e-6 if offset and "norm" in our_name else 0
            expected = part + offset if "norm" in our_name else part
            torch.testing.assert_close(ours, expected, rtol=0, atol=tolerance, msg=our_name)
            seen += 1
    assert seen == len(opened.checkpoint.shapes())


def split_experts(name: str, tensor: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    """transformers' stacked experts by the names in checkpoints."""
    if "experts." not in name:
        return [(name, tensor)]
    prefix, _, kind = name.rpartition(".")
    parts = []
    for number, matrix in enumerate(tensor):
        if kind == "down_proj":
            parts.append((f"{prefix}.{number}.down_proj.weight", matrix))
            continue
        gate, up = matrix.chunk(2)
        parts.append((f"{prefix}.{number}.gate_proj.weight", gate))
        parts.append((f"{prefix}.{number}.up_proj.weight", up))
    return parts
