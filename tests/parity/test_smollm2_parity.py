"""The embedded SmolLM2 in float32: 64 greedy tokens of 20 prompts equal transformers',
from GGUF and from safetensors, in whatever company the requests are computed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from tests.parity.harness import Engine, Loaded, assert_same_tokens, load, transformers_greedy
from tests.support.smollm2 import embedded_gguf, export_safetensors, load_with_transformers
from tokenizer_svc.loader import load_tokenizer

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

NUM_TOKENS = 64
MAX_LOGIT_DIFF = 1e-3

TEXTS = (
    "A lamp stood on",
    "The capital of France is",
    "def fibonacci(n: int) -> int:\n    ",
    "#include <stdio.h>\n\nint main(void) {\n    for (int i = 0; i < 10; i++) {\n",
    "SELECT name, COUNT(*) FROM orders WHERE created_at >= '2024-01-01'",
    '{"name": "pagewire", "version": 3, "tags": ["a", "b"], "nested": {"x": 1.5}}',
    "1, 1, 2, 3, 5, 8, 13, 21,",
    "17 * 23 = ",
    "3.14159265358979323846",
    "Der Zug nach Hamburg hat heute",
    "Il était une fois, dans un petit village,",
    "La lluvia cae sobre los tejados de la ciudad mientras",
    "今日はとても良い天気ですね。",
    "Привет, как дела?",
    "🎉🚀 Launch day! 👩‍💻",
    "a",
    "\n\n\n",
    "    indented\n\ttabs and  double  spaces",
    "<|im_start|>user\nWrite a haiku about the sea.<|im_end|>\n<|im_start|>assistant\n",
    (
        "In the beginning the river was only a thread of water between two stones, and nobody who "
        "passed there thought that it would one day carry ships. The shepherds drank from it, the "
        "children built dams of clay and moss, and every spring the melting snow tore the dams "
        "away again. Then a miller came from the south with a wheel on his cart. He looked at the "
        "slope, measured it with his eyes, and said to the oldest of the shepherds:"
    ),
)
# One of each sort for the modes that take longest: code, letters of many bytes, long.
FEW = (3, 14, 19)


@pytest.fixture(scope="session")
def prompts() -> list[list[int]]:
    tokenizer = load_tokenizer(embedded_gguf()).tokenizer
    encoded: list[list[int]] = [tokenizer.encode(text).ids for text in TEXTS]
    assert min(map(len, encoded)) == 1
    assert max(map(len, encoded)) > 80
    return encoded


@pytest.fixture(scope="session")
def expected(prompts: list[list[int]]) -> list[list[int]]:
    return transformers_greedy(load_with_transformers(), prompts, NUM_TOKENS)


@pytest.fixture(scope="session")
def from_gguf() -> Loaded:
    return load(str(embedded_gguf()), "cpu")


def test_gguf_tokens_equal_transformers(
    from_gguf: Loaded, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    assert_same_tokens(Engine(from_gguf).generate(prompts, NUM_TOKENS), expected)


def test_safetensors_tokens_equal_transformers(
    tmp_path: Path, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    loaded = load(str(export_safetensors(tmp_path / "smollm2")), "cpu")
    ours = Engine(loaded).generate([prompts[i] for i in FEW], NUM_TOKENS)
    assert_same_tokens(ours, [expected[i] for i in FEW])


def test_logits_agree(
    from_gguf: Loaded, prompts: list[list[int]], record_property: pytest.RecordProperty
) -> None:
    worst = 0.0
    for index in FEW:
        with torch.inference_mode():
            theirs = load_with_transformers()(torch.tensor([prompts[index]])).logits[0]
        worst = max(worst, (from_gguf.logits(prompts[index]) - theirs).abs().max().item())
    record_property("max_abs_logit_difference", worst)
    print(f"largest difference of a logit: {worst:.2e}")
    assert worst < MAX_LOGIT_DIFF


def test_alone(from_gguf: Loaded, prompts: list[list[int]], expected: list[list[int]]) -> None:
    engine = Engine(from_gguf)
    for index in FEW:
        ours = engine.generate([prompts[index]], NUM_TOKENS)
        assert_same_tokens(ours, [expected[index]])


def test_chunked(from_gguf: Loaded, prompts: list[list[int]], expected: list[list[int]]) -> None:
    engine = Engine(from_gguf, max_num_batched_tokens=7)
    ours = engine.generate([prompts[i] for i in FEW], NUM_TOKENS)
    assert_same_tokens(ours, [expected[i] for i in FEW])


def test_prefix_cached(
    from_gguf: Loaded, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    engine = Engine(from_gguf, prefix_caching=True)
    few = [prompts[i] for i in FEW]
    for _ in range(2):
        assert_same_tokens(engine.generate(few, NUM_TOKENS), [expected[i] for i in FEW])
    assert engine.kv_manager.num_hit_tokens > 80


def test_preempted(from_gguf: Loaded, prompts: list[list[int]], expected: list[list[int]]) -> None:
    # The longest prompt takes 11 blocks to its end.
    engine = Engine(from_gguf, num_blocks=15)
    ours = engine.generate([prompts[i] for i in FEW], NUM_TOKENS)
    assert_same_tokens(ours, [expected[i] for i in FEW])
    assert engine.core.stats().total_preemptions > 0
