"""Every architecture on a real device, in graphs and with overlap, against transformers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from pagewire.types import SamplingParams
from scripts.gpu_check.engine import Engine
from scripts.gpu_check.measure import Bench
from tests.support.tiny_architectures import ARCHITECTURES, make_model, save

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available(), reason="NO CUDA DEVICE: models not run on hardware"
    ),
]
_OUTPUT = 24


@pytest.mark.parametrize("codes", ["fp8", "int8"])
def test_tokens_over_8_bit_caches_are_nearly_those_of_transformers(
    codes: str, tmp_path: Path
) -> None:
    """What rounding costs a tiny random model is a token here and there."""
    tiny = next(iter(ARCHITECTURES.values()))
    model = make_model(tiny)
    engine = Engine(
        save(model, tmp_path / "model"),
        Bench("cuda", tiny=False),
        dtype="float32",
        kv_cache_dtype=codes,
        max_num_seqs=8,
        max_num_batched_tokens=64,
        max_model_len=tiny.max_model_len,
        kv_cache_memory="64MiB",
    )
    sampling = SamplingParams(_OUTPUT, temperature=0.0, ignore_eos=True)
    answers = [(prompt, engine.add(prompt, sampling)) for prompt in tiny.prompts]
    engine.run()
    likeliest = 0
    for prompt, answer in answers:
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + answer.ids])).logits[0]
        wanted = logits[len(prompt) - 1 : -1].argmax(dim=1)
        likeliest += int((wanted == torch.tensor(answer.ids)).sum())
    assert likeliest >= 0.8 * _OUTPUT * len(answers)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_greedy_tokens_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    tiny = ARCHITECTURES[name]
    model = make_model(tiny)
    engine = Engine(
        save(model, tmp_path / "model"),
        Bench("cuda", tiny=False),
        dtype="float32",
        max_num_seqs=8,
        max_num_batched_tokens=64,
        max_model_len=tiny.max_model_len,
        kv_cache_memory="64MiB",
    )
    sampling = SamplingParams(_OUTPUT, temperature=0.0, ignore_eos=True)
    answers = [(prompt, engine.add(prompt, sampling)) for prompt in tiny.prompts]
    engine.run()
    for prompt, answer in answers:
        assert len(answer.ids) == _OUTPUT
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + answer.ids])).logits[0]
        assert logits[len(prompt) - 1 : -1].argmax(dim=1).tolist() == answer.ids
