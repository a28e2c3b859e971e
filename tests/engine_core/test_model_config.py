"""Configurations: what config.json and generation_config.json say, and what is refused."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from engine_core.model.config import LayerConfig, RopeConfig
from engine_core.model.hf_config import read_hf_config
from engine_core.model.registry import ARCHITECTURES
from engine_core.model.rope import cos_sin_table
from pagewire.errors import ModelLoadError
from tests.support.tiny_model import LINEAR_ROPE, LLAMA3_ROPE, TinySpec, config_json


def read(
    directory: Path, spec: TinySpec | None = None, generation: Any = None, **changes: Any
) -> Any:
    """changes replace keys of config.json; ... as a value removes the key."""
    raw = {**config_json(spec or TinySpec()), **changes}
    raw = {key: value for key, value in raw.items() if value is not ...}
    (directory / "config.json").write_text(json.dumps(raw))
    if generation is not None:
        (directory / "generation_config.json").write_text(json.dumps(generation))
    return read_hf_config(directory)


def test_reads_every_field(tmp_path: Path) -> None:
    spec = TinySpec(head_dim=6, attention_bias=True, tie_embeddings=True, dtype=torch.bfloat16)
    config = read(tmp_path, spec)
    assert dataclasses.asdict(config) == {
        "architecture": "LlamaForCausalLM",
        "hidden_size": 36,
        "intermediate_size": 50,
        "num_heads": 9,
        "num_kv_heads": 3,
        "head_dim": 6,
        "vocab_size": 300,
        "rms_norm_eps": 1e-5,
        "max_positions": 512,
        "layers": (dataclasses.asdict(LayerConfig(RopeConfig())),) * 2,
        "tie_embeddings": True,
        "qkv_bias": True,
        "output_bias": True,
        "mlp_bias": False,
        "activation": "silu",
        "norm_offset": 0.0,
        "embedding_scale": 1.0,
        "attention_scale": None,
        "attention_soft_cap": None,
        "logit_scale": 1.0,
        "logit_soft_cap": None,
        "bos_token_id": 0,
        "eos_token_ids": (1,),
        "dtype": "bfloat16",
        "quantization": None,
        "default_sampling": {},
    }


OF_TEXT = sorted(name for name, cls in ARCHITECTURES.items() if cls.hf_text_key is None)


@pytest.mark.parametrize("name", OF_TEXT)
def test_absent_keys_mean_the_class_defaults_of_transformers(tmp_path: Path, name: str) -> None:
    import transformers

    (tmp_path / "config.json").write_text(json.dumps({"architectures": [name]}))
    cls = getattr(transformers, name).config_class
    ours, theirs = read_hf_config(tmp_path), cls()
    num_heads = theirs.num_attention_heads
    head_dim = getattr(theirs, "head_dim", None) or theirs.hidden_size // num_heads
    assert ours.hidden_size == theirs.hidden_size
    assert ours.intermediate_size == theirs.intermediate_size
    assert ours.num_layers == theirs.num_hidden_layers
    assert ours.num_heads == num_heads
    assert ours.num_kv_heads == theirs.num_key_value_heads
    assert ours.head_dim == head_dim
    assert ours.vocab_size == theirs.vocab_size
    assert ours.max_positions == theirs.max_position_embeddings
    assert ours.rms_norm_eps == theirs.rms_norm_eps
    assert ours.tie_embeddings == theirs.tie_word_embeddings
    assert ours.bos_token_id == theirs.bos_token_id
    eos = () if theirs.eos_token_id is None else (theirs.eos_token_id,)
    assert ours.eos_token_ids == eos
    ropes = theirs.rope_parameters
    for index, layer in enumerate(ours.layers):
        layer_type = (getattr(theirs, "layer_types", None) or {index: "full_attention"})[index]
        windowed = getattr(theirs, "layer_types", None) is None or layer_type != "full_attention"
        assert layer.window == (getattr(theirs, "sliding_window", None) if windowed else None)
        if layer.rope is None:
            assert theirs.no_rope_layers[index] == 0
        else:
            assert layer.rope.theta == ropes.get(layer_type, ropes)["rope_theta"]
        if layer.experts is not None:
            assert layer.experts.num_experts == theirs.num_local_experts
            assert layer.experts.top_k == theirs.num_experts_per_tok


@pytest.mark.parametrize(
    ("in_config", "in_generation", "expected"),
    [
        (1, None, (1,)),
        ([1, 5], None, (1, 5)),
        (1, {"eos_token_id": [7, 8]}, (7, 8)),
        (1, {"eos_token_id": 9}, (9,)),
        (1, {"temperature": 0.5}, (1,)),
        (None, None, ()),
    ],
)
def test_eos_ids(tmp_path: Path, in_config: Any, in_generation: Any, expected: Any) -> None:
    config = read(tmp_path, generation=in_generation, eos_token_id=in_config)
    assert config.eos_token_ids == expected


def test_default_sampling(tmp_path: Path) -> None:
    known = {"temperature": 0.6, "top_p": 0.9, "top_k": 40, "repetition_penalty": 1.05}
    generation = {**known, "do_sample": True, "x": "y"}
    config = read(tmp_path, generation=generation)
    assert config.default_sampling == known
    config = read(tmp_path, generation={**generation, "do_sample": False})
    assert config.default_sampling == {}


# vllm-project/vllm#17553, NVIDIA/TensorRT-LLM#17158
@pytest.mark.parametrize("top_k", [0, -1, 0.0])
def test_top_k_may_be_off_in_the_generation_config(tmp_path: Path, top_k: float) -> None:
    config = read(tmp_path, generation={"top_k": top_k})
    assert config.default_sampling == {"top_k": top_k}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", -0.5),
        ("top_p", 0),
        ("top_p", 1.5),
        ("top_k", -2),
        ("top_k", 1.5),
        ("top_k", math.inf),
        ("min_p", math.nan),
        ("repetition_penalty", 0),
        ("repetition_penalty", "high"),
    ],
)
def test_sampling_that_no_request_could_be_served_with(
    tmp_path: Path, key: str, value: float | str
) -> None:
    with pytest.raises(ModelLoadError, match=rf"generation_config\.json: {key} is .*, expected a"):
        read(tmp_path, generation={key: value})
    assert read(tmp_path, generation={key: value, "do_sample": False}).default_sampling == {}


@pytest.mark.parametrize("dtype_key", ["dtype", "torch_dtype"])
def test_dtype_keys(tmp_path: Path, dtype_key: str) -> None:
    changes = {"torch_dtype": ..., dtype_key: "float16"}
    assert read(tmp_path, **changes).dtype == "float16"


YARN: list[dict[str, Any]] = [
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, **more}
    for more in (
        {},
        {"attention_factor": 1.5},
        {"beta_fast": 16, "beta_slow": 2, "truncate": False},
        {"mscale": 0.7, "mscale_all_dim": 0.9},
        {"factor": None},
    )
]
LONG_ROPE_16: dict[str, Any] = {
    "rope_type": "longrope",
    "factor": 4.0,
    "original_max_position_embeddings": 128,
    "short_factor": [1 + i / 16 for i in range(16)],
    "long_factor": [2.0 + i for i in range(16)],
}
ROPE_SPELLINGS: list[dict[str, Any]] = [
    {"rope_theta": 5e5, "rope_scaling": LLAMA3_ROPE},
    {"rope_theta": 5e5, "rope_scaling": {**LLAMA3_ROPE, "type": "llama3"}},
    {"rope_theta": ..., "rope_parameters": {**LLAMA3_ROPE, "rope_theta": 5e5}},
    {"rope_theta": 5e5, "rope_scaling": LINEAR_ROPE},
    {"rope_theta": 5e5, "rope_scaling": {"rope_type": "linear", "factor": 4}},
    {
        "rope_theta": ...,
        "rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 5e5},
    },
    {"rope_theta": 5e5, "rope_scaling": None},
    *({"rope_theta": 5e5, "rope_scaling": scaling} for scaling in YARN),
    *({"rope_theta": ..., "rope_parameters": {**yarn, "rope_theta": 5e5}} for yarn in YARN),
    {"rope_scaling": YARN[0], "original_max_position_embeddings": 50},
    {"rope_scaling": {"type": "dynamic", "factor": 4.0}},
    {"rope_scaling": LONG_ROPE_16},
    {"rope_scaling": {**LONG_ROPE_16, "factor": None}},
    {"rope_scaling": {**LONG_ROPE_16, "attention_factor": 1.25}},
    {"rope_parameters": {"rope_type": "proportional", "partial_rotary_factor": 0.25}},
    {
        "rope_parameters": {
            "rope_type": "proportional",
            "partial_rotary_factor": 0.5,
            "factor": 2.0,
        }
    },
    {"rope_scaling": {**YARN[0], "partial_rotary_factor": 0.75}},
    {"rope_scaling": {"type": "linear", "factor": 4, "partial_rotary_factor": 0.5}},
    {"rope_theta": ..., "rope_scaling": ..., "rope_parameters": {"rope_theta": 5e5}},
]


@pytest.mark.parametrize("spelling", ROPE_SPELLINGS, ids=lambda value: str(value)[:60])
def test_tables_equal_transformers(tmp_path: Path, spelling: dict[str, Any]) -> None:
    """ggml-org/llama.cpp#8676: a table built from theta alone is right for short text only."""
    from transformers import AutoConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = read(tmp_path, TinySpec(hidden_size=288, num_heads=9), **spelling)
    theirs: Any = LlamaRotaryEmbedding(AutoConfig.from_pretrained(tmp_path))
    rope = config.layers[0].rope
    for length in (128, 129, 512):
        cos, sin = theirs(torch.ones(1), torch.arange(length).unsqueeze(0))
        half = cos.shape[-1] // 2
        expected = torch.cat((cos[0, :, :half], sin[0, :, :half]), dim=-1)
        # The frequencies differ in the last bit, which is as many radians as there are positions.
        torch.testing.assert_close(
            cos_sin_table(rope, config.head_dim, length), expected, rtol=0, atol=1e-4
        )


@pytest.mark.parametrize(
    ("scaling", "context"),
    [
        ({"rope_type": "yarn", "factor": 4, "original_max_position_embeddings": 512}, 2048),
        ({"rope_type": "yarn", "factor": 4, "original_max_position_embeddings": 128}, 512),
        ({"rope_type": "linear", "factor": 4}, 512),
        ({"rope_type": "dynamic", "factor": 4}, 512),
    ],
)
def test_context_length(tmp_path: Path, scaling: dict[str, Any], context: int) -> None:
    assert read(tmp_path, rope_scaling=scaling).max_positions == context


LONG_ROPE = {
    "rope_type": "longrope",
    "factor": 4,
    "original_max_position_embeddings": 128,
    "short_factor": [1.0, 1.5],
    "long_factor": [1.0, 4.0],
}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"architectures": ["GPTNeoXForCausalLM"]}, "'GPTNeoXForCausalLM' is unknown; known: Gemma2"),
    ({"architectures": ...}, "architectures is None"),
    ({"architectures": []}, "architectures is []"),
    ({"hidden_size": "64"}, "hidden_size is '64', expected an integer"),
    ({"hidden_size": None}, "hidden_size is missing"),
    ({"num_attention_heads": 0}, "number of attention heads is 0"),
    ({"num_key_value_heads": 4}, "9 attention heads are not a multiple of 4"),
    ({"head_dim": 5}, "head dimension 5 is odd"),
    ({"num_hidden_layers": 0}, "num_hidden_layers is 0, expected 1 to"),
    ({"num_hidden_layers": 10**30}, "expected 1 to 10000"),
    ({"vocab_size": 1 << 31}, "vocabulary size is 2147483648, expected 1 to"),
    ({"rms_norm_eps": math.nan}, "rms_norm_eps is nan, expected a number"),
    ({"rope_theta": 10**400}, "rope_theta is 1000"),
    ({"hidden_act": ["silu"]}, "hidden_act ['silu'] is unknown"),
    ({"rope_freqs": 1}, "rope_freqs is 1, expected a list of numbers"),
    ({"rms_norm_eps": 0}, "epsilon is 0"),
    ({"hidden_act": "gelu"}, "hidden_act 'gelu' is unknown; known: silu"),
    ({"torch_dtype": "float8_e4m3fn"}, "dtype 'float8_e4m3fn' is unknown"),
    ({"eos_token_id": "</s>"}, "eos_token_id is '</s>'"),
    ({"eos_token_id": 300}, "end-of-sequence id 300 is outside the vocabulary of 300"),
    (
        {"quantization_config": {"quant_method": "bitsandbytes"}},
        "quantization_config.quant_method 'bitsandbytes' is not supported; known: 'awq', 'gptq',",
    ),
    ({"tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes', expected true or false"),
    ({"rope_scaling": {"rope_type": "ntk", "factor": 2}}, "rope type 'ntk' is unknown; known:"),
    ({"rope_scaling": {"rope_type": "yarn"}}, "factor is None, expected a number"),
    ({"rope_scaling": {"rope_type": "yarn", "factor": 2, "beta_slow": 64}}, "beta_slow <= beta"),
    ({"rope_scaling": {"rope_type": "yarn", "factor": math.nan}}, "factor is nan, expected"),
    ({"rope_scaling": {"rope_type": "yarn", "factor": 1e308}}, "context length is"),
    ({"rope_scaling": {**LONG_ROPE, "long_factor": "4"}}, "long_factor is '4', expected a list of"),
    ({"rope_scaling": {**LONG_ROPE, "long_factor": [4.0]}}, "long_factor has 1 elements, expected"),
    (
        {"rope_scaling": {**LONG_ROPE, "short_factor": [0, 1]}},
        "short_factor has an element that is",
    ),
    ({"rope_parameters": {"full_attention": {}}}, "rope_parameters is by layer type"),
    ({"clip_qkv": 8.0}, "clip_qkv 8.0 is not supported; known: None"),
    ({"use_parallel_residual": True}, "use_parallel_residual True is not supported"),
    ({"num_shared_experts": 1}, "num_shared_experts 1 is not supported"),
    ({"rope_scaling": "linear"}, "rope_scaling is 'linear', expected an object"),
    ({"rope_scaling": {"type": "linear"}}, "factor is None, expected a number"),
    (
        {"rope_scaling": {"type": "linear", "factor": -1}},
        "factor -1.0 and attention factor 1.0 must be",
    ),
    ({"rope_scaling": {**LLAMA3_ROPE, "high_freq_factor": 0.5}}, "low_freq_factor < high"),
    ({"partial_rotary_factor": 0.8}, "3 elements of a head of 4 are to be rotated"),
    ({"partial_rotary_factor": 1.5}, "partial_rotary_factor is 1.5, expected a number in (0, 1]"),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED, ids=lambda value: str(value)[:40])
def test_refuses_by_name(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelLoadError) as caught:
        read(tmp_path, **changes)
    assert str(caught.value).startswith(f"{tmp_path / 'config.json'}: ")
    assert message in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe", b"[" * 100_000])
@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_refuses_what_is_not_a_json_object(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config_json(TinySpec())))
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ModelLoadError, match=name):
        read_hf_config(tmp_path)


def test_the_docs_list_the_architectures() -> None:
    text = (Path(__file__).resolve().parents[2] / "docs/models.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \|[^|]*\| (?:`(\w+)`)? ?\|", text, re.M)
    told = {name: arch for name, arch in rows if name in ARCHITECTURES}
    assert told == {
        name: cls.gguf.architecture if cls.gguf is not None else ""
        for name, cls in ARCHITECTURES.items()
    }


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("Qwen2", {"use_sliding_window": 1}, "use_sliding_window is 1, expected true or false"),
        (
            "Qwen3",
            {"use_sliding_window": True, "layer_types": ["full_attention"]},
            "layer_types is",
        ),
        (
            "Gemma2",
            {"use_bidirectional_attention": True},
            "use_bidirectional_attention True is not",
        ),
        (
            "Gemma2",
            {"layer_types": ["chunked_attention"] * 2},
            "expected full_attention or sliding",
        ),
        ("Gemma2", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar is 0.0, expected above 0"),
        (
            "Gemma2",
            {"hidden_activation": "relu"},
            "hidden_activation 'relu' is unknown; known: silu",
        ),
        (
            "Gemma3",
            {"sliding_window_pattern": 0},
            "sliding_window_pattern is 0, expected at least 1",
        ),
        ("Gemma3", {"rope_local_base_freq": "x"}, "rope_local_base_freq is 'x', expected a number"),
        ("Gemma3ForConditionalGeneration", {}, "text_config is missing"),
        ("Mistral", {"sliding_window": 0}, "sliding window is 0, expected at least 1"),
        ("Mixtral", {"num_experts_per_tok": 9}, "9 experts for each token of 8 experts"),
        ("Qwen3Moe", {"decoder_sparse_step": 0}, "decoder_sparse_step is 0, expected above 0"),
        ("Qwen3Moe", {"moe_intermediate_size": 0}, "intermediate size of the experts is 0"),
        ("SmolLM3", {"no_rope_layers": [1]}, "no_rope_layers is [1], expected 0 or 1 for each"),
        ("Granite", {"residual_multiplier": 0}, "residual_multiplier is 0, expected 1e-9 to 1e9"),
        (
            "Phi3",
            {"rope_scaling": {"type": "su"}},
            "short_factor is None, expected a list of numbers",
        ),
    ],
)
def test_architectures_refuse_by_name(
    tmp_path: Path, name: str, changes: dict[str, Any], message: str
) -> None:
    spec = TinySpec(architecture=name if "For" in name else f"{name}ForCausalLM")
    with pytest.raises(ModelLoadError) as caught:
        read(tmp_path, spec, **changes)
    assert str(caught.value).startswith(f"{tmp_path / 'config.json'}: ")
    assert message in str(caught.value)


def test_both_spellings_of_gemma_3(tmp_path: Path) -> None:
    """As the hub has it (4B) and as transformers 5 saves it."""
    spec = TinySpec(architecture="Gemma3ForCausalLM", num_layers=7)
    old = read(
        tmp_path,
        spec,
        rope_theta=1e6,
        rope_local_base_freq=1e4,
        rope_scaling={"rope_type": "linear", "factor": 8.0},
        sliding_window=16,
        sliding_window_pattern=6,
    )
    new = read(
        tmp_path,
        spec,
        rope_theta=...,
        rope_scaling=...,
        rope_parameters={
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
        sliding_window=16,
        layer_types=[*["sliding_attention"] * 5, "full_attention", "sliding_attention"],
    )
    assert old == new
    assert {layer.window for layer in old.layers} == {16, None}


def test_phi_says_its_original_context_beside_the_factors(tmp_path: Path) -> None:
    from transformers import AutoConfig
    from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding

    factors = {key: LONG_ROPE[key] for key in ("short_factor", "long_factor")}
    changes = {
        "model_type": "phi3",
        "rope_scaling": {"type": "longrope", **factors},
        "original_max_position_embeddings": 64,
    }
    spec = TinySpec(architecture="Phi3ForCausalLM")
    rope = read(tmp_path, spec, **changes, pad_token_id=0).layers[0].rope
    theirs: Any = Phi3RotaryEmbedding(AutoConfig.from_pretrained(tmp_path))
    assert rope.original_max_positions == 64
    assert rope.attention_factor == pytest.approx(theirs.attention_scaling)
    for length in (64, 65):
        cos, _ = theirs(torch.ones(1), torch.arange(length).unsqueeze(0))
        table = cos_sin_table(rope, 4, length)
        torch.testing.assert_close(table[:, :2], cos[0, :, :2], rtol=0, atol=1e-5)
