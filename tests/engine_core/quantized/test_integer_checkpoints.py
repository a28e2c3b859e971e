"""AWQ and GPTQ checkpoints: what they mean, in floats and computed by their codes."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import pytest
import torch

from engine_core.model.loader import load_model, open_model
from engine_core.model.quantized.codes import IntegerCodes, NoPackedForm
from kernels.quantized import QuantizedTensor, dequantize
from pagewire.model_source import resolve_model
from tests.parity.harness import Engine
from tests.support.coded_models import (
    NUM_TOKENS,
    PROMPTS,
    SPEC,
    assert_close,
    assert_same_model,
    assert_same_weights,
    codes_of,
    load,
    matrices_of,
)
from tests.support.cpu_kernels import REFERENCE, best_cpu_ops
from tests.support.quantized_checkpoints import (
    awq_tensors,
    gptq_tensors,
    round_to_codes,
    write_quantized,
)

if TYPE_CHECKING:
    from pathlib import Path

    from kernels.int4 import Int4Tensor


def awq_config(group_size: int) -> dict[str, Any]:
    return {
        "quant_method": "awq",
        "bits": 4,
        "group_size": group_size,
        "zero_point": True,
        "version": "gemm",
        "modules_to_not_convert": None,
    }


def gptq_config(bits: int, group_size: int, stored: str, **changes: Any) -> dict[str, Any]:
    return {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": group_size,
        "desc_act": False,
        "sym": False,
        "damp_percent": 0.01,
        "static_groups": False,
        "true_sequential": True,
        "checkpoint_format": stored,
        **changes,
    }


def write_awq(directory: Path, group_size: int = 128, **changes: Any) -> tuple[Path, Path]:
    def encode(module: str, weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        rounded = round_to_codes(weight, 4, group_size, symmetric=False)
        return awq_tensors(module, rounded), rounded.dense()

    floats = changes.pop("floats", ())
    return write_quantized(directory, SPEC, awq_config(group_size) | changes, encode, floats=floats)


def write_gptq(
    directory: Path,
    *,
    bits: int = 4,
    group_size: int = 128,
    stored: str = "gptq",
    symmetric: bool = False,
    act_order: bool = False,
    **changes: Any,
) -> tuple[Path, Path]:
    def encode(module: str, weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        # As GPTQ finds it, all that see the same input have one order.
        rounded = round_to_codes(weight, bits, group_size, symmetric=symmetric, act_order=act_order)
        tensors = gptq_tensors(module, rounded, bits, less_one=stored == "gptq")
        return tensors, rounded.dense()

    config = gptq_config(bits, group_size, stored, sym=symmetric, desc_act=act_order, **changes)
    return write_quantized(directory, SPEC, config, encode)


# Floats


@pytest.mark.parametrize("group_size", [32, 64, -1])
def test_awq_weights(tmp_path: Path, group_size: int) -> None:
    assert_same_weights(*write_awq(tmp_path, group_size))


def test_awq_is_what_transformers_makes_of_its_weights(tmp_path: Path) -> None:
    assert_same_model(*write_awq(tmp_path))


@pytest.mark.parametrize("stored", ["gptq", "gptq_v2"])
@pytest.mark.parametrize(("bits", "group_size"), [(4, 64), (4, 128), (4, -1), (8, 64)])
def test_gptq_weights(tmp_path: Path, stored: str, bits: int, group_size: int) -> None:
    assert_same_weights(*write_gptq(tmp_path, bits=bits, group_size=group_size, stored=stored))


@pytest.mark.parametrize("act_order", [False, True])
def test_both_conventions_of_zeros_are_one_model(tmp_path: Path, act_order: bool) -> None:
    """A mix-up shifts every weight by a scale (vllm-project/vllm#26343)."""
    options: dict[str, Any] = {"group_size": 32, "act_order": act_order}
    first, dense = write_gptq(tmp_path / "v1", stored="gptq", **options)
    second, _ = write_gptq(tmp_path / "v2", stored="gptq_v2", **options)
    one, other = matrices_of(first), matrices_of(second)
    for name, matrix in one.items():
        assert torch.equal(matrix, other[name]), name
    assert_same_model(first, dense)
    tokens = Engine(load(first, "none")).generate(PROMPTS, NUM_TOKENS)
    assert tokens == Engine(load(second, "none")).generate(PROMPTS, NUM_TOKENS)


def test_a_zero_of_0_is_15_when_stored_less_one(tmp_path: Path) -> None:
    def encode(module: str, weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        rounded = round_to_codes(weight.abs() + 1, 4, 32, symmetric=False)
        assert not rounded.zeros.any()
        return gptq_tensors(module, rounded, 4, less_one=True), rounded.dense()

    assert_same_weights(*write_quantized(tmp_path, SPEC, gptq_config(4, 32, "gptq"), encode))


def test_modules_not_converted_are_the_floats_they_are(tmp_path: Path) -> None:
    names = ["self_attn.v_proj", "layers.1.mlp"]
    floats = ("v_proj", "layers.1.mlp")
    coded, dense = write_awq(tmp_path, modules_to_not_convert=names, floats=floats)
    assert_same_model(coded, dense)


# Codes


@pytest.mark.parametrize(("symmetric", "wanted"), [(True, "Q4_0"), (False, "Q5_0")])
def test_4_bits_keep_every_bit_in_blocks(tmp_path: Path, symmetric: bool, wanted: str) -> None:
    coded, dense = write_gptq(tmp_path, symmetric=symmetric)
    meant = matrices_of(dense)
    for name, codes in codes_of(coded).items():
        blocks = codes.to_blocks()
        assert blocks.format == wanted
        assert torch.equal(dequantize(blocks), meant[name]), name
        assert torch.equal(codes.to_int4().dequantize(), meant[name]), name
        assert (codes.to_int4().zeros is None) == symmetric


def test_8_bits_keep_every_bit_in_blocks_if_symmetric(tmp_path: Path) -> None:
    coded, dense = write_gptq(tmp_path / "symmetric", bits=8, symmetric=True)
    meant = matrices_of(dense)
    for name, codes in codes_of(coded).items():
        assert codes.to_blocks().format == "Q8_0"
        assert torch.equal(dequantize(codes.to_blocks()), meant[name]), name
        with pytest.raises(NoPackedForm, match="more than 4 bits"):
            codes.to_int4()
    coded, _ = write_gptq(tmp_path / "asymmetric", bits=8, symmetric=False)
    with pytest.raises(NoPackedForm, match="8-bit codes with zeros"):
        next(iter(codes_of(coded).values())).to_blocks()


def test_act_order_is_a_permutation_of_int4(tmp_path: Path) -> None:
    coded, dense = write_gptq(tmp_path, act_order=True, group_size=32)
    meant = matrices_of(dense)
    for name, codes in codes_of(coded).items():
        tensor = codes.to_int4()
        assert tensor.perm is not None
        assert torch.equal(tensor.dequantize(), meant[name]), name
        with pytest.raises(NoPackedForm, match="act-order"):
            codes.to_blocks()


def test_scales_that_no_half_float_holds() -> None:
    codes = torch.randint(0, 16, (4, 32), dtype=torch.uint8)
    zeros = torch.full((4, 1), 8, dtype=torch.int16)

    def with_scale(scale: float) -> IntegerCodes:
        return IntegerCodes(codes, torch.full((4, 1), scale), zeros, 32)

    for scale in (0.1, 1e-3, 1000.0):
        blocks = dequantize(with_scale(scale).to_blocks())
        exact = with_scale(scale).to_int4().dequantize()
        assert torch.allclose(blocks, exact, rtol=2**-11, atol=0)
    for scale in (1e-7, 1e6):
        with pytest.raises(NoPackedForm, match="outside of half floats"):
            with_scale(scale).to_blocks()


@pytest.mark.parametrize("method", ["awq", "gptq"])
def test_packed_logits_are_those_of_the_floats(
    tmp_path: Path, method: str, caplog: pytest.LogCaptureFixture
) -> None:
    write = write_awq if method == "awq" else write_gptq
    coded, _ = write(tmp_path)
    with caplog.at_level(logging.WARNING):
        packed = load(coded, "packed")
    assert not caplog.records
    assert packed.model.quantized_formats == {f"{method} int4"}
    assert_close(packed.logits(PROMPTS[0]), load(coded, "none").logits(PROMPTS[0]))


def test_act_order_is_floats_on_a_cpu_and_said_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    coded, _ = write_gptq(tmp_path, act_order=True)
    with caplog.at_level(logging.WARNING):
        packed = load(coded, "packed")
    (record,) = caplog.records
    assert "14 matrices are computed as floats (GPTQ's act-order)" in record.getMessage()
    assert torch.equal(packed.logits(PROMPTS[0]), load(coded, "none").logits(PROMPTS[0]))


def test_a_float_beside_codes_makes_the_product_floats(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    coded, _ = write_awq(tmp_path, floats=("0.self_attn.v_proj",))
    with caplog.at_level(logging.WARNING):
        packed = load(coded, "packed")
    (record,) = caplog.records
    assert "3 matrices are computed as floats (stored as F32), the first: model.layers.0" in (
        record.getMessage()
    )
    assert_close(packed.logits(PROMPTS[0]), load(coded, "none").logits(PROMPTS[0]))


def test_dequantizing_says_what_it_costs(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    coded, _ = write_awq(tmp_path)
    with caplog.at_level(logging.WARNING):
        load(coded, "none")
    (record,) = caplog.records
    elements = 2 * (256 * 256 * 2 + 128 * 256 * 2 + 3 * 384 * 256)
    codes = elements / 2 + elements / 128 * (2 + 0.5)
    assert (
        f"dequantized to float32: {codes / 2**20:.1f} MiB of awq codes take "
        f"{elements * 4 / 2**20:.1f} MiB"
    ) in record.getMessage()


def test_int4_ops_get_the_codes(tmp_path: Path) -> None:
    """The reference's own int4 products, which are floats of the same weights."""

    class WithInt4(type(REFERENCE)):  # type: ignore[misc]
        computes_int4 = True
        seen: list[Int4Tensor]

        def prepare_int4_linear(self, parts: Any, bias: Any, dtype: Any) -> Any:
            self.seen += parts
            return super().prepare_int4_linear(parts, bias, dtype)

    ops = WithInt4()
    ops.seen = []
    coded, _ = write_gptq(tmp_path, act_order=True, group_size=32)
    loaded = load(coded, "packed", ops)
    assert len(ops.seen) == 14
    assert loaded.model.quantized_formats == {"gptq int4"}
    wanted = load(coded, "none", REFERENCE).logits(PROMPTS[0])
    assert torch.allclose(loaded.logits(PROMPTS[0]), wanted, atol=1e-4)


def test_int4_made_at_load(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class WithInt4(type(REFERENCE)):  # type: ignore[misc]
        computes_int4 = True

    _, dense = write_awq(tmp_path)
    with caplog.at_level(logging.INFO, logger="engine_core.model.loader"):
        loaded = load(dense, "int4", WithInt4())
    assert loaded.model.quantized_formats == {"int4"}
    assert (
        caplog.records[-1]
        .getMessage()
        .endswith(
            "0.6 MiB of matrices are left float32 with --quantization int4: "
            "model.embed_tokens.weight, lm_head.weight"
        )
    )
    # 4 bits of random weights lose a tenth of each product.
    cosines = torch.cosine_similarity(
        loaded.logits(PROMPTS[0]), load(dense, "none").logits(PROMPTS[0]), dim=-1
    )
    assert float(cosines.min()) > 0.8


def test_progress_counts_all_bytes(tmp_path: Path) -> None:
    coded, _ = write_awq(tmp_path)
    opened = open_model(resolve_model(str(coded)))
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
    size = sum(opened.checkpoint.num_bytes(name) for name in opened.checkpoint.shapes())
    assert calls[-1] == (size, size)


def test_blocks_are_packed_tensors() -> None:
    """Of every value that 4 and 8 bits have, in one block each."""
    for low, high, wanted in ((0, 16, "Q4_0"), (-7, 16, "Q5_0"), (-120, 136, "Q8_0")):
        values = torch.arange(low, high) - 8
        values = values.repeat(-(-256 // len(values)))[:256].view(1, 256)
        offset = 128
        codes = IntegerCodes(
            (values + offset).to(torch.uint8),
            torch.ones(1, 8),
            torch.full((1, 8), offset, dtype=torch.int16),
            32,
        )
        blocks = codes.to_blocks()
        assert isinstance(blocks, QuantizedTensor)
        assert blocks.format == wanted
        assert torch.equal(dequantize(blocks), values.float())
