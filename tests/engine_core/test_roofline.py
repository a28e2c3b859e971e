"""Step times against figures worked out by hand, for Llama-3-8B's published shape."""

from __future__ import annotations

import dataclasses
import math
from typing import get_args

import pytest
import torch

from engine_core.device.roofline import GPUS, ModelCost, StepWork, step_seconds
from engine_core.model.config import LayerConfig, ModelConfig, RopeConfig
from engine_core.model.llama import LlamaForCausalLM
from pagewire.config import EngineConfig

CONFIG = ModelConfig(
    architecture="LlamaForCausalLM",
    hidden_size=4096,
    intermediate_size=14336,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    vocab_size=128_256,
    rms_norm_eps=1e-5,
    max_positions=8192,
    layers=(LayerConfig(RopeConfig()),) * 32,
    tie_embeddings=False,
    bos_token_id=None,
    eos_token_ids=(),
    dtype="bfloat16",
)
LAUNCHES_MS = 292 * 0.002


def cost() -> ModelCost:
    shapes = LlamaForCausalLM.tensor_shapes(CONFIG)
    return ModelCost.of(
        CONFIG, sum(map(math.prod, shapes.values())), torch.bfloat16, torch.bfloat16
    )


def test_a_models_cost() -> None:
    model = cost()
    assert model.weight_bytes == 2 * 8_030_261_248  # the 8.03B of its model card
    assert model.head_params == 525_336_576
    assert model.layer_params == 32 * 218_112_000 + 4096
    assert model.kv_bytes_per_token == 131_072  # 128 KiB


def test_tied_embeddings_are_counted_once() -> None:
    tied = dataclasses.replace(CONFIG, tie_embeddings=True)
    num_params = 8_030_261_248 - 525_336_576
    assert (
        ModelCost.of(tied, num_params, torch.bfloat16, torch.bfloat16).layer_params
        == cost().layer_params
    )


def test_a_decode_alone_is_bound_by_bytes() -> None:
    work = StepWork(num_tokens=1, num_sampled=1, num_context_tokens=1000, num_pairs=1000)
    weights_ms = 13_959_176_192 / 4.3e9
    kv_ms = 1001 * 131_072 / 4.3e9  # 1000 read, one written
    head_ms = (1_050_673_152 + 2 * 2 * 128_256) / 4.3e9
    expected_ms = weights_ms + kv_ms + head_ms + LAUNCHES_MS
    assert expected_ms == pytest.approx(4.105, abs=0.001)
    assert 1e3 * step_seconds(GPUS["h200"], cost(), work) == pytest.approx(expected_ms)


def test_a_long_prefill_is_bound_by_products() -> None:
    work = StepWork(8192, 1, 8192, 8192 * 8193 // 2)
    linear_ms = 2 * 6_979_588_096 * 8192 / 790e9
    attention_ms = 4 * 32 * 32 * 128 * 33_558_528 / 790e9
    head_ms = (1_050_673_152 + 2 * 2 * 128_256) / 4.3e9
    expected_ms = linear_ms + attention_ms + head_ms + LAUNCHES_MS
    assert expected_ms == pytest.approx(167.85, abs=0.01)
    assert 1e3 * step_seconds(GPUS["h200"], cost(), work) == pytest.approx(expected_ms)


def test_a_chunk_that_samples_nothing_needs_no_head() -> None:
    sampling, silent = (StepWork(512, n, 512, 512 * 513 // 2) for n in (1, 0))
    difference = step_seconds(GPUS["l4"], cost(), sampling) - step_seconds(
        GPUS["l4"], cost(), silent
    )
    assert difference == pytest.approx((1_050_673_152 + 2 * 2 * 128_256) / GPUS["l4"].bandwidth)


def test_copies_are_read_and_written() -> None:
    still, moving = (StepWork(1, 1, 64, 64, n) for n in (0, 16))
    difference = step_seconds(GPUS["a100"], cost(), moving) - step_seconds(
        GPUS["a100"], cost(), still
    )
    assert difference == pytest.approx(2 * 16 * 131_072 / GPUS["a100"].bandwidth)


def test_the_h200_is_what_was_measured() -> None:
    assert GPUS["h200"].bandwidth == pytest.approx(4.3e12)
    assert GPUS["h200"].flops == pytest.approx(790e12)


def test_every_gpu_can_be_asked_for() -> None:
    devices = get_args(EngineConfig.model_fields["device"].annotation)
    assert {name for name in devices if name.startswith("sim:")} == {f"sim:{gpu}" for gpu in GPUS}
