"""Compiling every kernel ahead of time, without a device.

A specimen is one kernel with the types, constants and launch options of a case that a
real model brings. Compiling it for an architecture shows that it is accepted and what
it takes of a multiprocessor: the source of the table in docs/kernels.md.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kernels.cuda.activation_mul import BLOCK_I, activation_mul_kernel
from kernels.cuda.cache_codes import FLOATS, FP8_BITS, FP8_INSTRUCTION, INT8
from kernels.cuda.configs import (
    DECODE_CONFIGS,
    ENABLE_FP_FUSION,
    MAX_SPLITS,
    PREFILL_CONFIGS,
    AttentionConfig,
    block_d_for,
    decode_config,
    linear_config,
    next_power_of_2,
    prefill_config,
    row_warps,
)
from kernels.cuda.limits import Usage
from kernels.cuda.linear_invariant import linear_invariant_kernel
from kernels.cuda.paged_decode import paged_decode_combine_kernel, paged_decode_kernel
from kernels.cuda.paged_prefill import paged_prefill_kernel
from kernels.cuda.penalties import BLOCK_K as PENALTY_BLOCK_K
from kernels.cuda.penalties import NUM_WARPS as PENALTY_WARPS
from kernels.cuda.penalties import add_logit_bias_kernel, apply_penalties_kernel
from kernels.cuda.product_specimens import KERNELS as PRODUCT_KERNELS
from kernels.cuda.product_specimens import (
    all_product_specimens,
    representative_product_specimens,
)
from kernels.cuda.rms_norm import add_rms_norm_kernel, rms_norm_kernel
from kernels.cuda.rope_and_cache import BLOCK_HEADS, rope_and_cache_kernel
from kernels.cuda.sample import (
    BLOCK_V,
    NUM_WARPS,
    SELECT_BLOCK_V,
    SELECT_WARPS,
    draw_kernel,
    row_max_kernel,
    select_digit_kernel,
    weigh_parts_kernel,
)
from kernels.cuda.sample_math import DIGIT_BITS, NUM_BINS
from kernels.cuda.specimen import Specimen
from kernels.cuda.token_logprobs import NUM_WARPS as LOGPROB_WARPS
from kernels.cuda.token_logprobs import PART_V, rank_parts_kernel, sum_exp_parts_kernel

KERNELS = (
    paged_decode_kernel,
    paged_decode_combine_kernel,
    paged_prefill_kernel,
    linear_invariant_kernel,
    rms_norm_kernel,
    add_rms_norm_kernel,
    rope_and_cache_kernel,
    activation_mul_kernel,
    row_max_kernel,
    select_digit_kernel,
    weigh_parts_kernel,
    draw_kernel,
    apply_penalties_kernel,
    add_logit_bias_kernel,
    sum_exp_parts_kernel,
    rank_parts_kernel,
    *PRODUCT_KERNELS,
)

# Parameters whose type does not follow the model's dtype.
_TYPES = {
    "block_table_ptr": "*i32",
    "seq_lens_ptr": "*i32",
    "query_start_loc_ptr": "*i32",
    "partial_ptr": "*fp32",
    "lse_ptr": "*fp32",
    "cos_sin_ptr": "*fp32",
    "k_scale_ptr": "*fp32",
    "v_scale_ptr": "*fp32",
    "positions_ptr": "*i64",
    "slot_mapping_ptr": "*i64",
    "seed_ptr": "*i64",
    "position_ptr": "*i64",
    "sample_index_ptr": "*i32",
    "best_ptr": "*i64",
    "temperature_ptr": "*fp32",
    "top_k_ptr": "*i32",
    "top_p_ptr": "*fp32",
    "min_p_ptr": "*fp32",
    "masses_ptr": "*i64",
    "found_ptr": "*i64",
    "above_ptr": "*i64",
    "ties_ptr": "*i64",
    "cut_ptr": "*i64",
    "ids_ptr": "*i64",
    "rows_ptr": "*i64",
    "list_starts_ptr": "*i64",
    "token_ids_ptr": "*i64",
    "counts_ptr": "*fp32",
    "repetition_ptr": "*fp32",
    "frequency_ptr": "*fp32",
    "presence_ptr": "*fp32",
    "values_ptr": "*fp32",
    "maxima_ptr": "*fp32",
    "sums_ptr": "*fp32",
    "logprobs_ptr": "*fp32",
    "all_logprobs_ptr": "*fp32",
    "ranks_ptr": "*i64",
    "score_scale": "fp32",
    "cap_log2": "fp32",
    "eps": "fp32",
}
_CACHES = ("k_cache_ptr", "v_cache_ptr")
_CACHE_NAMES = {FLOATS: "", FP8_BITS: ",fp8 bits", FP8_INSTRUCTION: ",fp8", INT8: ",int8"}
_CACHE_TYPES = {FP8_BITS: "*u8", FP8_INSTRUCTION: "*fp8e4nv", INT8: "*i8"}
_NOT_DIVISIBLE = {
    "first_seq",
    "num_seqs",
    "num_rows",
    "num_tokens",
    "vocab_size",
    "part_size",
    "num_parts",
    "step",
    "rows_ptr",
    "list_starts_ptr",
    "token_ids_ptr",
    "counts_ptr",
    "repetition_ptr",
    "frequency_ptr",
    "presence_ptr",
}
_GROUP = 4
"""Query heads per KV head, of the attention specimens."""
_DIVISIBLE_BY_16 = [["tt.divisibility", 16]]


def compile_specimen(specimen: Specimen, arch: int) -> Usage:
    """arch: one of the specimen's. Raises what the compiler raises."""
    kernel = specimen.kernel
    if not isinstance(kernel, triton.runtime.JITFunction):
        raise RuntimeError("kernels are interpreted in this process: TRITON_INTERPRET is set")
    constants = dict(specimen.constants)
    types = {**_TYPES, **specimen.types}
    if "CODES" in kernel.arg_names:
        constants["CODES"] = specimen.cache
    if specimen.cache != FLOATS:
        types |= dict.fromkeys(_CACHES, _CACHE_TYPES[specimen.cache])
    signature = {}
    attrs = {}
    for index, name in enumerate(kernel.arg_names):
        if name.isupper():
            signature[name] = "constexpr"
            continue
        default = f"*{specimen.element}" if name.endswith("_ptr") else "i32"
        signature[name] = types.get(name, default)
        if name not in _NOT_DIVISIBLE and not signature[name].startswith("fp"):
            attrs[(index,)] = _DIVISIBLE_BY_16
    source = ASTSource(kernel, signature, constants, attrs)
    compiled = triton.compile(
        source,
        target=GPUTarget("cuda", arch, 32),
        options={
            "num_warps": specimen.num_warps,
            "num_stages": specimen.num_stages,
            "enable_fp_fusion": ENABLE_FP_FUSION,
        },
    )
    cubin = compiled.asm["cubin"]
    registers, stack = _resource_usage(cubin)
    metadata = compiled.metadata
    return Usage(
        metadata.num_warps, registers, stack, metadata.shared, metadata.tmem_size, len(cubin)
    )


def _resource_usage(cubin: bytes) -> tuple[int, int]:
    """(registers, stack bytes) per thread, as the cuobjdump that comes with Triton says."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.cubin")
        path.write_bytes(cubin)
        command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", str(path)]
        report = subprocess.run(command, capture_output=True, text=True, check=True).stdout  # noqa: S603
    found = re.search(r"REG:(\d+) STACK:(\d+)", report)
    if found is None:
        raise RuntimeError(f"cuobjdump printed no resource usage: {report!r}")
    return int(found[1]), int(found[2])


def attention_specimens(
    element: str,
    head_dim: int,
    *,
    window: bool = False,
    soft_cap: bool = False,
    codes: int = FLOATS,
) -> list[Specimen]:
    """Both attention kernels with the configs of this head size: decode in splits, long and
    short prefill, decode in one piece, and what batch-invariant mode uses for both."""
    size = 4 if element == "fp32" else 2
    decode = decode_config(head_dim, size, _GROUP)
    long, short = (
        prefill_config(head_dim, size, rows, unpacks_fp8=codes == FP8_BITS) for rows in (4096, 1)
    )

    def specimen(kernel: Any, label: str, config: AttentionConfig, **more: int) -> Specimen:
        constants = {
            "GROUP": _GROUP,
            "HEADS": _GROUP,
            "HEAD_DIM": head_dim,
            "BLOCK_D": block_d_for(head_dim),
            "BLOCK_SIZE": 16,
            "BLOCK_M": config.block_m,
            "BLOCK_KV": config.block_kv,
            "HAS_WINDOW": int(window),
            "HAS_SOFT_CAP": int(soft_cap),
            **more,
        }
        case = f"D={head_dim},{label}"
        case += ",window" * window + ",cap" * soft_cap + _CACHE_NAMES[codes]
        return Specimen(
            kernel, case, element, constants, config.num_warps, config.num_stages, codes
        )

    return [
        specimen(paged_decode_kernel, "splits=8", decode, NUM_SPLITS=8),
        specimen(paged_prefill_kernel, "long", long, ONE_LOOP=0),
        specimen(paged_prefill_kernel, "short", short, ONE_LOOP=0),
        specimen(paged_decode_kernel, "whole", decode, NUM_SPLITS=1),
        specimen(paged_prefill_kernel, "invariant", short, ONE_LOOP=1),
    ]


def combine_specimen(element: str, head_dim: int) -> Specimen:
    constants = {"HEAD_DIM": head_dim, "BLOCK_D": block_d_for(head_dim), "NUM_SPLITS": MAX_SPLITS}
    case = f"D={head_dim},splits={MAX_SPLITS}"
    return Specimen(paged_decode_combine_kernel, case, element, constants, 4)


def linear_specimen(element: str, in_features: int) -> Specimen:
    config = linear_config(4 if element == "fp32" else 2)
    constants = {
        "IN": in_features,
        "OUT": in_features,
        "HAS_BIAS": 1,
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "BLOCK_K": config.block_k,
    }
    case = f"K={in_features}"
    return Specimen(
        linear_invariant_kernel, case, element, constants, config.num_warps, config.num_stages
    )


def rope_specimen(
    element: str, head_dim: int, rotary_dim: int, *, norm: bool = False, codes: int = FLOATS
) -> Specimen:
    constants = {
        "NUM_Q_HEADS": 32,
        "NUM_KV_HEADS": 8,
        "HEAD_DIM": head_dim,
        "ROTARY_DIM": rotary_dim,
        "BLOCK_SIZE": 16,
        "HAS_NORM": int(norm),
        "BLOCK_HEADS": BLOCK_HEADS,
        "BLOCK_HALF": next_power_of_2(rotary_dim // 2),
        "BLOCK_PASS": next_power_of_2(max(head_dim - rotary_dim, 1)),
        "BLOCK_D": next_power_of_2(head_dim),
    }
    case = f"D={head_dim},R={rotary_dim}" + ",norm" * norm + _CACHE_NAMES[codes]
    return Specimen(rope_and_cache_kernel, case, element, constants, 4, cache=codes)


def activation_specimen(element: str, intermediate: int, *, gelu: bool) -> Specimen:
    constants = {"INTERMEDIATE": intermediate, "GELU": int(gelu), "BLOCK_I": BLOCK_I}
    case = f"I={intermediate}," + ("gelu" if gelu else "silu")
    return Specimen(activation_mul_kernel, case, element, constants, 4)


def row_specimens(element: str, head_dim: int, hidden: int) -> list[Specimen]:
    """The kernels that pass once over their input."""
    block_h = next_power_of_2(hidden)
    norm = {"HIDDEN": hidden, "BLOCK_H": block_h}
    return [
        Specimen(rms_norm_kernel, f"H={hidden}", element, norm, row_warps(block_h)),
        Specimen(add_rms_norm_kernel, f"H={hidden}", element, norm, row_warps(block_h)),
        rope_specimen(element, head_dim, head_dim),
        activation_specimen(element, 3 * hidden, gelu=False),
    ]


def sampling_specimens(element: str) -> list[Specimen]:
    """For 128256 logits in 32 parts, with filters."""
    low_bits = {"fp32": 0, "bf16": 16, "fp16": 12}[element]
    constants = {
        "FILTERS": 1,
        "NUM_PARTS": 32,
        "LOW_BITS": low_bits,
        "DIGITS": -(-(32 - low_bits) // DIGIT_BITS),
        "UNIT_BITS": 45,
        "DIGIT_BITS": DIGIT_BITS,
        "NUM_BINS": NUM_BINS,
    }

    def specimen(kernel: Any, case: str, block: int, num_warps: int, **more: int) -> Specimen:
        known = {**constants, "BLOCK_V": block, **more}
        used = {name: known[name] for name in kernel.arg_names if name.isupper()}
        return Specimen(kernel, case, element, used, num_warps)

    return [
        specimen(row_max_kernel, "P=32", BLOCK_V, NUM_WARPS),
        specimen(select_digit_kernel, "P=32,top-k", SELECT_BLOCK_V, SELECT_WARPS, BY_WEIGHT=0),
        specimen(select_digit_kernel, "P=32,top-p", SELECT_BLOCK_V, SELECT_WARPS, BY_WEIGHT=1),
        specimen(weigh_parts_kernel, "P=32", BLOCK_V, NUM_WARPS),
        specimen(draw_kernel, "P=32", BLOCK_V, NUM_WARPS),
    ]


def penalty_specimens() -> list[Specimen]:
    constants = {"BLOCK_K": PENALTY_BLOCK_K}
    return [
        Specimen(kernel, f"K={PENALTY_BLOCK_K}", "fp32", constants, PENALTY_WARPS)
        for kernel in (apply_penalties_kernel, add_logit_bias_kernel)
    ]


def logprob_specimens(element: str) -> list[Specimen]:
    """For 128256 logits."""
    part = {"PART_V": PART_V}
    specimens = [Specimen(sum_exp_parts_kernel, f"V={PART_V}", element, part, LOGPROB_WARPS)]
    for with_all in (0, 1):
        constants = {**part, "BLOCK_P": 32, "WITH_ALL": with_all}
        case = "P=32" + ",all" * with_all
        specimens.append(Specimen(rank_parts_kernel, case, element, constants, LOGPROB_WARPS))
    return specimens


def all_specimens() -> list[Specimen]:
    """Every kernel, and every entry of both attention tables."""
    assert DECODE_CONFIGS.keys() == PREFILL_CONFIGS.keys()
    specimens = []
    for block_d, size in DECODE_CONFIGS:
        specimens += attention_specimens("bf16" if size == 2 else "fp32", block_d)[:3]
    specimens += attention_specimens("bf16", 80)[:3]  # heads that are padded
    specimens += attention_specimens("bf16", 96)[:3]
    specimens += attention_specimens("fp16", 64)[:3]
    specimens += attention_specimens("bf16", 128)[3:]
    specimens.append(attention_specimens("fp32", 64)[4])
    # Mistral's windows, Gemma 3's; Gemma 2's, which have soft caps too, and its full layers.
    specimens += attention_specimens("bf16", 128, window=True)
    specimens += attention_specimens("bf16", 256, window=True)[:3]
    specimens += attention_specimens("bf16", 256, window=True, soft_cap=True)[:3]
    specimens += attention_specimens("bf16", 256, soft_cap=True)[:3]
    specimens += attention_specimens("fp32", 64, window=True, soft_cap=True)[:3]
    for codes in (FP8_BITS, FP8_INSTRUCTION, INT8):
        specimens += attention_specimens("bf16", 64, codes=codes)[:3]
        specimens += attention_specimens("bf16", 128, codes=codes)
        specimens += attention_specimens("bf16", 256, codes=codes)[:3]
        specimens += attention_specimens("bf16", 256, window=True, codes=codes)[:3]
        specimens += [
            rope_specimen("bf16", 128, 128, norm=True, codes=codes),
            rope_specimen("fp32", 128, 128, codes=codes),
        ]
    specimens += [linear_specimen(element, 4096) for element in ("bf16", "fp16", "fp32")]
    specimens += [combine_specimen("bf16", head_dim) for head_dim in (64, 128, 256)]
    for element in ("bf16", "fp16", "fp32"):
        specimens += row_specimens(element, 128, 4096)
    specimens += [
        activation_specimen("bf16", 12288, gelu=True),
        rope_specimen("bf16", 128, 128, norm=True),
        rope_specimen("bf16", 96, 48),
        rope_specimen("bf16", 64, 0),
    ]
    for element in ("bf16", "fp32"):
        specimens += sampling_specimens(element) + logprob_specimens(element)
    specimens += penalty_specimens()
    return specimens + all_product_specimens()


def representative_specimens() -> list[Specimen]:
    """Every kernel once or twice, for the head sizes that most models have."""
    decode, long_prefill, _, _, _ = attention_specimens("bf16", 128)
    _, _, short_prefill, whole_decode, invariant = attention_specimens("fp16", 64)
    return [
        decode,
        combine_specimen("bf16", 128),
        long_prefill,
        short_prefill,
        whole_decode,
        invariant,
        linear_specimen("bf16", 4096),
        attention_specimens("bf16", 128, window=True)[1],
        attention_specimens("bf16", 128, codes=FP8_BITS)[0],
        attention_specimens("bf16", 128, codes=FP8_INSTRUCTION)[0],
        *attention_specimens("bf16", 128, codes=INT8)[:2],
        attention_specimens("bf16", 256, window=True, soft_cap=True)[0],
        *row_specimens("bf16", 128, 4096),
        activation_specimen("bf16", 12288, gelu=True),
        rope_specimen("bf16", 128, 128, norm=True, codes=FP8_BITS),
        rope_specimen("bf16", 128, 128, norm=True, codes=FP8_INSTRUCTION),
        rope_specimen("bf16", 128, 128, norm=True, codes=INT8),
        *sampling_specimens("fp32"),
        *logprob_specimens("bf16"),
        *penalty_specimens(),
        *representative_product_specimens(),
    ]
