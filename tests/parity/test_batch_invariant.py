"""--batch-invariant on a whole model: a sequence's logits, to the last bit, are what they
are alone, however it is batched, chunked, preempted, cached or restored."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from engine_core.engine_builder import build_engine
from pagewire.config import EngineConfig
from pagewire.errors import ConfigError
from pagewire.types import SamplingParams
from tests.parity.harness import Engine, load
from tests.parity.schedules import Asked, Grammars, serve
from tests.support.tiny_model import EOS_ID, TinySpec, write_hf

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from kernels.ops import SamplingBatch
    from tests.parity.harness import Loaded

SPEC = TinySpec(hidden_size=96, intermediate_size=160, num_heads=6, num_kv_heads=2, seed=51)
NUM_TOKENS = 40
WAYS: dict[str, dict[str, Any]] = {
    "batched": {},
    "chunked": {"max_num_batched_tokens": 13},
    "preempted": {"num_blocks": 41, "max_num_batched_tokens": 129},
    "cached": {"prefix_caching": True, "block_size": 8},
    "restored": {"prefix_caching": True, "num_blocks": 41, "num_host_blocks": 300},
}


class Recorder:
    """Keeps the logits that are sampled from, by (seed, output position)."""

    def __init__(self, loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
        self.logits: dict[tuple[int, int], torch.Tensor] = {}
        self._sample = loaded.ops.sample
        monkeypatch.setattr(loaded.ops, "sample", self.sample)

    def sample(self, logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
        keys = zip(batch.seed.tolist(), batch.position.tolist(), strict=True)
        self.logits.update(zip(keys, logits.clone(), strict=True))
        return self._sample(logits, batch)


def requests() -> list[Asked]:
    generator = torch.Generator().manual_seed(7)

    def ids(count: int) -> list[int]:
        return torch.randint(2, SPEC.vocab_size, (count,), generator=generator).tolist()

    stem = ids(90)
    # 600 tokens are more than one span of a decode's keys.
    prompts = [ids(1), ids(17), ids(64), ids(200), [*stem, 5], [*stem[:50], *ids(9)], ids(600)]
    return [
        Asked(prompt, SamplingParams(NUM_TOKENS, seed=seed, ignore_eos=True), arrives=seed)
        for seed, prompt in enumerate(prompts)
    ]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_hf(
        tmp_path_factory.mktemp("invariant") / "model", replace(SPEC, max_positions=800)
    )


@pytest.fixture(scope="module", params=[torch.float32, torch.bfloat16], ids=["f32", "bf16"])
def loaded(request: pytest.FixtureRequest, model: Path) -> Loaded:
    return load(str(model), "cpu", 800, dtype=request.param, batch_invariant=True)


@pytest.fixture(scope="module")
def grammars(model: Path) -> Iterator[Grammars]:
    grammars = Grammars(model, SPEC.vocab_size, EOS_ID)
    yield grammars
    grammars.gate.close()


def test_logits_are_the_same_bits(
    loaded: Loaded, grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = Recorder(loaded, monkeypatch)
    roomy = Engine(loaded, max_num_batched_tokens=700)
    ids = [serve(roomy, [replace(one, arrives=0)], grammars)[0].ids for one in requests()]
    alone = dict(recorder.logits)
    assert len(alone) == NUM_TOKENS * len(ids)
    for way, limits in WAYS.items():
        engine = Engine(loaded, **limits)
        for turn in range(2):
            recorder.logits.clear()
            answers = serve(engine, requests(), grammars)
            assert [answer.ids for answer in answers] == ids, way
            assert recorder.logits.keys() == alone.keys()
            for key, logits in recorder.logits.items():
                assert torch.equal(logits, alone[key]), (way, turn, key)
        stats = engine.core.stats()
        assert stats.total_preemptions > 0 or way != "preempted"
        assert (stats.prefix_cache_hits > 0) == ("prefix_caching" in limits), way
        assert (stats.total_restored_blocks > 0) == ("num_host_blocks" in limits), way


def test_a_backend_that_cannot_promise_it_is_refused(model: Path) -> None:
    config = EngineConfig(
        model=str(model), device="cpu", kernels="reference", batch_invariant=True, cpu_threads=1
    )
    with pytest.raises(ConfigError, match=r"--kernels reference with --batch-invariant: .*promise"):
        build_engine(config, lambda *_: None)
