"""Tiny models whose matrices are codes, loaded in all ways and held against transformers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from engine_core.device.cpu import CpuDevice
from engine_core.model.loader import load_model, open_model
from engine_core.model.quantized.codes import IntegerCodes
from pagewire.model_source import resolve_model
from tests.parity.harness import Engine, Loaded, assert_same_tokens, transformers_greedy
from tests.support.cpu_kernels import best_cpu_ops
from tests.support.tiny_model import TinySpec

if TYPE_CHECKING:
    from pathlib import Path

    from engine_core.model.quantization import Quantization
    from kernels.ops import Ops

# Groups of 128 divide all widths; q, k and v rows are of 16.
SPEC = TinySpec(hidden_size=256, intermediate_size=384, num_heads=4, num_kv_heads=2)
PROMPTS = [[5, 77, 130, 2, 99, 18, 201, 64, 33, 250, 7, 7, 41], [9, 3, 250]]
NUM_TOKENS = 24
LEAST_COSINE = 0.99
"""As test_quantization has it for codes that meet 8-bit activations."""


def load(path: Path, quantization: Quantization, ops: Ops | None = None) -> Loaded:
    ops = ops or best_cpu_ops()
    device = CpuDevice("64MiB", 1)
    opened = open_model(resolve_model(str(path)))
    model = load_model(
        opened, ops, device.torch_device, torch.float32, 128, lambda *_: None, quantization
    )
    return Loaded(model, opened.config, ops, device, 128)


def load_transformers(path: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager"
    ).eval()


def matrices_of(path: Path) -> dict[str, torch.Tensor]:
    """Of all tensors, as they are read."""
    checkpoint = open_model(resolve_model(str(path))).checkpoint
    found = {}
    for name, shape in checkpoint.shapes().items():
        found[name] = torch.empty(shape)
        checkpoint.read_into(name, found[name])
    return found


def codes_of(path: Path) -> dict[str, IntegerCodes]:
    checkpoint = open_model(resolve_model(str(path))).checkpoint
    found = {}
    for name in checkpoint.shapes():
        if name.endswith("_proj.weight"):
            codes = checkpoint.read_quantized(name, torch.device("cpu"))
            assert isinstance(codes, IntegerCodes)
            found[name] = codes
    assert len(found) == 7 * SPEC.num_layers
    return found


def assert_same_weights(coded: Path, dense: Path) -> None:
    ours, meant = matrices_of(coded), matrices_of(dense)
    assert ours.keys() == meant.keys()
    for name, matrix in ours.items():
        assert torch.equal(matrix, meant[name]), name


def assert_same_model(coded: Path, dense: Path) -> None:
    """Weights bit for bit, then transformers' logits and tokens."""
    assert_same_weights(coded, dense)
    reference = load_transformers(dense)
    loaded = load(coded, "none")
    with torch.inference_mode():
        wanted = reference(torch.tensor([PROMPTS[0]])).logits[0]
    assert torch.allclose(loaded.logits(PROMPTS[0]), wanted, atol=1e-3, rtol=0)
    tokens = Engine(loaded).generate(PROMPTS, NUM_TOKENS)
    assert_same_tokens(tokens, transformers_greedy(reference, PROMPTS, NUM_TOKENS))


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    cosines = torch.cosine_similarity(actual, expected, dim=-1)
    assert float(cosines.min()) > LEAST_COSINE, cosines
