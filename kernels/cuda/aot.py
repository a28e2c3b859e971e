"""Compiling every kernel ahead of time, without a device.

A specimen is one kernel with the types, constants and launch options of a case that a
real model brings. Compiling it for an architecture shows that it is accepted and what
it takes of a multiprocessor: the source of the table in docs/kernels.md.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

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
from kernels.cuda.linear_invariant import linear_invariant_kernel
from kernels.cuda.paged_decode import paged_decode_combine_kernel, paged_decode_kernel
from kernels.cuda.paged_prefill import paged_prefill_kernel
from kernels.cuda.rms_norm import add_rms_norm_kernel, rms_norm_kernel
from kernels.cuda.rope_and_cache import BLOCK_HEADS, rope_and_cache_kernel
from kernels.cuda.sample import BLOCK_S, philox_uniform_kernel
from kernels.cuda.silu_mul import BLOCK_I, silu_mul_kernel

SHARED_MEMORY_LIMIT = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}
"""Bytes that one block may use, by architecture (CUDA C++ Programming Guide, compute
capabilities): the architectures that every kernel must compile for."""

KERNELS = (
    paged_decode_kernel,
    paged_decode_combine_kernel,
    paged_prefill_kernel,
    linear_invariant_kernel,
    rms_norm_kernel,
    add_rms_norm_kernel,
    rope_and_cache_kernel,
    silu_mul_kernel,
    philox_uniform_kernel,
)

# Parameters whose type does not follow the model's dtype.
_TYPES = {
    "block_table_ptr": "*i32",
    "seq_lens_ptr": "*i32",
    "query_start_loc_ptr": "*i32",
    "partial_ptr": "*fp32",
    "lse_ptr": "*fp32",
    "cos_sin_ptr": "*fp32",
    "positions_ptr": "*i64",
    "slot_mapping_ptr": "*i64",
    "seed_ptr": "*i64",
    "position_ptr": "*i64",
    "sample_index_ptr": "*i32",
    "uniform_ptr": "*fp64",
    "scale_log2": "fp32",
    "eps": "fp32",
}
_NOT_DIVISIBLE = {"first_seq", "num_seqs", "num_rows", "num_tokens"}
_DIVISIBLE_BY_16 = [["tt.divisibility", 16]]


@dataclass(frozen=True, slots=True)
class Specimen:
    kernel: Any
    case: str
    element: str
    """The model's dtype as Triton writes it: bf16, fp16, fp32."""
    constants: dict[str, int]
    num_warps: int
    num_stages: int = 3

    @property
    def name(self) -> str:
        return str(self.kernel.__name__)

    def __str__(self) -> str:
        return f"{self.name}-{self.element}-{self.case}"


@dataclass(frozen=True, slots=True)
class Usage:
    registers: int
    """Per thread."""
    stack_bytes: int
    """Per thread, in local memory: what did not fit in registers."""
    shared_bytes: int
    """Per block."""
    cubin_bytes: int


def compile_specimen(specimen: Specimen, arch: int) -> Usage:
    """arch: 80, 90 or 100. Raises what the compiler raises."""
    kernel = specimen.kernel
    if not isinstance(kernel, triton.runtime.JITFunction):
        raise RuntimeError("kernels are interpreted in this process: TRITON_INTERPRET is set")
    signature = {}
    attrs = {}
    for index, name in enumerate(kernel.arg_names):
        if name.isupper():
            signature[name] = "constexpr"
            continue
        default = f"*{specimen.element}" if name.endswith("_ptr") else "i32"
        signature[name] = _TYPES.get(name, default)
        if name not in _NOT_DIVISIBLE and not signature[name].startswith("fp"):
            attrs[(index,)] = _DIVISIBLE_BY_16
    source = ASTSource(kernel, signature, dict(specimen.constants), attrs)
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
    return Usage(registers, stack, int(compiled.metadata.shared), len(cubin))


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


def attention_specimens(element: str, head_dim: int) -> list[Specimen]:
    """Both attention kernels with the configs of this head size: decode in splits, long and
    short prefill, decode in one piece, and what batch-invariant mode uses for both."""
    size = 4 if element == "fp32" else 2
    block_d = block_d_for(head_dim)
    group = 4

    def specimen(kernel: Any, label: str, config: AttentionConfig, **more: int) -> Specimen:
        constants = {
            "GROUP": group,
            "HEADS": group,
            "HEAD_DIM": head_dim,
            "BLOCK_D": block_d,
            "BLOCK_SIZE": 16,
            "BLOCK_M": config.block_m,
            "BLOCK_KV": config.block_kv,
            **more,
        }
        case = f"D={head_dim}{label}"
        return Specimen(kernel, case, element, constants, config.num_warps, config.num_stages)

    decode = decode_config(head_dim, size, group)
    return [
        specimen(paged_decode_kernel, ",splits=8", decode, NUM_SPLITS=8),
        specimen(paged_prefill_kernel, ",long", prefill_config(head_dim, size, 4096), ONE_LOOP=0),
        specimen(paged_prefill_kernel, ",short", prefill_config(head_dim, size, 1), ONE_LOOP=0),
        specimen(paged_decode_kernel, ",whole", decode, NUM_SPLITS=1),
        specimen(paged_prefill_kernel, ",invariant", prefill_config(head_dim, size, 1), ONE_LOOP=1),
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


def row_specimens(element: str, head_dim: int, hidden: int) -> list[Specimen]:
    """The kernels that pass once over their input."""
    block_h = next_power_of_2(hidden)
    norm = {"HIDDEN": hidden, "BLOCK_H": block_h}
    rope = {
        "NUM_Q_HEADS": hidden // head_dim,
        "NUM_KV_HEADS": hidden // head_dim // 4,
        "HEAD_DIM": head_dim,
        "ROTARY_DIM": head_dim,
        "BLOCK_SIZE": 16,
        "BLOCK_HEADS": BLOCK_HEADS,
        "BLOCK_HALF": next_power_of_2(head_dim // 2),
        "BLOCK_PASS": 1,
        "BLOCK_D": next_power_of_2(head_dim),
    }
    silu = {"INTERMEDIATE": 3 * hidden, "BLOCK_I": BLOCK_I}
    return [
        Specimen(rms_norm_kernel, f"H={hidden}", element, norm, row_warps(block_h)),
        Specimen(add_rms_norm_kernel, f"H={hidden}", element, norm, row_warps(block_h)),
        Specimen(rope_and_cache_kernel, f"D={head_dim}", element, rope, 4),
        Specimen(silu_mul_kernel, f"I={3 * hidden}", element, silu, 4),
    ]


def sampling_specimens() -> list[Specimen]:
    return [Specimen(philox_uniform_kernel, f"S={BLOCK_S}", "fp32", {"BLOCK_S": BLOCK_S}, 1)]


def all_specimens() -> list[Specimen]:
    """Every kernel, and every entry of both attention tables."""
    assert DECODE_CONFIGS.keys() == PREFILL_CONFIGS.keys()
    specimens = []
    for block_d, size in DECODE_CONFIGS:
        specimens += attention_specimens("bf16" if size == 2 else "fp32", block_d)[:3]
    specimens += attention_specimens("bf16", 80)[:3]  # a head that is padded
    specimens += attention_specimens("fp16", 64)[:3]
    specimens += attention_specimens("bf16", 128)[3:]
    specimens.append(attention_specimens("fp32", 64)[4])
    specimens += [linear_specimen(element, 4096) for element in ("bf16", "fp16", "fp32")]
    specimens += [combine_specimen("bf16", head_dim) for head_dim in (64, 128, 256)]
    for element in ("bf16", "fp16", "fp32"):
        specimens += row_specimens(element, 128, 4096)
    return specimens + sampling_specimens()


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
        *row_specimens("bf16", 128, 4096),
        *sampling_specimens(),
    ]
