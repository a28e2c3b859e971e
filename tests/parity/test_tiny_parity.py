"""Tiny random models of every shape: the tokens and logits of transformers, however
the requests are batched, cut, cached or preempted."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.parity.harness import Engine, Loaded, assert_same_tokens, load, transformers_greedy
from tests.support.tiny_model import LINEAR_ROPE, LLAMA3_ROPE, TinySpec, write_gguf, write_hf

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

NUM_TOKENS = 64
MAX_LOGIT_DIFF = 1e-3

SPECS = {
    "llama-9-3": TinySpec(),
    "llama-5-1-tied": TinySpec(
        hidden_size=40, num_heads=5, num_kv_heads=1, tie_embeddings=True, seed=1
    ),
    "llama-3-3-wide-heads": TinySpec(
        hidden_size=48, num_heads=3, num_kv_heads=3, head_dim=24, num_layers=3, seed=2
    ),
    "llama-biases": TinySpec(
        hidden_size=64, num_heads=4, num_kv_heads=2, attention_bias=True, mlp_bias=True, seed=3
    ),
    "llama-llama3-rope": TinySpec(
        hidden_size=64, num_heads=4, num_kv_heads=2, rope=LLAMA3_ROPE, seed=4
    ),
    "llama-llama3-rope-parameters": TinySpec(
        hidden_size=64,
        num_heads=4,
        num_kv_heads=2,
        rope=LLAMA3_ROPE,
        rope_key="rope_parameters",
        rope_theta=50_000.0,
        seed=5,
    ),
    "llama-linear-rope": TinySpec(
        hidden_size=64, num_heads=4, num_kv_heads=4, rope=LINEAR_ROPE, seed=6
    ),
    "mistral-9-3": TinySpec(architecture="MistralForCausalLM", hidden_size=72, seed=7),
    "mistral-tied-window-unused": TinySpec(
        architecture="MistralForCausalLM",
        hidden_size=60,
        num_heads=5,
        num_kv_heads=1,
        head_dim=16,
        tie_embeddings=True,
        sliding_window=512,
        seed=8,
    ),
}


def prompts_of(spec: TinySpec) -> list[list[int]]:
    """Lengths on and around block edges, one of 200 tokens; two share a long prefix."""
    generator = torch.Generator().manual_seed(100 + spec.seed)
    lengths = (1, 2, 15, 16, 17, 33, 64, 200)
    prompts = [
        torch.randint(2, spec.vocab_size, (n,), generator=generator).tolist() for n in lengths
    ]
    return [*prompts, [*prompts[6][:50], 5, 6, 7]]


class Case:
    """A spec written to disk, and what transformers makes of it."""

    def __init__(self, spec: TinySpec, directory: Path) -> None:
        from transformers import AutoModelForCausalLM

        self.spec = spec
        self.directory = write_hf(directory, spec)
        self.model: Any = AutoModelForCausalLM.from_pretrained(
            self.directory, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        self.prompts = prompts_of(spec)
        self.expected = transformers_greedy(self.model, self.prompts, NUM_TOKENS)


@pytest.fixture(scope="session", params=SPECS)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case(SPECS[request.param], tmp_path_factory.mktemp(request.param) / "model")


@pytest.fixture(scope="session", params=["reference", "cpu"])
def loaded(request: pytest.FixtureRequest, case: Case) -> Loaded:
    return load(str(case.directory), request.param)


@pytest.fixture(scope="session")
def cpu_loaded(case: Case) -> Loaded:
    return load(str(case.directory), "cpu")


def test_logits_agree(loaded: Loaded, case: Case) -> None:
    for prompt in case.prompts:
        with torch.inference_mode():
            theirs = case.model(torch.tensor([prompt])).logits[0]
        difference = (loaded.logits(prompt) - theirs).abs().max().item()
        assert difference < MAX_LOGIT_DIFF, f"{len(prompt)} tokens: {difference}"


def test_batched_equals_transformers(loaded: Loaded, case: Case) -> None:
    engine = Engine(loaded)
    assert_same_tokens(engine.generate(case.prompts, NUM_TOKENS), case.expected)


def test_alone_equals_transformers(cpu_loaded: Loaded, case: Case) -> None:
    engine = Engine(cpu_loaded)
    some = (0, 5, 7)
    ours = [engine.generate([case.prompts[i]], NUM_TOKENS)[0] for i in some]
    assert_same_tokens(ours, [case.expected[i] for i in some])


def test_chunked_equals_transformers(loaded: Loaded, case: Case) -> None:
    engine = Engine(loaded, max_num_batched_tokens=23)
    assert_same_tokens(engine.generate(case.prompts, NUM_TOKENS), case.expected)


@pytest.mark.parametrize("block_size", [4, 16])
def test_prefix_cached_equals_transformers(cpu_loaded: Loaded, case: Case, block_size: int) -> None:
    engine = Engine(cpu_loaded, block_size=block_size, prefix_caching=True)
    assert_same_tokens(engine.generate(case.prompts, NUM_TOKENS), case.expected)
    hits_before = engine.kv_manager.num_hit_tokens
    assert_same_tokens(engine.generate(case.prompts, NUM_TOKENS), case.expected)
    assert engine.kv_manager.num_hit_tokens - hits_before > sum(map(len, case.prompts)) // 2


def test_preempted_equals_transformers(cpu_loaded: Loaded, case: Case) -> None:
    # The longest needs 200 + 63 tokens = 17 blocks; all together far more than 24.
    engine = Engine(cpu_loaded, num_blocks=25, max_num_batched_tokens=64)
    assert_same_tokens(engine.generate(case.prompts, NUM_TOKENS), case.expected)
    assert engine.core.stats().total_preemptions > 0


def test_preempted_with_prefix_cache_equals_transformers(loaded: Loaded, case: Case) -> None:
    engine = Engine(loaded, num_blocks=25, max_num_batched_tokens=64, prefix_caching=True)
    assert_same_tokens(engine.generate(case.prompts, NUM_TOKENS), case.expected)
    assert engine.core.stats().total_preemptions > 0


def test_four_requests_in_a_pool_of_sixteen_blocks(tmp_path: Path) -> None:
    """vllm-project/vllm#16832: output of a preempted request was lost or cut short."""
    spec = TinySpec()
    loaded = load(str(write_hf(tmp_path / "model", spec)), "cpu")
    generator = torch.Generator().manual_seed(3)
    prompts = torch.randint(2, spec.vocab_size, (4, 32), generator=generator).tolist()
    roomy = Engine(loaded)
    alone = [roomy.generate([prompt], 96)[0] for prompt in prompts]
    tight = Engine(loaded, num_blocks=17)
    assert_same_tokens(tight.generate(prompts, 96), alone)
    assert tight.core.stats().total_preemptions >= 1


GGUF_SPECS: Sequence[tuple[str, TinySpec]] = [
    ("F32", TinySpec(hidden_size=288, intermediate_size=96, num_layers=2, seed=20)),
    (
        "F32",
        TinySpec(
            hidden_size=64,
            intermediate_size=64,
            num_heads=4,
            num_kv_heads=2,
            head_dim=32,
            tie_embeddings=True,
            attention_bias=True,
            seed=21,
        ),
    ),
    (
        "F32",
        TinySpec(hidden_size=64, num_heads=4, num_kv_heads=2, rope=LINEAR_ROPE, seed=22),
    ),
]


@pytest.mark.parametrize(("kind", "spec"), GGUF_SPECS)
@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_gguf_equals_transformers_on_the_same_weights(
    tmp_path: Path, kind: str, spec: TinySpec, backend: str
) -> None:
    case = Case(spec, tmp_path / "hf")
    loaded = load(str(write_gguf(tmp_path / "model.gguf", spec, kind)), backend)
    ours = Engine(loaded).generate(case.prompts, NUM_TOKENS)
    assert_same_tokens(ours, case.expected)
