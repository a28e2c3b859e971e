"""Quantization that is not supported, and files that do not hold what they say."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine_core.model.fields import Fields
from engine_core.model.loader import open_model
from engine_core.model.quantized.detect import read_scheme
from pagewire.errors import ModelLoadError
from pagewire.model_source import resolve_model
from tests.support.coded_models import SPEC, matrices_of
from tests.support.quantized_checkpoints import gptq_tensors, round_to_codes, write_quantized
from tests.support.tiny_model import write_hf

if TYPE_CHECKING:
    from pathlib import Path

AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128}
FP8 = {"quant_method": "fp8"}
W4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128, "symmetric": True}


def compressed(weights: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        **changes,
    }


PUBLISHED: list[tuple[dict[str, Any], str, set[str]]] = [
    ({**AWQ, "version": "gemm", "modules_to_not_convert": None}, "awq", {"int4"}),
    (
        {
            **GPTQ,
            "batch_size": 1,
            "block_name_to_quantize": None,
            "cache_block_outputs": True,
            "damp_percent": 0.01,
            "desc_act": False,
            "exllama_config": {"version": 1},
            "sym": True,
            "true_sequential": True,
            "use_cuda_fp16": False,
            "use_exllama": True,
        },
        "gptq",
        {"int4"},
    ),
    (
        {
            **GPTQ,
            "bits": 8,
            "checkpoint_format": "gptq",
            "desc_act": True,
            "hyb_act": False,
            "lm_head": False,
            "meta": {"quantizer": ["gptqmodel:1.4.0"], "static_groups": False},
            "pack_dtype": "int32",
        },
        "gptq",
        {"int8"},
    ),
    (
        {
            **FP8,
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "weight_block_size": [128, 128],
            "modules_to_not_convert": ["lm_head", "model.layers.0.mlp.gate"],
        },
        "fp8",
        {"fp8"},
    ),
    ({**FP8, "activation_scheme": "static", "ignored_layers": ["lm_head"]}, "fp8", {"fp8"}),
    (
        {
            "quant_method": "compressed-tensors",
            "format": "float-quantized",
            "config_groups": {
                "group_0": {
                    "input_activations": {
                        "actorder": None,
                        "block_structure": None,
                        "dynamic": True,
                        "group_size": None,
                        "num_bits": 8,
                        "observer": None,
                        "observer_kwargs": {},
                        "strategy": "token",
                        "symmetric": True,
                        "type": "float",
                    },
                    "output_activations": None,
                    "targets": ["Linear"],
                    "weights": {
                        "actorder": None,
                        "block_structure": None,
                        "dynamic": False,
                        "group_size": None,
                        "num_bits": 8,
                        "observer": "minmax",
                        "observer_kwargs": {},
                        "strategy": "channel",
                        "symmetric": True,
                        "type": "float",
                    },
                }
            },
            "global_compression_ratio": 1.2,
            "ignore": ["lm_head"],
            "kv_cache_scheme": None,
            "quantization_status": "frozen",
            "sparsity_config": {"format": "dense", "global_sparsity": 0.14, "ignore": []},
        },
        "compressed-tensors",
        {"fp8"},
    ),
]
"""As files of Qwen, TheBloke, RedHatAI and GPTQModel have it."""


@pytest.mark.parametrize(("config", "method", "kinds"), PUBLISHED)
def test_published_configurations_are_read(
    tmp_path: Path, config: dict[str, Any], method: str, kinds: set[str]
) -> None:
    for key in ("quantization_config", "compression_config"):
        scheme = read_scheme(Fields({key: config}, tmp_path))
        assert scheme is not None
        assert (scheme.method, scheme.kinds) == (method, kinds)


REFUSED: list[tuple[dict[str, Any], str]] = [
    (
        {"quant_method": "bitsandbytes"},
        "quant_method 'bitsandbytes' is not supported; known: 'awq'",
    ),
    ({}, "quant_method None is not supported"),
    ({**AWQ, "bits": 8}, "bits 8 is not supported; known: 4"),
    ({**AWQ, "bits": True}, "bits True is not supported"),
    ({**AWQ, "version": "gemv"}, "version 'gemv' is not supported; known: 'gemm'"),
    ({**AWQ, "zero_point": False}, "zero_point False is not supported"),
    ({**AWQ, "group_size": 0}, "group_size is 0, expected -1 or above 0"),
    ({**AWQ, "rotation": "hadamard"}, "rotation is 'hadamard', which is not supported"),
    ({**AWQ, "modules_to_not_convert": "lm_head"}, "modules_to_not_convert is 'lm_head', expected"),
    ({**GPTQ, "bits": 3}, "bits 3 is not supported; known: 4, 8"),
    ({**GPTQ, "checkpoint_format": "marlin"}, "checkpoint_format 'marlin' is not supported"),
    ({**GPTQ, "is_marlin_format": True}, "is_marlin_format is True, which is not supported"),
    ({**GPTQ, "dynamic": {"+:.*down": {"bits": 8}}}, "dynamic is {'"),
    ({**GPTQ, "group_size": None}, "group_size is missing"),
    ({**FP8, "fmt": "e5m2"}, "fmt 'e5m2' is not supported"),
    ({**FP8, "scale_fmt": "ue8m0"}, "scale_fmt 'ue8m0' is not supported"),
    ({**FP8, "activation_scheme": "none"}, "activation_scheme 'none' is not supported"),
    ({**FP8, "weight_block_size": [128]}, "weight_block_size is [128], expected two"),
    (
        {**FP8, "weight_block_size": [128, 128], "activation_scheme": "static"},
        "activation_scheme is 'static', expected dynamic",
    ),
    (compressed(W4, format="nvfp4-pack-quantized"), "format 'nvfp4-pack-quantized' is not"),
    (compressed(W4, config_groups={}), "config_groups is {}, expected an object of groups"),
    (compressed(W4, sparsity_config={"format": "sparse-24-bitmask"}), "sparsity_config.format"),
    (
        compressed(W4, transform_config={"config_groups": {"r": {}}}),
        "transform_config.config_groups",
    ),
    (compressed(W4, ignore=["re:("]), "ignore is ['re:('], expected regular expressions"),
    (compressed({**W4, "num_bits": 2}), "config_groups.group_0.weights.num_bits 2 is not"),
    (
        compressed({**W4, "type": "float", "num_bits": 8}),
        "format is 'pack-quantized', expected one",
    ),
    (compressed({**W4, "dynamic": True}), "weights.dynamic True is not supported"),
    (compressed({**W4, "strategy": "tensor_group"}), "weights.strategy 'tensor_group' is not"),
    (compressed({**W4, "group_size": None}), "weights.group_size is None, expected an integer"),
]


@pytest.mark.parametrize(("config", "message"), REFUSED)
def test_options_are_refused_by_name(tmp_path: Path, config: dict[str, Any], message: str) -> None:
    directory = write_hf(tmp_path / "model", SPEC)
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": config}))
    (directory / "model.safetensors").unlink()
    with pytest.raises(ModelLoadError) as raised:
        open_model(resolve_model(str(directory)))
    assert str(raised.value).startswith(f"{path}: quantization_config.")
    assert message in str(raised.value)


MODULE = "model.layers.1.mlp.up_proj"


@pytest.fixture(scope="module")
def coded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    def encode(module: str, weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        rounded = round_to_codes(weight, 4, 128, symmetric=True)
        return gptq_tensors(module, rounded, 4, less_one=True), rounded.dense()

    return write_quantized(tmp_path_factory.mktemp("coded"), SPEC, GPTQ, encode)[0]


def broken(coded: Path, directory: Path, **changes: torch.Tensor | None) -> Path:
    """A copy in which the tensors of MODULE are others, or are missing."""
    directory.mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (directory / name).write_bytes((coded / name).read_bytes())
    tensors = load_file(coded / "model.safetensors")
    for part, tensor in changes.items():
        del tensors[f"{MODULE}.{part}"]
        if tensor is not None:
            tensors[f"{MODULE}.{part}"] = tensor
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


HEADERS: list[tuple[dict[str, torch.Tensor | None], str]] = [
    ({"qweight": None}, f"tensor {MODULE}.weight is missing"),
    ({"qzeros": None}, f"tensor {MODULE}.qzeros is missing"),
    ({"scales": torch.ones(3, 384)}, f"{MODULE}.scales has shape [3, 384], expected [2, 384]"),
    ({"scales": torch.ones(2, 384).long()}, f"{MODULE}.scales has dtype I64, expected F16"),
    ({"g_idx": torch.zeros(255, dtype=torch.int32)}, "g_idx has shape [255], expected [256]"),
    (
        {"qweight": torch.zeros(16, 384, dtype=torch.int32), "g_idx": None},
        f"tensor {MODULE}.qzeros has shape [2, 48], expected [1, 48]",
    ),
]


@pytest.mark.parametrize(("changes", "message"), HEADERS)
def test_headers_that_do_not_fit(
    tmp_path: Path, coded: Path, changes: dict[str, torch.Tensor | None], message: str
) -> None:
    path = broken(coded, tmp_path / "broken", **changes)
    with pytest.raises(ModelLoadError) as raised:
        open_model(resolve_model(str(path)))
    assert message in str(raised.value)
    assert "model.safetensors" in str(raised.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scales": torch.full((2, 384), torch.nan)}, "scales has a scale that is not a finite"),
        ({"g_idx": torch.full((256,), 2)}, r"g_idx names a group outside of \[0, 2\)"),
    ],
)
def test_values_that_cannot_be(
    tmp_path: Path, coded: Path, changes: dict[str, torch.Tensor | None], message: str
) -> None:
    path = broken(coded, tmp_path / "broken", **changes)
    with pytest.raises(ModelLoadError, match=message):
        matrices_of(path)


def test_codes_of_a_module_that_is_not_to_have_any(tmp_path: Path, coded: Path) -> None:
    path = broken(coded, tmp_path / "broken")
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"]["modules_to_not_convert"] = ["layers.1.mlp"]
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        ModelLoadError, match=r"1\.mlp\.\w+ is quantized, but .* has 'layers\.1\.mlp'"
    ):
        open_model(resolve_model(str(path)))


def test_codes_that_the_configuration_does_not_speak_of(tmp_path: Path, coded: Path) -> None:
    path = broken(coded, tmp_path / "broken")
    config = json.loads((path / "config.json").read_text())
    del config["quantization_config"]
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelLoadError, match="has dtype I32; known: F64, F32, F16, BF16"):
        open_model(resolve_model(str(path)))
