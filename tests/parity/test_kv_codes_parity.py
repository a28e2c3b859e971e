"""KV caches of 8 bits: the tokens of transformers over a cache that rounds likewise, however
requests are batched, cut, cached, preempted, offloaded or forked."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from transformers import DynamicCache

from pagewire.types import BeamParams, SamplingParams
from pagewire.wire.codec import pack_ids, unpack_ids
from pagewire.wire.messages import Add
from tests.parity.harness import EPOCH, FRONTEND_ID, Engine, Loaded, load
from tests.support.tiny_model import TinySpec, write_hf

if TYPE_CHECKING:
    from engine_core.model.kv_scales import LayerScales

NUM_TOKENS = 24
SPEC = TinySpec(hidden_size=60, num_heads=6, num_kv_heads=2, head_dim=20, seed=31)
FP8, INT8 = torch.float8_e4m3fn, torch.int8
SCALES: list[LayerScales] = [
    (torch.tensor([0.5, 0.03]), torch.tensor([0.25, 2.0])),
    (torch.tensor([1.0, 0.004]), torch.tensor([0.1, 1.0])),
]
"""Of which the smallest clips."""


def rounded(x: torch.Tensor, kv_dtype: torch.dtype, scale: torch.Tensor) -> torch.Tensor:
    """x [1, Hk, T, D] float64 as a cache gives it back; scale [Hk] of fp8."""
    if kv_dtype == FP8:
        scale = scale.double().view(1, -1, 1, 1)
        return (x / scale).clamp(-448, 448).float().to(FP8).double() * scale
    step = x.abs().amax(dim=-1, keepdim=True) / 127
    return (x / step).round() * step


class RoundingCache(DynamicCache):
    """Keys and values are rounded as they are stored, and attention sees what is stored."""

    def __init__(self, kv_dtype: torch.dtype) -> None:
        super().__init__()
        self._kv_dtype = kv_dtype

    def update(
        self, key_states: Any, value_states: Any, layer_idx: int, *rest: Any, **more: Any
    ) -> Any:
        k_scale, v_scale = SCALES[layer_idx]
        key_states = rounded(key_states, self._kv_dtype, k_scale)
        value_states = rounded(value_states, self._kv_dtype, v_scale)
        return super().update(key_states, value_states, layer_idx, *rest, **more)


class Case:
    def __init__(self, directory: Any) -> None:
        from transformers import AutoModelForCausalLM

        path = str(write_hf(directory, SPEC))
        self.model: Any = AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.float64, attn_implementation="eager"
        ).eval()
        self._plain = load(path, "cpu", batch_invariant=True)
        generator = torch.Generator().manual_seed(31)
        prompts = torch.randint(2, SPEC.vocab_size, (5, 70), generator=generator).tolist()
        self.prompts = [*prompts, [*prompts[0][:50], 5, 6, 7], prompts[1][:33], prompts[2][:16]]

    def loaded(self, kv_dtype: torch.dtype) -> Loaded:
        scales = SCALES if kv_dtype == FP8 else None
        return replace(self._plain, kv_dtype=kv_dtype, kv_scales=scales)

    @torch.inference_mode()
    def logits(self, ids: list[int], kv_dtype: torch.dtype | None) -> torch.Tensor:
        """[T, V] float64 by transformers; None rounds nothing."""
        cache = DynamicCache() if kv_dtype is None else RoundingCache(kv_dtype)
        out: torch.Tensor = self.model(torch.tensor([ids]), cache=cache).logits[0]
        return out


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case(tmp_path_factory.mktemp("codes") / "model")


by_dtype = pytest.mark.parametrize("kv_dtype", [FP8, INT8], ids=["fp8", "int8"])


@by_dtype
def test_logits_are_those_over_rounded_keys_and_values(case: Case, kv_dtype: torch.dtype) -> None:
    """What rounding costs is measured in float64; we are much nearer to it than that."""
    loaded = case.loaded(kv_dtype)
    for prompt in case.prompts[:3]:
        exact = case.logits(prompt, kv_dtype)
        cost = (exact - case.logits(prompt, None)).abs()
        apart = (loaded.logits(prompt).double() - exact).abs()
        assert float(cost.mean()) > 1e-3
        # A key that float32 rounds to the other side of a tie is off by a step.
        assert float(apart.mean()) < 0.05 * float(cost.mean())
        assert float(apart.max()) < 0.5 * float(cost.max())


@by_dtype
def test_tokens_do_not_depend_on_what_happens_to_a_request(
    case: Case, kv_dtype: torch.dtype
) -> None:
    loaded, prompts = case.loaded(kv_dtype), case.prompts
    expected = [Engine(loaded).generate([prompt], NUM_TOKENS)[0] for prompt in prompts]
    for prompt, ids in zip(prompts, expected, strict=True):
        _assert_greedy(case.logits([*prompt, *ids], kv_dtype)[len(prompt) - 1 : -1], ids)
    assert Engine(loaded).generate(prompts, NUM_TOKENS) == expected, "batched"
    assert Engine(loaded, max_num_batched_tokens=13).generate(prompts, NUM_TOKENS) == expected
    cached = Engine(loaded, prefix_caching=True)
    for _ in range(2):
        assert cached.generate(prompts, NUM_TOKENS) == expected, "cached"
    assert cached.kv_manager.num_hit_tokens > 200
    small: dict[str, Any] = {"num_blocks": 25, "block_size": 8, "max_num_batched_tokens": 23}
    preempted = Engine(loaded, **small)
    assert preempted.generate(prompts, NUM_TOKENS) == expected, "preempted"
    assert preempted.scheduler.total_preemptions > 0
    offloaded = Engine(loaded, **small, prefix_caching=True, num_host_blocks=60)
    for _ in range(2):
        assert offloaded.generate(prompts, NUM_TOKENS) == expected, "offloaded"
    stats = offloaded.core.stats()
    assert stats.total_offloaded_blocks > 0 and stats.total_restored_blocks > 0


def _assert_greedy(logits: torch.Tensor, ids: list[int]) -> None:
    """Each id is the likeliest of its row [T, V], or as likely but for what float32 rounds."""
    chosen = logits.gather(1, torch.tensor(ids).unsqueeze(1)).squeeze(1)
    assert bool((logits.amax(dim=1) - chosen < 0.02 * logits.std(dim=1)).all())


@by_dtype
def test_beams_copy_codes_with_their_scales(case: Case, kv_dtype: torch.dtype) -> None:
    """Each fork copies a block that is not full yet."""
    loaded, prompt = case.loaded(kv_dtype), case.prompts[0][:37]
    schedules: list[dict[str, Any]] = [
        {},
        {"num_blocks": 40, "block_size": 4},
        {"max_num_batched_tokens": 11, "prefix_caching": True},
    ]
    found, *others = (_beams(Engine(loaded, **schedule), prompt) for schedule in schedules)
    assert others == [found, found]
    assert len({tuple(ids) for ids, _ in found}) == 3
    for ids, score in found:
        logits = case.logits([*prompt, *ids], kv_dtype)[len(prompt) - 1 : -1]
        logprobs = logits.log_softmax(-1).gather(1, torch.tensor(ids).unsqueeze(1))
        assert abs(float(logprobs.mean()) - score) < 0.02


def _beams(engine: Engine, prompt: list[int]) -> list[tuple[list[int], float]]:
    sampling = SamplingParams(12, ignore_eos=True, beam=BeamParams(3, 3))
    engine.core.add(FRONTEND_ID, Add(1, EPOCH, pack_ids(prompt), 0, sampling), 0.0)
    finished: list[Any] = []
    while engine.core.has_work():
        for output in engine.core.step(lambda: None).values():
            finished += output.finished
    engine.core.check_integrity()
    engine.kv_manager.check_all_free()
    (answer,) = finished
    return [(list(unpack_ids(beam.token_ids)), beam.score) for beam in answer.beams]
