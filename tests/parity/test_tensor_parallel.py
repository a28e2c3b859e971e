"""Models divided among ranks: the tokens of transformers, whole, cut, cached, preempted and
in company. Ranks are threads, their collectives real ones (gloo)."""

from __future__ import annotations

import random
from dataclasses import fields, is_dataclass, replace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from kernels.ops import BlockStack
from pagewire.types import SamplingParams
from tests.parity.harness import Engine, assert_same_tokens, load
from tests.parity.schedules import Asked, Grammars, serve
from tests.parity.test_architectures import NUM_TOKENS, Case
from tests.parity.test_mixed_schedules import SPEC, draw_requests
from tests.parity.test_speculation_parity import make_speculation
from tests.support.rank_threads import RankThreads
from tests.support.tiny_architectures import ARCHITECTURES
from tests.support.tiny_model import EOS_ID, TinySpec, write_gguf, write_hf

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from engine_core.model.quantization import Quantization
    from pagewire.wire.messages import PositionLogprobs
    from tests.parity.harness import Loaded

pytestmark = pytest.mark.timeout(300)

# KV heads replicated or not, biases, fused matrices, experts, norms after the sum, a tied
# or a scaled head: what differs in how it is divided.
DIVIDED = {
    "qwen2": (4,),
    "qwen3-biases": (3,),
    "gemma2": (2,),
    "mixtral": (2,),
    "qwen3-moe-some-dense": (3,),
    "phi3": (2,),
    "granite": (2,),
    "olmo2": (2,),
}


# Two of them on one rank, and three on the other.
FIVE_KV_HEADS = replace(
    ARCHITECTURES["olmo2"],
    changes={"num_attention_heads": 10, "num_key_value_heads": 5, "hidden_size": 40},
)


@pytest.mark.parametrize("name", DIVIDED)
def test_tokens_of_transformers(name: str, tmp_path: Path) -> None:
    case = Case(FIVE_KV_HEADS if name == "olmo2" else ARCHITECTURES[name], tmp_path / name)
    for size in DIVIDED[name]:
        with RankThreads(
            str(case.directory), size, backend="cpu", max_model_len=case.tiny.max_model_len
        ) as ranks:
            options = {"max_num_batched_tokens": 23, "block_size": 4, "prefix_caching": True}
            with ranks.engine(**options) as engine:
                for _ in range(2):
                    assert_same_tokens(engine.generate(case.prompts, NUM_TOKENS), case.expected)
                assert engine.kv_manager.num_hit_tokens > sum(map(len, case.prompts)) // 2
            with ranks.engine(num_blocks=13) as engine:
                engine.kv_manager.window = None  # or it might have room enough
                assert_same_tokens(engine.generate(case.prompts, NUM_TOKENS), case.expected)
                assert engine.core.stats().total_preemptions > 0


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_hf(tmp_path_factory.mktemp("divided") / "model", SPEC)


@pytest.fixture
def grammars(mixed: Path) -> Iterator[Grammars]:
    grammars = Grammars(mixed, SPEC.vocab_size, EOS_ID)
    yield grammars
    grammars.gate.close()


def test_requests_of_all_kinds_get_what_one_rank_gives(mixed: Path, grammars: Grammars) -> None:
    # Nine heads in groups of three: one group for one rank, two for the other.
    asked = [one for one in draw_requests(random.Random(4)) if one.arrives < 20]
    for one in asked:
        one.aborts = None
    options = {
        "num_blocks": 27,
        "block_size": 8,
        "max_num_seqs": 12,
        "max_num_batched_tokens": 37,
        "prefix_caching": True,
        "num_host_blocks": 60,
        "grammars": grammars.gate,
    }
    invariant = {"backend": "cpu", "batch_invariant": True}
    expected = serve(Engine(load(str(mixed), **invariant), **options), asked, grammars)
    options["speculation"] = make_speculation(most=3)
    with RankThreads(str(mixed), 2, **invariant) as ranks, ranks.engine(**options) as engine:
        answers = serve(engine, asked, grammars)
        stats = engine.core.stats()
    for number, (mine, one) in enumerate(zip(answers, expected, strict=True)):
        assert mine.ids == one.ids, number
        assert mine.reason == one.reason, number
        assert [beam.token_ids for beam in mine.beams] == [beam.token_ids for beam in one.beams]
        assert_close(mine.output, one.output)
        assert_close(mine.prompt, one.prompt)
    assert stats.total_preemptions > 0
    assert stats.total_restored_blocks > 0
    assert stats.total_accepted_tokens > 0
    assert any(answer.beams for answer in answers)
    assert any(answer.prompt for answer in answers)


def assert_close(mine: list[PositionLogprobs], other: list[PositionLogprobs]) -> None:
    assert [one.top_ids for one in mine] == [one.top_ids for one in other]
    assert [one.logprob for one in mine] == pytest.approx([one.logprob for one in other], abs=1e-4)


@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("size", [2, 4])
def test_each_rank_holds_its_part_of_the_bytes(size: int, is_tied: bool, tmp_path: Path) -> None:
    spec = TinySpec(
        hidden_size=64,
        intermediate_size=192,
        num_heads=8,
        num_kv_heads=4,
        vocab_size=320,
        max_positions=32,
        tie_embeddings=is_tied,
    )
    path = str(write_hf(tmp_path / "model", spec))
    whole = weight_bytes(load(path, "cpu", 32))
    with RankThreads(path, size, backend="cpu", max_model_len=32) as ranks:
        held = [weight_bytes(ranks.loaded(rank)) for rank in range(size)]
    # Norms and the angles of RoPE are everybody's.
    assert max(held) < 1.1 * whole / size
    assert sum(held) >= whole


def weight_bytes(loaded: Loaded) -> int:
    """Of every tensor that the model holds on to, once."""
    found: dict[int, int] = {}
    _find_tensors(vars(loaded.model), found)
    return sum(found.values())


def _find_tensors(thing: Any, found: dict[int, int]) -> None:
    if isinstance(thing, torch.Tensor):
        found[thing.data_ptr()] = thing.numel() * thing.itemsize
    elif isinstance(thing, BlockStack):
        _find_tensors(thing.blocks, found)
    elif isinstance(thing, dict):
        _find_tensors(tuple(thing.values()), found)
    elif isinstance(thing, tuple):
        for one in thing:
            _find_tensors(one, found)
    elif is_dataclass(thing):
        _find_tensors(tuple(getattr(thing, field.name) for field in fields(thing)), found)


@pytest.mark.parametrize(
    ("kind", "quantization"),
    [
        ("Q8_0", "packed"),
        ("Q4_1", "packed"),
        ("F16", "int8"),
        ("F16", "int4"),
        ("F16", "fp8"),
        ("Q5_0", "none"),
    ],
)
def test_codes_give_the_tokens_of_one_rank(
    kind: str, quantization: Quantization, tmp_path: Path
) -> None:
    # 160 intermediate features are five blocks, for two ranks; q and k are interleaved. By the
    # reference, which quantizes no activations: these turn a last bit into a step of theirs.
    spec = TinySpec(
        hidden_size=128,
        intermediate_size=160,
        num_heads=4,
        num_kv_heads=2,
        head_dim=64,
        vocab_size=258,
    )
    path = str(write_gguf(tmp_path / "model.gguf", spec, kind))
    prompts = [list(range(2, 60)), [9, 8, 7]]
    options = {"backend": "reference", "quantization": quantization}
    one = load(path, **options)
    assert bool(one.model.quantized_formats) == (quantization != "none")
    expected = Engine(one).generate(prompts, 24)
    with RankThreads(path, 2, **options) as ranks, ranks.engine() as engine:
        assert ranks.first.model.quantized_formats == one.model.quantized_formats
        assert_same_tokens(engine.generate(prompts, 24), expected)


@pytest.mark.parametrize("kv_dtype", [torch.int8, torch.float8_e4m3fn])
def test_caches_of_8_bits(kv_dtype: torch.dtype, mixed: Path, grammars: Grammars) -> None:
    # A last bit can become a step of 8 bits: logprobs are close, and no more.
    params = SamplingParams(max_tokens=6, temperature=0.0, logprobs=0, ignore_eos=True)
    asked = [Asked(list(range(2 + 7 * at, 40 + 20 * at)), params) for at in range(3)]
    one = load(str(mixed), "cpu")
    one.kv_dtype = kv_dtype
    expected = serve(Engine(one), asked, grammars)
    with RankThreads(str(mixed), 2, backend="cpu") as ranks:
        for rank in range(2):
            ranks.loaded(rank).kv_dtype = kv_dtype
        with ranks.engine() as engine:
            answers = serve(engine, asked, grammars)
    for mine, other in zip(answers, expected, strict=True):
        assert mine.ids == other.ids
        for told, wanted in zip(mine.output, other.output, strict=True):
            assert told.logprob == pytest.approx(wanted.logprob, abs=0.1)


def test_company_changes_no_bit(mixed: Path, grammars: Grammars) -> None:
    rng = random.Random(5)
    params = SamplingParams(max_tokens=12, seed=3, logprobs=2, ignore_eos=True)
    asked = [
        Asked([rng.randrange(2, SPEC.vocab_size) for _ in range(rng.randint(1, 60))], params)
        for _ in range(8)
    ]
    with RankThreads(str(mixed), 3, backend="cpu", batch_invariant=True) as ranks:
        with ranks.engine() as engine:
            alone = [serve(engine, [one], grammars)[0] for one in asked]
        small = {"num_blocks": 14, "block_size": 8, "max_num_batched_tokens": 21}
        with ranks.engine(**small) as engine:
            together = serve(engine, asked, grammars)
            assert engine.core.stats().total_preemptions > 0
    assert [answer.output for answer in together] == [answer.output for answer in alone]
