"""Which rank has which heads, rows and columns: all of them, none twice but KV heads."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_core.model.config import ExpertsConfig, LayerConfig, ModelConfig
from engine_core.model.layers import layer_shapes
from engine_core.model.layout import Layout
from engine_core.model.mixtral import MixtralForCausalLM
from engine_core.model.phi3 import Phi3ForCausalLM
from engine_core.parallel.split import (
    check_split,
    feature_unit,
    share,
    share_config,
    share_heads,
    share_tensors,
)
from pagewire.errors import ConfigError

CONFIG = ModelConfig(
    architecture="LlamaForCausalLM",
    hidden_size=48,
    intermediate_size=50,
    num_heads=6,
    num_kv_heads=3,
    head_dim=4,
    vocab_size=101,
    rms_norm_eps=1e-5,
    max_positions=64,
    layers=(LayerConfig(None),) * 2,
    tie_embeddings=False,
    bos_token_id=None,
    eos_token_ids=(),
    dtype="float32",
    qkv_bias=True,
)


@given(st.integers(1, 12), st.integers(1, 8), st.data())
def test_heads(num_kv_heads: int, group: int, data: st.DataObject) -> None:
    num_heads = num_kv_heads * group
    size = data.draw(st.integers(1, num_heads))
    queries: list[int] = []
    for rank in range(size):
        heads = share_heads(num_heads, num_kv_heads, rank, size)
        assert heads.query, rank
        queries += heads.query
        # As attention maps them: local query head h reads local KV head h // readers.
        readers, rest = divmod(len(heads.query), len(heads.kv))
        assert rest == 0
        for place, head in enumerate(heads.query):
            assert heads.kv[place // readers] == head // group
        if size <= num_kv_heads:
            assert len(set(heads.kv)) == len(heads.kv) <= -(-num_kv_heads // size)
    assert queries == list(range(num_heads))


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "size", "num_queries", "num_kv"),
    [
        (32, 8, 4, (8, 8, 8, 8), (2, 2, 2, 2)),
        (32, 8, 16, (2,) * 16, (1,) * 16),  # each KV head on two ranks
        (9, 3, 2, (3, 6), (1, 2)),  # whole groups, as they come
        (3, 1, 2, (1, 2), (1, 1)),
        (12, 3, 4, (3, 3, 3, 3), (1, 3, 3, 1)),  # queries 3 to 5 are of two groups
        (16, 16, 4, (4, 4, 4, 4), (4, 4, 4, 4)),
    ],
)
def test_heads_of_models(
    num_heads: int,
    num_kv_heads: int,
    size: int,
    num_queries: tuple[int, ...],
    num_kv: tuple[int, ...],
) -> None:
    shares = [share_heads(num_heads, num_kv_heads, rank, size) for rank in range(size)]
    assert tuple(len(heads.query) for heads in shares) == num_queries
    assert tuple(len(heads.kv) for heads in shares) == num_kv


@given(st.integers(1, 600), st.integers(1, 8), st.sampled_from([1, 32, 256]))
def test_shares_are_neighbours_of_whole_units(total: int, size: int, unit: int) -> None:
    shares = [share(total, rank, size, unit) for rank in range(size)]
    assert [at for one in shares for at in one] == list(range(total))
    assert all(one.start % unit == 0 for one in shares if one)
    units = [-(-len(one) // unit) for one in shares]
    assert max(units) - min(units) <= 1


@pytest.mark.parametrize(
    ("features", "size", "is_quantized", "unit"),
    [
        (11008, 4, False, 1),
        (11008, 4, True, 256),
        (1536, 8, True, 128),
        (96, 2, True, 32),
        (96, 4, True, 1),
        (50, 2, True, 1),
    ],
)
def test_units_of_features(features: int, size: int, is_quantized: bool, unit: int) -> None:
    assert feature_unit(features, size, is_quantized=is_quantized) == unit


EXPERTS = replace(CONFIG, layers=(LayerConfig(None, experts=ExpertsConfig(3, 2, 10, True)),))


@pytest.mark.parametrize("size", [2, 3, 6])
@pytest.mark.parametrize(
    ("config", "layout"),
    [
        (CONFIG, Layout()),
        (CONFIG, Phi3ForCausalLM.layout),
        (EXPERTS, MixtralForCausalLM.layout),
    ],
    ids=["llama", "fused", "experts"],
)
def test_every_element_is_somewhere(config: ModelConfig, layout: Layout, size: int) -> None:
    whole = {"model.embed_tokens.weight": (101, 48), "lm_head.weight": (101, 48)}
    for index in range(config.num_layers):
        whole |= layer_shapes(layout, config, index)
    ranks = [share_tensors(config, layout, rank, size, is_quantized=False) for rank in range(size)]
    for name, shape in whole.items():
        parts = [parts.get(name) for parts in ranks]
        if any(part is None for part in parts):
            assert set(parts) == {None}, name
            assert "norm" in name or "gate.weight" in name, name
            continue
        rows = {row for part in parts if part for span in part.rows for row in span}
        assert rows == set(range(shape[0])), name
        columns = [part.columns for part in parts if part]
        if columns[0] is not None:
            assert [at for span in columns if span for at in span] == list(range(shape[1])), name
    # What a rank's layers read has the shapes of a model of its own size.
    for rank, parts in enumerate(ranks):
        own = share_config(config, rank, size)
        heads = own.num_heads * own.head_dim
        attention = "model.layers.0.self_attn"
        qkv = sum(parts[f"{attention}.{name}.weight"].num_rows for name in layout.qkv)
        assert qkv == heads + 2 * own.num_kv_heads * own.head_dim
        out = parts[f"{attention}.o_proj.weight"].shape((48, 24))
        assert out == (48, heads)


@pytest.mark.parametrize(
    ("change", "layout", "size", "message"),
    [
        ({}, Layout(), 7, r"--tensor-parallel-size 7: m has 6 attention heads: each rank needs"),
        ({"intermediate_size": 3}, Layout(), 4, "m has 3 intermediate features"),
        ({"vocab_size": 2}, Layout(), 3, "m has 2 tokens of the vocabulary"),
        ({}, Layout(qk_norm="row"), 2, "m has 3 KV heads and a norm over all of them"),
    ],
)
def test_what_cannot_be_divided(
    change: dict[str, int], layout: Layout, size: int, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        check_split(replace(CONFIG, **change), layout, size, "m")
