"""Matrices kept quantized: which are, what they give, and what the engine says of it."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from engine_core.device.cpu import CpuDevice
from engine_core.engine_builder import build_engine
from engine_core.model.embedding import PackedEmbedding
from engine_core.model.gguf_checkpoint import GgufCheckpoint
from engine_core.model.loader import load_model, open_model
from engine_core.model.quantization import describe_computation, resolve_quantization
from kernels.quantized import dequantize
from pagewire.config import EngineConfig
from pagewire.errors import ConfigError
from pagewire.gguf_file import GgufFile
from pagewire.model_source import resolve_model
from tests.parity.harness import Loaded
from tests.support.cpu_kernels import best_cpu_ops
from tests.support.quantized_checkpoints import awq_tensors, round_to_codes, write_quantized
from tests.support.smollm2 import embedded_gguf
from tests.support.tiny_architectures import TinyArchitecture, make_model
from tests.support.tiny_gguf import write_gguf as write_tiny_gguf
from tests.support.tiny_model import TinySpec, tiny_weights, write_gguf, write_hf
from tokenizer_svc.loader import load_tokenizer

if TYPE_CHECKING:
    from pathlib import Path

    from engine_core.model.quantization import Quantization

# Columns divide into blocks of 32; q, k and v rows into groups of 16.
SPEC = TinySpec(hidden_size=288, intermediate_size=96, num_heads=9, num_kv_heads=3)
LEAST_COSINE = 0.99
"""Of logits: random layers amplify the roundings; rows or features astray give about 0."""
PROMPT = [5, 77, 130, 2, 99, 18, 201, 64, 33, 250, 7, 7, 41]


def load(path: Path, quantization: Quantization) -> Loaded:
    ops = best_cpu_ops()
    device = CpuDevice("64MiB", 1)
    opened = open_model(resolve_model(str(path)))
    model = load_model(
        opened, ops, device.torch_device, torch.float32, 64, lambda *_: None, quantization
    )
    return Loaded(model, opened.config, ops, device, 64)


def assert_close(actual: torch.Tensor, expected: torch.Tensor, least_cosine: float) -> None:
    cosines = torch.cosine_similarity(actual, expected, dim=-1)
    assert float(cosines.min()) > least_cosine, cosines


# What is computed


def resolve(
    quantization: str,
    stored: str,
    dtype: str = "auto",
    *,
    computes: bool = True,
    kinds: set[str] | None = None,
    multiplies: bool = False,
) -> Quantization:
    """kinds: of a Hugging Face checkpoint's codes, else it has none. multiplies: int4, fp8."""
    scheme = None if kinds is None else SimpleNamespace(kinds=kinds)
    opened: Any = SimpleNamespace(
        config=SimpleNamespace(dtype=stored, quantization=scheme),
        source=SimpleNamespace(path="m.gguf"),
    )
    ops: Any = SimpleNamespace(
        name="cpu",
        computes_quantized=computes,
        computes_int4=multiplies,
        computes_fp8=multiplies,
    )
    config = EngineConfig(quantization=quantization, dtype=dtype)  # type: ignore[arg-type]
    return resolve_quantization(config, opened, ops)


@pytest.mark.parametrize(
    ("dtype", "stored", "computes", "expected"),
    [
        ("auto", "quantized", True, "packed"),
        ("auto", "quantized", False, "none"),
        ("auto", "bfloat16", True, "none"),
        ("float32", "quantized", True, "none"),
        ("bfloat16", "quantized", True, "none"),
    ],
)
def test_auto_packs_what_is_packed_unless_a_dtype_is_asked_for(
    dtype: str, stored: str, computes: bool, expected: str
) -> None:
    assert resolve("auto", stored, dtype, computes=computes) == expected


def test_what_is_asked_for_is_done() -> None:
    for dtype in ("auto", "float32", "bfloat16"):
        assert resolve("packed", "quantized", dtype) == "packed"
        for stored in ("quantized", "float16"):
            assert resolve("int8", stored, dtype) == "int8"
            assert resolve("none", stored, dtype) == "none"


def test_nothing_is_packed_that_is_stored_as_floats() -> None:
    with pytest.raises(ConfigError, match=r"--quantization packed: m\.gguf holds float16 weights"):
        resolve("packed", "float16")


@pytest.mark.parametrize(
    ("kinds", "dtype", "computes", "multiplies", "expected"),
    [
        ({"int4"}, "auto", True, False, "packed"),
        ({"int8", "fp8"}, "auto", True, False, "packed"),
        ({"int4"}, "bfloat16", True, False, "none"),
        ({"int4"}, "auto", False, False, "none"),
        ({"fp8"}, "auto", True, False, "none"),
        ({"int4"}, "float16", False, True, "packed"),
        ({"fp8"}, "auto", False, True, "packed"),
        ({"int4"}, "float32", False, True, "none"),
        ({"int8"}, "auto", False, True, "none"),
    ],
)
def test_auto_computes_codes_where_a_kernel_does(
    kinds: set[str], dtype: str, computes: bool, multiplies: bool, expected: str
) -> None:
    resolved = resolve(
        "auto", "float16", dtype, computes=computes, kinds=kinds, multiplies=multiplies
    )
    assert resolved == expected


@pytest.mark.parametrize("name", ["int4", "fp8"])
def test_codes_that_no_kernel_multiplies_are_not_made(name: str) -> None:
    assert resolve(name, "float16", multiplies=True) == name
    with pytest.raises(ConfigError, match=f"--quantization {name}: the cpu kernels have no such"):
        resolve(name, "float16")


def test_description() -> None:
    assert describe_computation("bfloat16", "none", ()) == "bfloat16"
    assert describe_computation("bfloat16", "packed", {"Q8_0", "Q4_1"}) == (
        "bfloat16 with Q4_1+Q8_0 weights"
    )
    assert describe_computation("float32", "int8", {"Q8_0"}) == "float32 with int8 weights"
    assert describe_computation("float32", "int8", ()) == "float32"


# Reading


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_codes_have_the_row_order_of_the_floats(tmp_path: Path, kind: str) -> None:
    checkpoint = GgufCheckpoint(
        GgufFile(write_gguf(tmp_path / "tiny.gguf", SPEC, kind)), SPEC.real_head_dim
    )
    for name, shape in checkpoint.shapes().items():
        if len(shape) == 1:
            assert checkpoint.quantized_format(name) == "F32"
            continue
        floats = torch.empty(shape)
        checkpoint.read_into(name, floats)
        assert checkpoint.quantized_format(name) == kind
        assert torch.equal(dequantize(checkpoint.read_quantized(name, floats.device)), floats), name


# Models


@pytest.mark.parametrize("kind", ["Q4_1", "Q5_0", "Q8_0"])
def test_packed_logits_are_those_of_the_dequantized_model(tmp_path: Path, kind: str) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", SPEC, kind)
    floats, packed = load(path, "none"), load(path, "packed")
    assert packed.model.quantized_formats == {kind}
    assert floats.model.quantized_formats == frozenset()
    assert_close(packed.logits(PROMPT), floats.logits(PROMPT), LEAST_COSINE)


def test_decoding_gives_the_logits_of_the_whole_prompt(tmp_path: Path) -> None:
    """A row's result does not depend on the rows beside it, whatever the attention's order."""
    loaded = load(write_gguf(tmp_path / "tiny.gguf", SPEC, "Q4_0"), "packed")
    whole = loaded.logits(PROMPT)
    assert torch.allclose(loaded.logits(PROMPT[:1])[0], whole[0], atol=1e-4)


def test_formats_mix_within_a_fused_product(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kinds = {"v_proj": "Q8_0", "down_proj": "Q5_1", "o_proj": "F16", "embed_tokens": "Q5_0"}
    path = write_gguf(tmp_path / "tiny.gguf", SPEC, "Q4_1", kinds=kinds)
    with caplog.at_level(logging.WARNING):
        packed = load(path, "packed")
    assert packed.model.quantized_formats == {"Q4_1", "Q8_0", "Q5_1", "Q5_0"}
    (record,) = caplog.records
    assert "2 matrices are computed as floats (stored as F16), the first: " in record.getMessage()
    assert "model.layers.0.self_attn.o_proj.weight" in record.getMessage()
    assert_close(packed.logits(PROMPT), load(path, "none").logits(PROMPT), LEAST_COSINE)


def test_a_tied_head_is_the_embeddings_memory(tmp_path: Path) -> None:
    spec = TinySpec(hidden_size=288, intermediate_size=96, tie_embeddings=True)
    path = write_gguf(tmp_path / "tiny.gguf", spec, "Q8_0")
    packed = load(path, "packed")
    assert isinstance(packed.model._embedding, PackedEmbedding)
    assert packed.model._head is packed.model._embedding.table
    assert_close(packed.logits(PROMPT), load(path, "none").logits(PROMPT), LEAST_COSINE)


def test_int8_of_a_float_checkpoint(tmp_path: Path) -> None:
    path = write_hf(tmp_path / "model", TinySpec(hidden_size=288, intermediate_size=96))
    quantized = load(path, "int8")
    assert quantized.model.quantized_formats == {"Q8_0"}
    assert_close(quantized.logits(PROMPT), load(path, "none").logits(PROMPT), LEAST_COSINE)


def test_biases_are_kept(tmp_path: Path) -> None:
    spec = TinySpec(hidden_size=288, intermediate_size=96, attention_bias=True, mlp_bias=True)
    path = write_hf(tmp_path / "model", spec)
    assert_close(load(path, "int8").logits(PROMPT), load(path, "none").logits(PROMPT), LEAST_COSINE)


def test_widths_that_do_not_divide_are_floats_and_said_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write_hf(tmp_path / "model", TinySpec(hidden_size=96, intermediate_size=50, num_heads=3))
    with caplog.at_level(logging.WARNING):
        quantized = load(path, "int8")
    (record,) = caplog.records
    assert "2 matrices are computed as floats (50 input features are no multiple of 32)" in (
        record.getMessage()
    )
    assert_close(quantized.logits(PROMPT), load(path, "none").logits(PROMPT), LEAST_COSINE)


def test_experts_stay_floats_and_it_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sizes = {"hidden_size": 96, "intermediate_size": 64, "num_local_experts": 3}
    tiny = TinyArchitecture("Mixtral", sizes)
    path = write_tiny_gguf(make_model(tiny), tmp_path / "tiny.gguf", "Q8_0")
    with caplog.at_level(logging.WARNING):
        packed = load(path, "packed")
    assert packed.model.quantized_formats == {"Q8_0"}
    (record,) = caplog.records
    assert "18 matrices are computed as floats (of a mixture of experts)" in record.getMessage()
    prompt = [token % 160 for token in PROMPT]
    assert_close(packed.logits(prompt), load(path, "none").logits(prompt), LEAST_COSINE)


def test_progress_counts_all_bytes(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", SPEC, "Q4_0")
    opened = open_model(resolve_model(str(path)))
    calls: list[tuple[int, int]] = []
    load_model(
        opened,
        best_cpu_ops(),
        torch.device("cpu"),
        torch.float32,
        64,
        lambda done, total: calls.append((done, total)),
        "packed",
    )
    size = sum(opened.checkpoint.num_bytes(name) for name in tiny_weights(SPEC))
    assert calls[-1] == (size, size)


def test_the_embedded_model_predicts_as_in_float32() -> None:
    text = (
        "The sun is a star at the centre of our solar system. Its light takes about eight "
        "minutes to reach the Earth, and without it there would be no life on this planet."
    )
    tokenizer = load_tokenizer(embedded_gguf()).tokenizer
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    floats, packed = (
        torch.log_softmax(load(embedded_gguf(), mode).logits(ids), dim=-1)
        for mode in ("none", "packed")
    )
    divergence = (floats.exp() * (floats - packed)).sum(dim=-1).mean()
    assert len(ids) > 30
    assert float(divergence) < 0.01


# The engine


def build(path: Path, **changes: Any) -> Any:
    config = EngineConfig(
        model=str(path),
        device="cpu",
        cpu_threads=1,
        kv_cache_memory="4MiB",
        max_num_seqs=8,
        **changes,
    )
    return build_engine(config, lambda *_: None)


def test_engine_says_what_it_computes(tmp_path: Path) -> None:
    best_cpu_ops()
    path = write_gguf(tmp_path / "tiny.gguf", SPEC, "Q8_0")
    assert build(path, quantization="packed", dtype="float32").dtype == "float32 with Q8_0 weights"
    assert build(path, quantization="int8", dtype="bfloat16").dtype == "bfloat16 with int8 weights"
    assert build(path, dtype="float32").dtype == "float32"
    assert build(path, quantization="none", dtype="bfloat16").dtype == "bfloat16"


def test_engine_computes_a_checkpoints_codes(tmp_path: Path) -> None:
    def encode(module: str, weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        rounded = round_to_codes(weight, 4, 32, symmetric=False)
        return awq_tensors(module, rounded), rounded.dense()

    best_cpu_ops()
    config = {"quant_method": "awq", "bits": 4, "group_size": 32}
    path, _ = write_quantized(tmp_path, SPEC, config, encode)
    assert build(path, quantization="packed", dtype="bfloat16").dtype == (
        "bfloat16 with awq int4 weights"
    )
    assert build(path, dtype="float32").dtype == "float32"
    assert build(path, quantization="int8", dtype="float32").dtype == "float32 with int8 weights"


def test_engine_refuses_to_pack_floats(tmp_path: Path) -> None:
    path = write_hf(tmp_path / "model", TinySpec())
    with pytest.raises(ConfigError, match="--quantization packed"):
        build(path, quantization="packed")
