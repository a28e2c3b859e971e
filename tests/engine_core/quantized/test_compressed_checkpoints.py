"""compressed-tensors checkpoints, packed by that library, and fp8 ones, by torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from compressed_tensors.compressors import (
    FloatQuantizationCompressor,
    IntQuantizationCompressor,
    PackedQuantizationCompressor,
)
from compressed_tensors.quantization import (
    QuantizationArgs,
    QuantizationConfig,
    QuantizationScheme,
)

from kernels.quantized import dequantize
from tests.support.coded_models import (
    PROMPTS,
    SPEC,
    assert_close,
    assert_same_model,
    assert_same_weights,
    codes_of,
    load,
    matrices_of,
)
from tests.support.cpu_kernels import REFERENCE
from tests.support.quantized_checkpoints import write_quantized

if TYPE_CHECKING:
    from pathlib import Path

    from kernels.fp8 import Fp8Tensor

TOKEN_INT8 = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}
TOKEN_FP8 = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}
TENSOR_FP8 = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}
COMPRESSORS = {
    "pack-quantized": PackedQuantizationCompressor,
    "int-quantized": IntQuantizationCompressor,
    "float-quantized": FloatQuantizationCompressor,
}
FORMS: dict[str, tuple[str, dict[str, Any], dict[str, Any] | None]] = {
    "w4a16-128": ("pack-quantized", {"num_bits": 4, "strategy": "group", "group_size": 128}, None),
    "w4a16-32": ("pack-quantized", {"num_bits": 4, "strategy": "group", "group_size": 32}, None),
    "w4a16-asymmetric": (
        "pack-quantized",
        {"num_bits": 4, "strategy": "group", "group_size": 64, "symmetric": False},
        None,
    ),
    "w4a16-channel": ("pack-quantized", {"num_bits": 4, "strategy": "channel"}, None),
    "w8a16": ("pack-quantized", {"num_bits": 8, "strategy": "channel"}, None),
    "w8a8": ("int-quantized", {"num_bits": 8, "strategy": "channel"}, TOKEN_INT8),
    "w8a8-tensor": ("int-quantized", {"num_bits": 8, "strategy": "tensor"}, TOKEN_INT8),
    "fp8-channel": (
        "float-quantized",
        {"num_bits": 8, "type": "float", "strategy": "channel"},
        TOKEN_FP8,
    ),
    "fp8-tensor": (
        "float-quantized",
        {"num_bits": 8, "type": "float", "strategy": "tensor"},
        TENSOR_FP8,
    ),
    "fp8-block": (
        "float-quantized",
        {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128]},
        {**TOKEN_FP8, "strategy": "group", "group_size": 128},
    ),
}


def scales_of(weight: torch.Tensor, args: QuantizationArgs, seed: int) -> dict[str, torch.Tensor]:
    """Some that fit: greatest code for the greatest value of each group, about."""
    most = 448.0 if args.type == "float" else float(2 ** (args.num_bits - 1) - 1)
    # Random zeros leave no room for both signs: codes from end to end, some clipped.
    most *= 1 if args.symmetric else 2
    rows, columns = weight.shape
    if args.strategy == "block":
        assert args.block_structure is not None
        height, width = args.block_structure
        tiles = weight.view(rows // height, height, columns // width, width)
        greatest = tiles.abs().amax(dim=(1, 3))
    elif args.strategy == "tensor":
        greatest = weight.abs().amax().view(1)
    else:
        groups = 1 if args.group_size in (None, -1) else columns // int(args.group_size or 1)
        greatest = weight.view(rows, groups, -1).abs().amax(dim=-1)
    state = {"weight_scale": (greatest / most).to(torch.bfloat16)}
    generator = torch.Generator().manual_seed(seed)
    half = 2 ** (args.num_bits - 1)
    zeros = torch.zeros(greatest.shape, dtype=torch.int8)
    if not args.symmetric:
        zeros = torch.randint(-half, half, greatest.shape, generator=generator).to(torch.int8)
    return state | ({} if args.type == "float" else {"weight_zero_point": zeros})


def write_compressed(directory: Path, form: str, **changes: Any) -> tuple[Path, Path]:
    name, weights, inputs = FORMS[form]
    args = QuantizationArgs(**weights)
    scheme = QuantizationScheme(
        targets=["Linear"],
        weights=args,
        input_activations=None if inputs is None else QuantizationArgs(**inputs),
    )
    config = QuantizationConfig(
        config_groups={"group_0": scheme},
        format=name,
        ignore=["lm_head"],
        quantization_status="compressed",
    ).model_dump(mode="json")
    compressor = COMPRESSORS[name]

    def encode(module: str, weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        state = {"weight": weight, **scales_of(weight, args, len(module))}
        stored = compressor.compress(state, scheme)
        wide = {
            part: value.float() if value.dtype == torch.bfloat16 else value
            for part, value in stored.items()
        }
        meant = compressor.decompress(wide, scheme)["weight"]
        if inputs is not None and not inputs["dynamic"]:
            stored["input_scale"] = torch.tensor([0.05])
        tensors = {f"{module}.{part}": value for part, value in stored.items()}
        return tensors, meant.float()

    floats = changes.pop("floats", ())
    return write_quantized(directory, SPEC, config | changes, encode, floats=floats)


def write_fp8(
    directory: Path, block: tuple[int, int] | None, *, static: bool = False, **changes: Any
) -> tuple[Path, Path]:
    """As DeepSeek's (with blocks) and AutoFP8's checkpoints have it."""
    config = {
        "quant_method": "fp8",
        "activation_scheme": "static" if static else "dynamic",
        "weight_block_size": block if block is None else list(block),
        **changes,
    }

    def encode(module: str, weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        rows, columns = weight.shape
        height, width = block or (rows, columns)
        codes = torch.empty(rows, columns, dtype=torch.float8_e4m3fn)
        meant = torch.empty(rows, columns)
        scales = torch.empty(-(-rows // height), -(-columns // width))
        for i, top in enumerate(range(0, rows, height)):
            for j, left in enumerate(range(0, columns, width)):
                tile = (slice(top, top + height), slice(left, left + width))
                scales[i, j] = weight[tile].abs().max() / 448
                codes[tile] = (weight[tile] / scales[i, j]).to(torch.float8_e4m3fn)
                meant[tile] = codes[tile].float() * scales[i, j]
        tensors = {f"{module}.weight": codes}
        if block is None:
            tensors[f"{module}.weight_scale"] = scales.view(())
        else:
            tensors[f"{module}.weight_scale_inv"] = scales
        if static:
            tensors[f"{module}.input_scale"] = torch.tensor(0.05)
        return tensors, meant

    return write_quantized(directory, SPEC, config, encode)


@pytest.mark.parametrize("form", FORMS)
def test_weights_are_what_the_library_decompresses(tmp_path: Path, form: str) -> None:
    assert_same_weights(*write_compressed(tmp_path, form))


@pytest.mark.parametrize("form", ["w4a16-asymmetric", "w8a8"])
def test_model_is_that_of_the_decompressed_weights(tmp_path: Path, form: str) -> None:
    assert_same_model(*write_compressed(tmp_path, form))


@pytest.mark.parametrize(
    ("form", "wanted"),
    [("w4a16-128", "Q4_0"), ("w4a16-asymmetric", "Q5_0"), ("w8a16", "Q8_0"), ("w8a8", "Q8_0")],
)
def test_integers_keep_every_bit_in_blocks(tmp_path: Path, form: str, wanted: str) -> None:
    coded, dense = write_compressed(tmp_path, form)
    meant = matrices_of(dense)
    for name, codes in codes_of(coded).items():
        blocks = codes.to_blocks()
        assert blocks.format == wanted
        assert torch.equal(dequantize(blocks), meant[name]), name
        if wanted != "Q8_0":
            assert torch.equal(codes.to_int4().dequantize(), meant[name]), name


def test_w8a8_is_computed_by_bytes(tmp_path: Path) -> None:
    coded, _ = write_compressed(tmp_path, "w8a8")
    packed = load(coded, "packed")
    assert packed.model.quantized_formats == {"compressed-tensors int8"}
    assert_close(packed.logits(PROMPTS[0]), load(coded, "none").logits(PROMPTS[0]))


def test_ignored_modules_are_the_floats_they_are(tmp_path: Path) -> None:
    ignore = ["lm_head", "re:.*v_proj", "model.layers.1.mlp.down_proj"]
    floats = ("v_proj", "layers.1.mlp.down_proj")
    assert_same_weights(*write_compressed(tmp_path, "w4a16-32", ignore=ignore, floats=floats))


@pytest.mark.parametrize("block", [(128, 128), None])
def test_fp8_is_what_transformers_makes_of_its_weights(
    tmp_path: Path, block: tuple[int, int] | None
) -> None:
    assert_same_model(*write_fp8(tmp_path, block))


def test_edges_of_fp8_blocks_may_be_cut_off(tmp_path: Path) -> None:
    assert_same_weights(*write_fp8(tmp_path, (96, 160)))


@pytest.mark.parametrize("form", ["fp8-channel", "fp8-tensor", "fp8-block", "fp8", "fp8-static"])
def test_fp8_ops_get_the_codes(tmp_path: Path, form: str) -> None:
    """The reference's own fp8 products, which are floats of the same weights."""

    class WithFp8(type(REFERENCE)):  # type: ignore[misc]
        computes_fp8 = True
        seen: list[Fp8Tensor]

        def prepare_fp8_linear(self, parts: Any, bias: Any, dtype: Any) -> Any:
            self.seen += parts
            return super().prepare_fp8_linear(parts, bias, dtype)

    ops = WithFp8()
    ops.seen = []
    if form in FORMS:
        coded, _ = write_compressed(tmp_path, form)
    else:
        coded, _ = write_fp8(tmp_path, None, static=form == "fp8-static")
    loaded = load(coded, "packed", ops)
    assert len(ops.seen) == 7 * SPEC.num_layers
    is_static = form in ("fp8-tensor", "fp8-static")
    assert all((part.input_scale is not None) == is_static for part in ops.seen)
    if is_static:
        assert all(float(part.input_scale or 0) == pytest.approx(0.05) for part in ops.seen)
    wanted = load(coded, "none", REFERENCE).logits(PROMPTS[0])
    assert torch.allclose(loaded.logits(PROMPTS[0]), wanted, atol=1e-4)


def test_int8_of_fp8(tmp_path: Path) -> None:
    coded, _ = write_fp8(tmp_path, (128, 128))
    quantized = load(coded, "int8")
    assert quantized.model.quantized_formats == {"Q8_0"}
    assert_close(quantized.logits(PROMPTS[0]), load(coded, "none").logits(PROMPTS[0]))


def test_codes_of_two_groups(tmp_path: Path) -> None:
    """A group that names modules goes before the one of all others."""
    weights = {"num_bits": 8, "strategy": "channel", "type": "int", "symmetric": True}
    four = {"num_bits": 4, "strategy": "channel", "type": "int", "symmetric": True}
    groups = {
        "group_0": {"targets": ["Linear"], "weights": four},
        "group_1": {"targets": ["re:.*_proj$"], "weights": weights},
    }
    coded, dense = write_compressed(tmp_path, "w8a16", config_groups=groups)
    assert_same_weights(coded, dense)
