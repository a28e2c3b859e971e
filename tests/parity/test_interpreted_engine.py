"""A whole engine on the CUDA kernels, interpreted on the CPU, gives the reference's tokens.

Run by tests/kernels/test_triton_runs.py, in a process of its own.
"""

from __future__ import annotations

import dataclasses
import os
from typing import TYPE_CHECKING

import pytest
import torch
from msgspec.structs import replace

from engine_core.device.cpu import CpuDevice
from engine_core.model.loader import load_model, open_model
from kernels.reference.ops import ReferenceOps
from pagewire.model_source import resolve_model
from pagewire.types import SamplingParams
from tests.parity.harness import Engine, Loaded, assert_same_tokens
from tests.parity.logprobs import TOLERANCE, ask
from tests.support.quantized_checkpoints import gptq_tensors, round_to_codes, write_quantized
from tests.support.tiny_model import TinySpec, write_hf

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1; run by test_triton_runs.py", allow_module_level=True)

from kernels.cuda.ops import CudaOps

if TYPE_CHECKING:
    from pathlib import Path

    from engine_core.model.quantization import Quantization
    from kernels.ops import Ops

pytestmark = [pytest.mark.interpreter, pytest.mark.timeout(600)]

MAX_MODEL_LEN = 64


def load(path: Path, ops: Ops, quantization: Quantization = "none") -> Loaded:
    device = CpuDevice("1GiB", 1)
    opened = open_model(resolve_model(str(path)))
    model = load_model(
        opened,
        ops,
        device.torch_device,
        torch.float32,
        MAX_MODEL_LEN,
        lambda done, total: None,
        quantization,
    )
    return Loaded(model, opened.config, ops, device, MAX_MODEL_LEN)


def prompts() -> list[list[int]]:
    """Twelve, of 1 to 13 tokens; some begin alike, so that blocks are shared."""
    generator = torch.Generator().manual_seed(11)
    drawn: list[int] = torch.randint(2, 300, (300,), generator=generator).tolist()
    alike = [drawn[:8] + drawn[i : i + 2] for i in (60, 70, 80)]
    lengths = (1, 2, 3, 4, 5, 7, 9, 11, 13)
    return alike + [drawn[100 + i : 100 + i + n] for i, n in enumerate(lengths)]


def test_an_engine_gives_the_tokens_of_the_reference(tmp_path: Path) -> None:
    """Prompts in chunks beside decodes, shared blocks, and too few blocks for all at once."""
    spec = TinySpec(hidden_size=32, num_heads=4, num_kv_heads=2, max_positions=MAX_MODEL_LEN)
    path = write_hf(tmp_path / "model", spec)
    ours, reference = load(path, CudaOps(num_sms=4)), load(path, ReferenceOps())
    sampling = SamplingParams(3, temperature=0.0, ignore_eos=True)
    answers = []
    for loaded in (ours, reference):
        engine = Engine(
            loaded,
            num_blocks=14,
            block_size=4,
            max_num_seqs=8,
            max_num_batched_tokens=16,
            prefix_caching=True,
        )
        answers.append(engine.generate(prompts(), 3, sampling))
    assert all(len(ids) == 3 for ids in answers[0])
    assert_same_tokens(*answers)


def test_an_engine_over_int8_gives_the_tokens_of_the_reference(tmp_path: Path) -> None:
    """Prompts in chunks beside decodes, and blocks that are shared."""
    spec = TinySpec(
        hidden_size=32, num_heads=4, num_kv_heads=2, num_layers=1, max_positions=MAX_MODEL_LEN
    )
    path = write_hf(tmp_path / "model", spec)
    asked = [*prompts()[:3], prompts()[-1]]
    answers = []
    for ops in (CudaOps(num_sms=4), ReferenceOps()):
        loaded = dataclasses.replace(load(path, ops), kv_dtype=torch.int8)
        engine = Engine(
            loaded, num_blocks=30, block_size=4, max_num_batched_tokens=16, prefix_caching=True
        )
        answers.append(engine.generate(asked, 2))
        assert engine.kv_manager.num_hit_tokens > 0
    assert_same_tokens(*answers)


@pytest.mark.parametrize("act_order", [False, True])
def test_a_checkpoints_codes_reach_the_kernels(tmp_path: Path, act_order: bool) -> None:
    spec = TinySpec(hidden_size=64, intermediate_size=64, num_heads=4, num_kv_heads=2, num_layers=1)

    def encode(module: str, weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        rounded = round_to_codes(weight, 4, 32, symmetric=False, act_order=act_order)
        return gptq_tensors(module, rounded, 4, less_one=True), rounded.dense()

    config = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": act_order}
    coded, dense = write_quantized(tmp_path, spec, config, encode)
    ours = load(coded, CudaOps(num_sms=4), "packed")
    assert ours.model.quantized_formats == {"gptq int4"}
    prompt = prompts()[-1]
    wanted = load(dense, ReferenceOps()).logits(prompt)
    assert torch.allclose(ours.logits(prompt), wanted, atol=1e-3)


def test_penalties_biases_and_logprobs_are_the_reference_s(tmp_path: Path) -> None:
    spec = TinySpec(
        hidden_size=32, num_heads=4, num_kv_heads=2, num_layers=1, max_positions=MAX_MODEL_LEN
    )
    path = write_hf(tmp_path / "model", spec)
    plain = SamplingParams(4, temperature=0.0, ignore_eos=True)
    penalized = replace(plain, repetition_penalty=1.5, frequency_penalty=0.7, logprobs=0)
    biased = replace(plain, logit_bias=((7, 3.0), (9, -1.0)), presence_penalty=1.5, logprobs=3)
    asked = list(zip(prompts()[:3], (penalized, biased, plain), strict=True))
    told = [
        ask(Engine(load(path, ops), num_blocks=40, block_size=4), asked)
        for ops in (CudaOps(num_sms=4), ReferenceOps())
    ]
    for ours, theirs in zip(*told, strict=True):
        assert ours.ids == theirs.ids
        assert len(ours.output) == len(theirs.output) == (0 if ours.sampling is plain else 4)
        for mine, other in zip(ours.output, theirs.output, strict=True):
            assert (mine.rank, mine.top_ids) == (other.rank, other.top_ids)
            assert mine.logprob == pytest.approx(other.logprob, abs=TOLERANCE)
            assert mine.top_logprobs == pytest.approx(other.top_logprobs, abs=TOLERANCE)
