"""Specimens (aot.py) of products with quantized weights and of experts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kernels.cuda.configs import (
    EXPERTS_CONFIGS,
    FP8_CONFIGS,
    WEIGHT_ONLY_CONFIGS,
    LinearConfig,
)
from kernels.cuda.experts import (
    COMBINE_BLOCK_H,
    expert_combine_kernel,
    expert_down_kernel,
    expert_gate_up_kernel,
)
from kernels.cuda.fp8_linear import (
    QUANTIZE_BLOCK,
    fp8_linear_kernel,
    quantize_activations_kernel,
)
from kernels.cuda.int4_linear import block_k_for, int4_linear_kernel
from kernels.cuda.lora import (
    BLOCK_OUT,
    block_in_for,
    block_ranks_for,
    lora_expand_kernel,
    lora_shrink_kernel,
    num_splits_for,
)
from kernels.cuda.lora import NUM_WARPS as LORA_WARPS
from kernels.cuda.specimen import Specimen
from kernels.cuda.split_k import BLOCK_N, split_combine_kernel
from kernels.lora import TILE_TOKENS

if TYPE_CHECKING:
    from collections.abc import Mapping

KERNELS = (
    int4_linear_kernel,
    quantize_activations_kernel,
    fp8_linear_kernel,
    split_combine_kernel,
    expert_gate_up_kernel,
    expert_down_kernel,
    expert_combine_kernel,
    lora_shrink_kernel,
    lora_expand_kernel,
)
_HIDDEN = 4096


def _product(
    kernel: Any,
    case: str,
    element: str,
    config: LinearConfig,
    constants: Mapping[str, int],
    types: Mapping[str, str],
    *,
    needs_e4m3: bool = False,
) -> Specimen:
    tile = {"BLOCK_M": config.block_m, "BLOCK_N": config.block_n, "BLOCK_K": config.block_k}
    return Specimen(
        kernel,
        f"{case},M={config.block_m}",
        element,
        {**tile, **constants},
        config.num_warps,
        config.num_stages,
        types=types,
        needs_e4m3=needs_e4m3,
    )


def int4_specimen(element: str, config: LinearConfig, group: int, splits: int) -> Specimen:
    constants = {
        "IN": _HIDDEN,
        "OUT": _HIDDEN,
        "GROUP": group,
        "HAS_ZEROS": 1,
        "HAS_BIAS": 1,
        "SPLITS": splits,
        "BLOCK_K": block_k_for(config, group),
    }
    types = {"codes_ptr": "*u8", "zeros_ptr": "*u8", "scales_ptr": "*fp16"}
    if splits > 1:
        types["out_ptr"] = "*fp32"
    case = f"G={group},splits={splits}"
    return _product(int4_linear_kernel, case, element, config, constants, types)


def fp8_specimen(element: str, config: LinearConfig, scale_k: int, *, quantizes: bool) -> Specimen:
    """quantizes: x too, as the device multiplies e4m3; else only the weights are."""
    constants = {
        "IN": _HIDDEN,
        "OUT": _HIDDEN,
        "SCALE_N": 1 if scale_k == _HIDDEN else scale_k,
        "SCALE_K": scale_k,
        "X_IS_FP8": int(quantizes),
        "BY_INSTRUCTION": int(quantizes),
        "HAS_BIAS": 1,
        "SPLITS": 1,
        "BLOCK_K": min(config.block_k, scale_k),
    }
    types = {"x_scales_ptr": "*fp32", "scales_ptr": "*fp32", "weight_ptr": "*u8"}
    if quantizes:
        types |= {"x_ptr": "*fp8e4nv", "weight_ptr": "*fp8e4nv"}
    case = ("x too," if quantizes else "weights,") + f"K={scale_k}"
    return _product(
        fp8_linear_kernel, case, element, config, constants, types, needs_e4m3=quantizes
    )


def quantize_specimen(element: str, group: int) -> Specimen:
    constants = {
        "IN": _HIDDEN,
        "GROUP": group,
        "IS_STATIC": 0,
        "BY_INSTRUCTION": 1,
        "BLOCK_K": min(QUANTIZE_BLOCK, group),
    }
    types = {"input_scale_ptr": "*fp32", "x_scales_ptr": "*fp32", "codes_ptr": "*fp8e4nv"}
    return Specimen(
        quantize_activations_kernel,
        f"K={group}",
        element,
        constants,
        4,
        types=types,
        needs_e4m3=True,
    )


def split_combine_specimen(element: str) -> Specimen:
    constants = {"OUT": _HIDDEN, "SPLITS": 8, "HAS_BIAS": 1, "BLOCK_N": BLOCK_N}
    return Specimen(split_combine_kernel, "splits=8", element, constants, 4)


def expert_specimens(element: str, config: LinearConfig) -> list[Specimen]:
    """Both products of Mixtral's experts."""
    constants = {
        "NUM_EXPERTS": 8,
        "HIDDEN": _HIDDEN,
        "INTERMEDIATE": 14336,
        "BLOCK_E": 8,
    }
    types = {"pairs_ptr": "*i64", "starts_ptr": "*i64", "expert_scales_ptr": "*fp32"}
    gated = {**constants, "TOP_K": 2, "GELU": 0}
    return [
        _product(expert_gate_up_kernel, "E=8", element, config, gated, types),
        _product(expert_down_kernel, "E=8", element, config, constants, types),
    ]


def expert_combine_specimen(element: str) -> Specimen:
    constants = {"TOP_K": 2, "HIDDEN": _HIDDEN, "BLOCK_H": COMBINE_BLOCK_H}
    return Specimen(expert_combine_kernel, "K=2", element, constants, 4)


def lora_specimens(element: str, rank: int) -> list[Specimen]:
    """Of Llama 3 8B's qkv."""
    block_in = block_in_for(4 if element == "fp32" else 2)
    splits = num_splits_for(_HIDDEN, block_in)
    types = {"tokens_ptr": "*i64", "tiles_ptr": "*i32", "inner_ptr": "*fp32"}
    shrink = {
        "IN": _HIDDEN,
        "RANKS": 3 * rank,
        "SPLITS": splits,
        "BLOCK_M": TILE_TOKENS,
        "BLOCK_N": block_ranks_for(3 * rank),
        "BLOCK_K": block_in,
    }
    expand = {
        "END0": _HIDDEN,
        "END1": _HIDDEN + 1024,
        "OUT": _HIDDEN + 2048,
        "PARTS": 3,
        "RANK": rank,
        "SPLITS": splits,
        "BLOCK_M": TILE_TOKENS,
        "BLOCK_N": BLOCK_OUT,
        "BLOCK_R": block_ranks_for(rank),
    }
    return [
        Specimen(kernel, f"rank={rank}", element, constants, LORA_WARPS, types=types)
        for kernel, constants in ((lora_shrink_kernel, shrink), (lora_expand_kernel, expand))
    ]


def all_product_specimens() -> list[Specimen]:
    """Every kernel, and every entry of the tables."""
    specimens = []
    for size, element in ((2, "bf16"), (4, "fp32")):
        for config in WEIGHT_ONLY_CONFIGS[size]:
            specimens.append(int4_specimen(element, config, 128, 1))
            specimens.append(fp8_specimen(element, config, _HIDDEN, quantizes=False))
    low = WEIGHT_ONLY_CONFIGS[2][0]
    specimens += [
        int4_specimen("bf16", low, 128, 8),
        int4_specimen("bf16", low, 32, 1),
        int4_specimen("fp16", low, 128, 1),
        fp8_specimen("bf16", low, 128, quantizes=False),
    ]
    for config in FP8_CONFIGS:
        specimens += [
            fp8_specimen("bf16", config, scale_k, quantizes=True) for scale_k in (_HIDDEN, 128)
        ]
    specimens += [quantize_specimen("bf16", group) for group in (_HIDDEN, 128)]
    specimens.append(split_combine_specimen("bf16"))
    for size, element in ((2, "bf16"), (4, "fp32")):
        for config in EXPERTS_CONFIGS[size]:
            specimens += expert_specimens(element, config)
    for element, rank in (("bf16", 16), ("bf16", 64), ("bf16", 256), ("fp32", 16)):
        specimens += lora_specimens(element, rank)
    return [*specimens, expert_combine_specimen("bf16")]


def representative_product_specimens() -> list[Specimen]:
    """Every kernel once or twice."""
    low, high = FP8_CONFIGS[0], FP8_CONFIGS[-1]
    return [
        int4_specimen("bf16", WEIGHT_ONLY_CONFIGS[2][0], 128, 8),
        fp8_specimen("bf16", WEIGHT_ONLY_CONFIGS[2][0], _HIDDEN, quantizes=False),
        fp8_specimen("bf16", low, _HIDDEN, quantizes=True),
        fp8_specimen("bf16", high, 128, quantizes=True),
        quantize_specimen("bf16", 128),
        split_combine_specimen("bf16"),
        *expert_specimens("bf16", EXPERTS_CONFIGS[2][-1]),
        expert_combine_specimen("bf16"),
        *lora_specimens("bf16", 16),
    ]
