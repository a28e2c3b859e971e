"""Configurations: what config.json and generation_config.json say, and what is refused."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import TYPE_CHECKING, Any

import pytest
import torch

from engine_core.model.config import RopeConfig, check_window
from engine_core.model.hf_config import read_hf_config
from engine_core.model.rope import inverse_frequencies
from pagewire.errors import ModelLoadError
from tests.support.tiny_model import LINEAR_ROPE, LLAMA3_ROPE, TinySpec, config_json

if TYPE_CHECKING:
    from pathlib import Path


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
        "num_layers": 2,
        "num_heads": 9,
        "num_kv_heads": 3,
        "head_dim": 6,
        "vocab_size": 300,
        "rms_norm_eps": 1e-5,
        "max_positions": 512,
        "rope": dataclasses.asdict(RopeConfig()),
        "tie_embeddings": True,
        "attention_bias": True,
        "mlp_bias": False,
        "sliding_window": None,
        "bos_token_id": 0,
        "eos_token_ids": (1,),
        "dtype": "bfloat16",
        "default_sampling": {},
    }


def test_absent_keys_mean_the_class_defaults_of_transformers(tmp_path: Path) -> None:
    from transformers import LlamaConfig, MistralConfig

    for name, cls in (("LlamaForCausalLM", LlamaConfig), ("MistralForCausalLM", MistralConfig)):
        (tmp_path / "config.json").write_text(json.dumps({"architectures": [name]}))
        ours, theirs = read_hf_config(tmp_path), cls()
        assert ours.hidden_size == theirs.hidden_size
        assert ours.intermediate_size == theirs.intermediate_size
        assert ours.num_layers == theirs.num_hidden_layers
        assert ours.num_heads == theirs.num_attention_heads
        assert ours.num_kv_heads == theirs.num_key_value_heads
        assert ours.head_dim == theirs.head_dim
        assert ours.vocab_size == theirs.vocab_size
        assert ours.max_positions == theirs.max_position_embeddings
        assert ours.rms_norm_eps == theirs.rms_norm_eps
        assert ours.tie_embeddings == theirs.tie_word_embeddings
        assert ours.sliding_window == getattr(theirs, "sliding_window", None)
        assert ours.bos_token_id == theirs.bos_token_id
        assert ours.eos_token_ids == (theirs.eos_token_id,)
        assert ours.rope.theta == theirs.rope_parameters["rope_theta"]


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
    {"rope_theta": ..., "rope_scaling": ..., "rope_parameters": {"rope_theta": 5e5}},
]


@pytest.mark.parametrize("spelling", ROPE_SPELLINGS)
def test_frequencies_equal_transformers(tmp_path: Path, spelling: dict[str, Any]) -> None:
    """ggml-org/llama.cpp#8676: a table built from theta alone is right for short text only."""
    from transformers import AutoConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = read(tmp_path, TinySpec(hidden_size=288, num_heads=9), **spelling)
    theirs = LlamaRotaryEmbedding(AutoConfig.from_pretrained(tmp_path)).inv_freq
    assert isinstance(theirs, torch.Tensor)
    torch.testing.assert_close(
        inverse_frequencies(config.rope, config.head_dim), theirs, rtol=1e-6, atol=0
    )


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"architectures": ["GPTNeoXForCausalLM"]}, "'GPTNeoXForCausalLM' is unknown; known: Llama"),
    ({"architectures": ...}, "architectures is None"),
    ({"architectures": []}, "architectures is []"),
    ({"hidden_size": "64"}, "hidden_size is '64', expected an integer"),
    ({"hidden_size": None}, "hidden_size is missing"),
    ({"num_attention_heads": 0}, "number of attention heads is 0"),
    ({"num_key_value_heads": 4}, "9 attention heads are not a multiple of 4"),
    ({"head_dim": 5}, "head dimension 5 is odd"),
    ({"rms_norm_eps": 0}, "epsilon is 0"),
    ({"hidden_act": "gelu"}, "hidden_act 'gelu' is unknown; known: silu"),
    ({"torch_dtype": "float8_e4m3fn"}, "dtype 'float8_e4m3fn' is unknown"),
    ({"eos_token_id": "</s>"}, "eos_token_id is '</s>'"),
    ({"eos_token_id": 300}, "end-of-sequence id 300 is outside the vocabulary of 300"),
    ({"quantization_config": {"quant_method": "gptq"}}, "quant_method 'gptq' is not supported"),
    ({"tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes', expected true or false"),
    ({"rope_scaling": {"rope_type": "yarn", "factor": 2}}, "rope type 'yarn' is unknown; known:"),
    ({"rope_scaling": "linear"}, "rope_scaling is 'linear', expected an object"),
    ({"rope_scaling": {"type": "linear"}}, "factor is None, expected a number"),
    ({"rope_scaling": {"type": "linear", "factor": -1}}, "factor -1.0 must be above 0"),
    ({"rope_scaling": {**LLAMA3_ROPE, "high_freq_factor": 0.5}}, "low_freq_factor < high"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5 is not supported"),
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


def test_sliding_window(tmp_path: Path) -> None:
    spec = TinySpec(architecture="MistralForCausalLM", sliding_window=32)
    config = read(tmp_path, spec)
    check_window(config, 32, "here")
    with pytest.raises(ModelLoadError, match="sliding_window 32 is not served at a context of 33"):
        check_window(config, 33, "here")
    check_window(read(tmp_path, TinySpec(architecture="MistralForCausalLM")), 512, "here")
