"""Adapters: the logits and tokens that PEFT makes with each, several of them and none in one
batch, chunked, cached, preempted, and never each other's KV."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from engine_core.lora.adapters import Adapters
from engine_core.lora.backend import ModelSlots
from engine_core.model.lora import LoraShape
from tests.parity.harness import Engine, Loaded, assert_same_tokens, load
from tests.support.adapters import Adapted, save_adapter
from tests.support.graph_device import GraphDevice, GraphOps
from tests.support.tiny_architectures import ARCHITECTURES, make_model, save
from tests.support.tiny_model import TinySpec, write_gguf, write_hf

if TYPE_CHECKING:
    from pathlib import Path

NUM_TOKENS = 6
MAX_LOGIT_DIFF = 2e-3
SHAPE = LoraShape(num_slots=3, max_rank=6)
LORAS: dict[str, dict[str, Any]] = {
    "all": {"rank_pattern": {"o_proj": 2}, "alpha_pattern": {"layers.0.self_attn.o_proj": 3}},
    "some": {
        "r": 6,
        "lora_alpha": 5,
        "use_rslora": True,
        "target_modules": r".*\.(v_proj|qkv_proj|up_proj|gate_up_proj|down_proj)",
        "layers_to_transform": None,
    },
    "upper": {
        "target_modules": ["q_proj", "qkv_proj", "down_proj"],
        "layers_to_transform": [1],
        "r": 1,
    },
}


class Case:
    def __init__(self, name: str, directory: Path) -> None:
        tiny = ARCHITECTURES[name]
        model = make_model(tiny)
        # Those of MLPs mean the experts too, which have no adapters here.
        targets = {"target_modules": ["q_proj", "v_proj", "o_proj"]} if "moe" in name else {}
        self.max_model_len = tiny.max_model_len
        self.directory = save(model, directory / "model")
        self.paths = {
            key: save_adapter(model, directory / key, seed=seed, **{**lora, **targets})
            for seed, (key, lora) in enumerate(LORAS.items())
        }
        self.truth = Adapted(model, self.paths)
        # Every prompt with every adapter, so that only the adapter tells their KV apart.
        prompts = [tiny.prompts[1], tiny.prompts[-1]]
        self.work = [(prompt, name) for prompt in prompts for name in ["", *LORAS]]
        self.prompts = [prompt for prompt, _ in self.work]
        self.names = [name for _, name in self.work]
        self.expected = [self.truth.greedy(name, prompt, NUM_TOKENS) for prompt, name in self.work]

    def load(self, backend: str) -> tuple[Loaded, Adapters]:
        loaded = load(str(self.directory), backend, self.max_model_len, lora=SHAPE)
        slots = ModelSlots(loaded.model, SHAPE.max_rank, loaded.dtype)
        adapters = Adapters(slots, SHAPE.num_slots)
        for name, path in self.paths.items():
            adapters.load_static(name, str(path))
        return loaded, adapters


@pytest.fixture(
    scope="module",
    params=["llama-yarn", "qwen2", "phi3", "gemma2", "granite", "qwen3-moe-some-dense"],
)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case(request.param, tmp_path_factory.mktemp("lora"))


def test_the_adapters_make_a_difference(case: Case) -> None:
    prompt = case.prompts[-1]
    logits = [case.truth.logits(name, prompt) for name in ["", *LORAS]]
    for index, one in enumerate(logits):
        for other in logits[:index]:
            assert (one - other).abs().max() > 100 * MAX_LOGIT_DIFF


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_logits_agree(case: Case, backend: str) -> None:
    loaded, adapters = case.load(backend)
    prompt = case.prompts[-1]
    for name in LORAS:
        adapter = adapters.find(name)
        assert adapter is not None
        theirs = case.truth.logits(name, prompt)
        difference = (loaded.logits(prompt, adapter.slot) - theirs).abs().max().item()
        assert difference < MAX_LOGIT_DIFF, (name, difference)
    assert torch.equal(loaded.logits(prompt), load(str(case.directory), backend).logits(prompt))


def test_tokens_agree_in_one_batch_chunked_and_cached(case: Case) -> None:
    loaded, adapters = case.load("cpu")
    engine = Engine(
        loaded,
        max_num_batched_tokens=23,
        block_size=4,
        prefix_caching=True,
        adapters=adapters,
    )
    for _ in range(2):
        tokens = engine.generate(case.prompts, NUM_TOKENS, adapters=case.names)
        assert_same_tokens(tokens, case.expected)
    # The second time each finds what it has computed itself, and only that.
    assert engine.kv_manager.num_hit_tokens > sum(map(len, case.prompts)) // 2


def test_preempted_tokens_agree(case: Case) -> None:
    loaded, adapters = case.load("cpu")
    engine = Engine(loaded, num_blocks=8, adapters=adapters)
    tokens = engine.generate(case.prompts, NUM_TOKENS, adapters=case.names)
    assert_same_tokens(tokens, case.expected)
    assert engine.core.stats().total_preemptions > 0


def test_tokens_agree_beside_graphs_and_with_ids_that_come_late(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step is a graph only where nobody in it has an adapter."""
    case = Case("llama-yarn", tmp_path)
    monkeypatch.setattr("tests.parity.harness.load_ops", lambda *args, **more: GraphOps())
    loaded, adapters = case.load("graph")
    device = GraphDevice()
    engine = Engine(
        replace(loaded, device=device),
        graph_sizes=(1, 2, 4, 8),
        async_scheduling=True,
        adapters=adapters,
    )
    tokens = engine.generate(case.prompts, NUM_TOKENS, adapters=case.names)
    assert_same_tokens(tokens, case.expected)
    assert device.replays == []
    base = [(it, ids) for (it, name), ids in zip(case.work, case.expected, strict=True) if not name]
    assert_same_tokens(
        engine.generate([it for it, _ in base], NUM_TOKENS), [ids for _, ids in base]
    )
    assert len(device.replays) == NUM_TOKENS - 1


def test_over_a_gguf_whose_rows_were_interleaved(tmp_path: Path) -> None:
    """An adapter is made for the order of rows in the Hugging Face layout."""
    import transformers

    spec = TinySpec()
    model = transformers.AutoModelForCausalLM.from_pretrained(write_hf(tmp_path / "tiny", spec))
    path = save_adapter(model.float().eval(), tmp_path / "adapter", seed=3)
    truth = Adapted(model, {"one": path})
    loaded = load(str(write_gguf(tmp_path / "tiny.gguf", spec)), "cpu", 128, lora=SHAPE)
    adapters = Adapters(ModelSlots(loaded.model, SHAPE.max_rank, loaded.dtype), 1)
    adapters.load_static("one", str(path))
    prompt = [5, 90, 17, 250, 33, 8, 61]
    theirs = truth.logits("one", prompt)
    assert (loaded.logits(prompt, 0) - theirs).abs().max().item() < MAX_LOGIT_DIFF
    assert (truth.logits("", prompt) - theirs).abs().max().item() > 100 * MAX_LOGIT_DIFF
