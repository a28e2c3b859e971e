"""Loads the built C++ ops: picks the library for this CPU and declares its functions."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_float, c_int, c_int64, c_void_p

import torch

from kernels.cpu.build import COMMAND, FOLDER, Variant, cpu_level, variants

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""The codes of enum Dtype in csrc/api.h."""


def _int64_fields(*names: str) -> list[tuple[str, type]]:
    return [(name, c_int64) for name in names]


class RopeSizes(ctypes.Structure):
    """struct RopeSizes of csrc/elementwise.cpp."""

    _fields_ = _int64_fields(
        *("tokens", "heads", "kv_heads", "head_dim", "rotary_dim", "max_positions"),
        *(
            "num_blocks",
            "block_size",
            "q_token",
            "q_head",
            "k_token",
            "k_head",
            "v_token",
            "v_head",
        ),
        *("k_block", "k_slot", "k_cache_head", "v_block", "v_slot", "v_cache_head"),
    )


class AttentionSizes(ctypes.Structure):
    """struct AttentionSizes of csrc/attention.cpp."""

    _fields_ = (
        *_int64_fields("tokens", "sequences", "heads", "kv_heads", "head_dim", "num_blocks"),
        *_int64_fields("block_size", "q_token", "q_head", "k_block", "k_slot", "k_head"),
        *_int64_fields("v_block", "v_slot", "v_head", "table_row", "table_columns"),
        ("scale", c_float),
    )


class SamplingColumns(ctypes.Structure):
    """struct SamplingColumns of csrc/sample.cpp."""

    _fields_ = (
        *((name, c_void_p) for name in ("temperature", "top_k", "top_p", "min_p")),
        *((name, c_void_p) for name in ("seed", "position", "sample_index")),
    )


class PackedWeight(ctypes.Structure):
    """struct PackedWeight of csrc/weight.h."""

    _fields_ = (
        *_int64_fields("format", "in_features", "out_features"),
        ("data", c_void_p),
        ("bias", c_void_p),
    )


ATTENTION_BLOCK, MLP_BLOCK = 0, 1


class NativeBlock(ctypes.Structure):
    """struct Block of csrc/blocks.cpp."""

    _fields_ = (
        ("kind", c_int64),
        ("norm", c_void_p),
        ("into", PackedWeight),
        ("out_of", PackedWeight),
        *((name, c_void_p) for name in ("cos_sin", "k_cache", "v_cache")),
        *_int64_fields("heads", "kv_heads", "head_dim", "rotary_dim", "max_positions"),
        *_int64_fields("num_blocks", "block_size", "k_block", "k_slot", "k_head"),
        *_int64_fields("v_block", "v_slot", "v_head"),
        ("scale", c_float),
        ("eps", c_float),
    )


class NativeBatch(ctypes.Structure):
    """struct BlockBatch of csrc/blocks.cpp."""

    _fields_ = (
        *_int64_fields("tokens", "sequences", "table_row", "table_columns"),
        *((name, c_void_p) for name in ("positions", "slots", "starts", "seq_lens", "table")),
    )


# Result and arguments of each function of csrc/, in order.
_P, _I, _N, _F = c_void_p, c_int64, c_int, c_float
_FUNCTIONS: dict[str, tuple[type | None, list[type]]] = {
    "rms_norm": (None, [_N, _P, _I, _P, _P, _I, _I, _F, _N]),
    "add_rms_norm": (None, [_N, _P, _I, _P, _I, _P, _P, _I, _I, _F, _N]),
    "silu_mul": (None, [_N, _P, _I, _P, _I, _I, _N]),
    "rope_and_cache": (_I, [_N, _P, _P, _P, _P, _P, _P, _P, _P, POINTER(RopeSizes), _N]),
    "attention": (_I, [_N, _P, _P, _P, _P, _P, _P, _P, POINTER(AttentionSizes), _N]),
    "packed_elements": (_I, [_N, _I, _I]),
    "pack": (None, [_N, _P, _I, _I, _P, _N]),
    "linear": (None, [_N, _P, _I, POINTER(PackedWeight), _P, _I, _N]),
    "quant_bytes": (_I, [_N, _I, _I]),
    "quant_pack": (None, [_N, _P, _I, _I, _I, _P, _N]),
    "quant_rows": (_I, [_N, _N, _P, _I, _I, _P, _I, _P, _N]),
    "run_blocks": (_I, [_N, POINTER(NativeBlock), _I, POINTER(NativeBatch), _P, _I, _N]),
    "sample": (None, [_N, _P, _I, _I, _I, POINTER(SamplingColumns), _P, _N]),
}


class Library:
    """The C++ functions of one variant, as attributes without their pagewire_ prefix."""

    def __init__(self, variant: Variant) -> None:
        self.variant = variant
        self._handle = ctypes.CDLL(str(variant.path()))
        for name, (result, arguments) in _FUNCTIONS.items():
            function = getattr(self._handle, f"pagewire_{name}")
            function.restype, function.argtypes = result, arguments
            setattr(self, name, function)

    # Declared for the type checker; __init__ sets them.
    rms_norm: ctypes._NamedFuncPointer
    add_rms_norm: ctypes._NamedFuncPointer
    silu_mul: ctypes._NamedFuncPointer
    rope_and_cache: ctypes._NamedFuncPointer
    attention: ctypes._NamedFuncPointer
    packed_elements: ctypes._NamedFuncPointer
    pack: ctypes._NamedFuncPointer
    linear: ctypes._NamedFuncPointer
    quant_bytes: ctypes._NamedFuncPointer
    quant_pack: ctypes._NamedFuncPointer
    quant_rows: ctypes._NamedFuncPointer
    run_blocks: ctypes._NamedFuncPointer
    sample: ctypes._NamedFuncPointer


def supported_variants() -> list[Variant]:
    """The built variants that this CPU runs, best last; empty if the build is missing."""
    portable, *_ = variants()
    if not portable.path().exists():
        return []
    level = cpu_level(portable.path())
    return [v for v in variants() if v.level <= level and v.path().exists()]


def why_missing() -> str:
    """One sentence for the log when supported_variants() is empty."""
    stale = any(FOLDER.glob("pagewire_*.so"))
    state = "older than their sources" if stale else "not built"
    return f"the C++ CPU ops are {state}; torch stands in for them, slowly. Run: {COMMAND}"
