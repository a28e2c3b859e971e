"""Every architecture and RoPE variant: the logits and tokens of transformers, whole, cut,
cached, preempted and in company, from checkpoints that transformers has saved."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from engine_core.model.registry import ARCHITECTURES as SERVED
from tests.parity.harness import Engine, Loaded, assert_same_tokens, load
from tests.support.tiny_architectures import ARCHITECTURES, TinyArchitecture, make_model, save

if TYPE_CHECKING:
    from pathlib import Path

NUM_TOKENS = 16
MAX_LOGIT_DIFF = 1e-3


class Case:
    def __init__(self, tiny: TinyArchitecture, directory: Path) -> None:
        self.tiny = tiny
        self.model = make_model(tiny)
        self.directory = save(self.model, directory)
        self.prompts = tiny.prompts
        self.expected = [greedy(self.model, prompt) for prompt in self.prompts]


def greedy(model: Any, prompt: list[int]) -> list[int]:
    """One at a time: longrope looks at the longest of a batch."""
    model.generation_config.eos_token_id = None
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=NUM_TOKENS,
            pad_token_id=0,
        )
    tokens: list[int] = out[0, len(prompt) :].tolist()
    assert len(tokens) == NUM_TOKENS
    return tokens


@pytest.fixture(scope="module", params=ARCHITECTURES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    tiny = ARCHITECTURES[request.param]
    return Case(tiny, tmp_path_factory.mktemp("architecture") / request.param)


@pytest.fixture(scope="module", params=["reference", "cpu"])
def loaded(request: pytest.FixtureRequest, case: Case) -> Loaded:
    return load(str(case.directory), request.param, case.tiny.max_model_len)


@pytest.fixture(scope="module")
def cpu_loaded(case: Case) -> Loaded:
    return load(str(case.directory), "cpu", case.tiny.max_model_len)


def test_all_architectures_are_here() -> None:
    # Llama alone is in test_tiny_parity.py too.
    tested = {f"{tiny.name}ForCausalLM" for tiny in ARCHITECTURES.values()}
    assert tested | {"Gemma3ForConditionalGeneration"} == set(SERVED)


def test_logits_agree(loaded: Loaded, case: Case) -> None:
    for prompt in case.prompts:
        with torch.inference_mode():
            theirs = case.model(torch.tensor([prompt])).logits[0]
        difference = (loaded.logits(prompt) - theirs).abs().max().item()
        assert difference < MAX_LOGIT_DIFF, f"{len(prompt)} tokens: {difference}"


def test_chunked_and_cached_tokens_agree(loaded: Loaded, case: Case) -> None:
    engine = Engine(loaded, max_num_batched_tokens=23, block_size=4, prefix_caching=True)
    for _ in range(2):
        assert_same_tokens(engine.generate(case.prompts, NUM_TOKENS), case.expected)
    assert engine.kv_manager.num_hit_tokens > sum(map(len, case.prompts)) // 2


def test_batched_and_preempted_tokens_agree(cpu_loaded: Loaded, case: Case) -> None:
    # The longest takes 7 blocks to its end, all together far more than 12.
    engine = Engine(cpu_loaded, num_blocks=13)
    # If blocks behind it are given back, that is room enough; see test_kv_window.py.
    engine.kv_manager.window = None
    assert_same_tokens(engine.generate(case.prompts, NUM_TOKENS), case.expected)
    assert engine.core.stats().total_preemptions > 0


def test_the_text_model_of_gemma_3_with_images(tmp_path: Path) -> None:
    import transformers

    tiny = ARCHITECTURES["gemma3"]
    text = make_model(tiny)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
    vision = {**sizes, "num_hidden_layers": 1, "image_size": 28, "patch_size": 14}
    config = transformers.Gemma3Config(
        text_config=text.config.to_dict(), vision_config=vision, mm_tokens_per_image=4
    )
    model = transformers.Gemma3ForConditionalGeneration(config).eval()
    model.model.language_model.load_state_dict(text.model.state_dict())
    loaded = load(str(save(model, tmp_path / "model")), "reference", 256)
    prompt = tiny.prompts[-1]
    with torch.inference_mode():
        theirs = text(torch.tensor([prompt])).logits[0]
    assert (loaded.logits(prompt) - theirs).abs().max().item() < MAX_LOGIT_DIFF
