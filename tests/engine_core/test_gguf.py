"""GGUF: weights as the same model has them in safetensors, and which tensor a refusal names."""

from __future__ import annotations

import dataclasses
import struct
from typing import TYPE_CHECKING

import gguf
import numpy as np
import pytest
import torch

from engine_core.model.config import RopeConfig
from engine_core.model.gguf_checkpoint import GgufCheckpoint
from engine_core.model.gguf_config import read_gguf_config
from engine_core.model.gguf_tensors import can_dequantize, read_small_tensor, read_tensor_into
from engine_core.model.loader import open_model
from engine_core.model.rope import inverse_frequencies
from pagewire.errors import ModelLoadError
from pagewire.gguf_file import GgufFile
from pagewire.model_source import resolve_model
from tests.support.tiny_model import LLAMA3_ROPE, TinySpec, tiny_weights, write_gguf

if TYPE_CHECKING:
    from pathlib import Path

    from engine_core.model.loader import OpenedModel

# Columns divide into blocks of 32, heads are odd in number.
SPEC = TinySpec(hidden_size=288, intermediate_size=96, attention_bias=True)


def open_path(path: Path) -> OpenedModel:
    return open_model(resolve_model(str(path)))


def read(checkpoint: GgufCheckpoint, name: str) -> torch.Tensor:
    out = torch.empty(checkpoint.shapes()[name])
    checkpoint.read_into(name, out)
    return out


@pytest.fixture
def f32(tmp_path: Path) -> Path:
    return write_gguf(tmp_path / "tiny.gguf", SPEC)


@pytest.mark.parametrize(
    ("kind", "least_cosine"),
    [("F32", None), ("F16", None), ("BF16", None), ("Q8_0", 0.999), ("Q5_1", 0.99), ("Q4_0", 0.98)],
)
def test_weights_equal_safetensors(tmp_path: Path, kind: str, least_cosine: float | None) -> None:
    """huggingface/transformers#31766: q and k rows are permuted for interleaved rope."""
    file = GgufFile(write_gguf(tmp_path / "tiny.gguf", SPEC, kind))
    checkpoint = GgufCheckpoint(file, SPEC.real_head_dim)
    expected = tiny_weights(SPEC)
    assert set(checkpoint.shapes()) == set(expected)
    stored = {"F16": torch.float16, "BF16": torch.bfloat16}.get(kind, torch.float32)
    for name, tensor in expected.items():
        ours = read(checkpoint, name)
        if least_cosine is None or tensor.ndim == 1:
            dtype = torch.float32 if tensor.ndim == 1 else stored
            assert torch.equal(ours, tensor.to(dtype).float()), name
        else:
            cosine = torch.cosine_similarity(ours.flatten(), tensor.flatten(), dim=0)
            assert cosine > least_cosine, (name, cosine)


@pytest.mark.parametrize("kind", ["F16", "Q8_0", "Q4_1"])
def test_weights_equal_what_transformers_reads(tmp_path: Path, kind: str) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    spec = dataclasses.replace(SPEC, attention_bias=False)
    path = write_gguf(tmp_path / "tiny.gguf", spec, kind)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=300,
            hidden_size=288,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=9,
            num_key_value_heads=3,
        )
    )
    theirs = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)["tensors"]
    checkpoint = GgufCheckpoint(GgufFile(path), spec.real_head_dim)
    assert set(theirs) == set(checkpoint.shapes())
    for name, tensor in theirs.items():
        assert torch.equal(read(checkpoint, name), tensor.float()), name


def test_config(f32: Path) -> None:
    config = open_path(f32).config
    assert config.architecture == "LlamaForCausalLM"
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (9, 3, 32)
    assert (config.hidden_size, config.intermediate_size, config.num_layers) == (288, 96, 2)
    assert (config.vocab_size, config.max_positions) == (300, 512)
    assert config.rms_norm_eps == pytest.approx(1e-5)
    assert (config.bos_token_id, config.eos_token_ids) == (0, (1,))
    assert (config.tie_embeddings, config.qkv_bias, config.mlp_bias) == (False, True, False)
    assert config.dtype == "float32"


def test_head_dim_from_key_length_and_tied_head(tmp_path: Path) -> None:
    spec = TinySpec(hidden_size=64, num_heads=4, num_kv_heads=2, head_dim=24, tie_embeddings=True)
    config = open_path(write_gguf(tmp_path / "tiny.gguf", spec)).config
    assert (config.head_dim, config.tie_embeddings) == (24, True)


def test_llama3_rope_comes_as_divisors(tmp_path: Path) -> None:
    """llama.cpp stores llama3 scaling as one divisor for each frequency."""
    spec = TinySpec(hidden_size=288)
    llama3 = RopeConfig(
        rope_type="llama3",
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_positions=32,
    )
    assert llama3.factor == LLAMA3_ROPE["factor"]
    scaled = inverse_frequencies(llama3, 32)
    divisors = inverse_frequencies(RopeConfig(), 32) / scaled
    path = write_gguf(tmp_path / "tiny.gguf", spec, rope_freqs=divisors.numpy())
    opened = open_path(path)
    torch.testing.assert_close(
        inverse_frequencies(opened.config.layers[0].rope, 32), scaled, rtol=1e-6, atol=0
    )
    assert "rope_freqs.weight" not in opened.checkpoint.shapes()


def test_wrong_number_of_rope_divisors(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", SPEC, rope_freqs=np.ones(15))
    with pytest.raises(ModelLoadError, match="15 elements, expected 16"):
        open_path(path)


DEQUANTIZABLE = sorted(
    {"F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K"}
    | {"Q6_K", "IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_NL"}
    | {"IQ4_XS", "TQ1_0", "TQ2_0", "MXFP4"}
)


@pytest.mark.parametrize("kind", DEQUANTIZABLE)
def test_reads_each_type_as_the_gguf_package_does(tmp_path: Path, kind: str) -> None:
    """In pieces, through our header and offsets, against one whole dequantization."""
    qtype = gguf.GGMLQuantizationType[kind]
    block, block_bytes = gguf.GGML_QUANT_SIZES[qtype]
    rows, columns = 40, 1024
    rng = np.random.default_rng(5)
    raw = rng.integers(0, 256, (rows, columns // block * block_bytes), dtype=np.uint8)
    # The low bit patterns of each scale: no NaN, no infinity.
    raw &= 0x3B
    path = tmp_path / "one.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("pad", np.ones(3, np.float32))
    writer.add_tensor("w", raw, raw_dtype=qtype)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = GgufFile(path)
    out = torch.empty(rows, columns)
    read_tensor_into(file, file.tensors["w"], out)
    expected = np.asarray(gguf.dequantize(raw, qtype), np.float32).reshape(rows, columns)
    assert np.isfinite(expected).all()
    assert np.abs(expected).max() > 0
    np.testing.assert_array_equal(out.numpy(), expected)


def test_every_type_that_gguf_dequantizes_is_in_that_list() -> None:
    known = {kind.name for kind in gguf.GGMLQuantizationType if can_dequantize(kind.value)}
    assert known >= set(DEQUANTIZABLE)
    assert not {"I8", "I32", "Q8_1", "Q8_K"} & known
    assert not can_dequantize(9999)


def test_long_arrays_are_stepped_over(tmp_path: Path) -> None:
    file = GgufFile(write_gguf(tmp_path / "t.gguf", TinySpec(vocab_size=2000, hidden_size=72)))
    assert file.metadata["tokenizer.ggml.tokens"] is None
    assert file.metadata["tokenizer.ggml.token_type"] is None
    assert file.metadata["tokenizer.ggml.eos_token_id"] == 1
    assert read_small_tensor(file, "output_norm.weight").shape == (72,)


@pytest.mark.parametrize("keep", [5, 20, 300, 5000])
def test_header_cut_off(f32: Path, keep: int) -> None:
    f32.write_bytes(f32.read_bytes()[:keep])
    with pytest.raises(ModelLoadError, match=r"tiny\.gguf: header is cut off at byte"):
        open_path(f32)


def test_tensor_cut_off(f32: Path) -> None:
    data = f32.read_bytes()
    f32.write_bytes(data[: len(data) // 2])
    with pytest.raises(ModelLoadError, match=r"is cut off: tensor \S+ ends at byte"):
        open_path(f32)


def test_lying_lengths_end_in_an_error_and_not_in_a_loop(f32: Path) -> None:
    data = bytearray(f32.read_bytes())
    data[16:24] = struct.pack("<Q", 1 << 60)  # number of key-value pairs
    f32.write_bytes(data)
    with pytest.raises(ModelLoadError, match=r"tiny\.gguf"):
        open_path(f32)


@pytest.mark.parametrize("version", [1, 4, 0x03000000])
def test_unknown_version(f32: Path, version: int) -> None:
    data = bytearray(f32.read_bytes())
    data[4:8] = struct.pack("<I", version)
    f32.write_bytes(data)
    with pytest.raises(ModelLoadError, match=f"GGUF version {version} is unknown"):
        open_path(f32)


def test_not_a_gguf_file(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"PK\x03\x04 something else")
    with pytest.raises(ModelLoadError, match="not a GGUF file"):
        open_path(path)
    path.write_bytes(b"")
    with pytest.raises(ModelLoadError, match=r"model\.gguf"):
        open_path(path)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        (
            "general.architecture",
            "falcon",
            "architecture 'falcon' is unknown; known in GGUF: gemma2, gemma3, granite, llama",
        ),
        ("llama.embedding_length", None, "llama.embedding_length is missing"),
        ("llama.embedding_length", "288", "llama.embedding_length is '288', expected an integer"),
        ("llama.attention.head_count", [9, 9], "is [9, 9], expected an integer"),
        ("llama.expert_count", 8, "llama.expert_used_count is missing"),
        ("llama.expert_shared_count", 1, "llama.expert_shared_count 1 is not supported"),
        ("split.count", 3, "one of 3 parts"),
        ("llama.rope.dimension_count", 16, "rope dimension count 16 differ"),
        ("llama.rope.scaling.type", "ntk", "rope type 'ntk' is unknown"),
        ("llama.rope.scaling.type", "yarn", "llama.rope.scaling.factor is None, expected a number"),
    ],
)
def test_refused_metadata(f32: Path, key: str, value: str | int | None, message: str) -> None:
    file = GgufFile(f32)
    file.metadata[key] = value  # type: ignore[assignment]
    with pytest.raises(ModelLoadError) as caught:
        read_gguf_config(file)
    assert str(caught.value).startswith(f"{f32}: ")
    assert message in str(caught.value)


def test_type_that_cannot_be_dequantized(f32: Path) -> None:
    data = f32.read_bytes()
    name = b"blk.1.ffn_down.weight"
    at = data.index(name) + len(name) + 4 + 2 * 8
    assert struct.unpack_from("<I", data, at) == (0,)
    f32.write_bytes(data[:at] + struct.pack("<I", gguf.GGMLQuantizationType.Q8_K) + data[at + 4 :])
    with pytest.raises(ModelLoadError, match=r"tensor blk\.1\.ffn_down\.weight has Q8_K, which"):
        open_path(f32)


def test_missing_tensor(f32: Path) -> None:
    data = f32.read_bytes()
    f32.write_bytes(data.replace(b"blk.1.ffn_up.weight", b"blk.1.ffn_xx.weight"))
    with pytest.raises(ModelLoadError, match=r"tensor model\.layers\.1\.mlp\.up_proj\.weight"):
        open_path(f32)
