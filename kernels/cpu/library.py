"""Loads the built C++ ops: picks the library for this CPU and declares its functions."""

from __future__ import annotations

import ctypes
import logging
import os
from ctypes import POINTER, c_float, c_int, c_int64, c_void_p
from functools import cache
from typing import TYPE_CHECKING

import torch

from kernels.cpu.build import COMMAND, FOLDER, Variant, cpu_runs, request_tiles, variants

if TYPE_CHECKING:
    from pathlib import Path

    from kernels.ops import Activation

_log = logging.getLogger(__name__)

FLOAT_CACHE, E4M3_CACHE, INT8_CACHE = 0, 1, 2
HALF_CACHES = {torch.bfloat16: 3, torch.float16: 4}
"""The codes of enum CacheFormat in csrc/cache_codes.h."""
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""The codes of enum Dtype in csrc/api.h."""


def _int64_fields(*names: str) -> list[tuple[str, type]]:
    return [(name, c_int64) for name in names]


class RopeSizes(ctypes.Structure):
    """struct RopeSizes of csrc/elementwise.h."""

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


class HeadNorms(ctypes.Structure):
    """struct HeadNorms of csrc/elementwise.h."""

    _fields_ = (("q", c_void_p), ("k", c_void_p), ("eps", c_float))


class CacheCodes(ctypes.Structure):
    """struct CacheCodes of csrc/cache_codes.h."""

    _fields_ = (
        ("format", c_int64),
        ("k_scale", c_void_p),
        ("v_scale", c_void_p),
        *_int64_fields("k_block", "k_head", "v_block", "v_head"),
    )


class AttentionSizes(ctypes.Structure):
    """struct AttentionSizes of csrc/attention.h."""

    _fields_ = (
        *_int64_fields("tokens", "sequences", "heads", "kv_heads", "head_dim", "num_blocks"),
        *_int64_fields("block_size", "q_token", "q_head", "k_block", "k_slot", "k_head"),
        *_int64_fields("v_block", "v_slot", "v_head", "table_row", "table_columns"),
        *_int64_fields("window"),
        ("scale", c_float),
        ("soft_cap", c_float),
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


class NativeExpert(ctypes.Structure):
    """struct Expert of csrc/experts.cpp."""

    _fields_ = (("gate_up", PackedWeight), ("down", PackedWeight))


class ExpertChoices(ctypes.Structure):
    """struct ExpertChoices of csrc/experts.cpp."""

    _fields_ = (
        ("ids", c_void_p),
        ("scales", c_void_p),
        *_int64_fields("tokens", "chosen", "experts"),
    )


ATTENTION_BLOCK, MLP_BLOCK = 0, 1
ACTIVATIONS: dict[Activation, int] = {"silu": 0, "gelu_tanh": 1}
"""The codes of enum Activation in csrc/elementwise.h."""


class NativeBlock(ctypes.Structure):
    """struct Block of csrc/blocks.cpp."""

    _fields_ = (
        ("kind", c_int64),
        *((name, c_void_p) for name in ("norm", "post_norm", "q_norm", "k_norm")),
        ("into", PackedWeight),
        ("out_of", PackedWeight),
        ("activation", c_int64),
        *((name, c_void_p) for name in ("cos_sin", "k_cache", "v_cache")),
        ("codes", CacheCodes),
        *_int64_fields("heads", "kv_heads", "head_dim", "rotary_dim", "max_positions"),
        *_int64_fields("num_blocks", "block_size", "k_block", "k_slot", "k_head"),
        *_int64_fields("v_block", "v_slot", "v_head", "window", "row_norms"),
        *((name, c_float) for name in ("scale", "soft_cap", "eps")),
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
    "activation_mul": (None, [_N, _I, _P, _I, _P, _I, _I, _N]),
    "rope_and_cache": (
        _I,
        [
            *(_N, _P, _P, _P, _P, _P, _P, _P, POINTER(CacheCodes), _P),
            *(POINTER(RopeSizes), POINTER(HeadNorms), _N),
        ],
    ),
    "attention": (
        _I,
        [_N, _P, _P, _P, POINTER(CacheCodes), _P, _P, _P, _P, POINTER(AttentionSizes), _N],
    ),
    "attention_is_batch_invariant": (_N, [_N]),
    "packed_elements": (_I, [_N, _I, _I]),
    "pack": (None, [_N, _P, _I, _I, _P, _N]),
    "packed_rows": (_I, [_N, _P, _I, _I, _P, _I, _P, _N]),
    "linear": (None, [_N, _P, _I, POINTER(PackedWeight), _P, _I, _N]),
    "experts": (
        _I,
        [_N, _P, _I, POINTER(NativeExpert), POINTER(ExpertChoices), _I, _P, _N],
    ),
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
    activation_mul: ctypes._NamedFuncPointer
    rope_and_cache: ctypes._NamedFuncPointer
    attention: ctypes._NamedFuncPointer
    attention_is_batch_invariant: ctypes._NamedFuncPointer
    packed_elements: ctypes._NamedFuncPointer
    pack: ctypes._NamedFuncPointer
    packed_rows: ctypes._NamedFuncPointer
    linear: ctypes._NamedFuncPointer
    experts: ctypes._NamedFuncPointer
    quant_bytes: ctypes._NamedFuncPointer
    quant_pack: ctypes._NamedFuncPointer
    quant_rows: ctypes._NamedFuncPointer
    run_blocks: ctypes._NamedFuncPointer
    sample: ctypes._NamedFuncPointer


def supported_variants() -> list[Variant]:
    """The built variants that this CPU runs, best last; empty if the build is missing. What
    the system refuses to this process is left out, with a warning in the log."""
    portable, *_ = variants()
    if not portable.path().exists():
        return []
    runs = [v for v in variants() if v.path().exists() and cpu_runs(portable.path(), v)]
    return [v for v in runs if not v.uses_tiles or _may_use_tiles(portable.path(), v.name)]


@cache
def _may_use_tiles(portable: Path, name: str) -> bool:
    error = request_tiles(portable)
    if error:
        reason = os.strerror(error)
        _log.warning("CPU ops: without %s: the system refuses tile registers: %s", name, reason)
    return error == 0


def why_missing() -> str:
    """One sentence for the log when supported_variants() is empty."""
    stale = any(FOLDER.glob("pagewire_*.so"))
    state = "older than their sources" if stale else "not built"
    return f"the C++ CPU ops are {state}; torch stands in for them, slowly. Run: {COMMAND}"


def pointer(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def table_sizes(cos_sin: torch.Tensor | None, head_dim: int) -> tuple[int, int]:
    """max_positions and rotary_dim of a table, or of rotating nothing."""
    if cos_sin is None:
        return torch.iinfo(torch.int64).max, 0
    assert cos_sin.is_contiguous() and cos_sin.dtype == torch.float32
    max_positions, rotary_dim = cos_sin.shape
    assert rotary_dim % 2 == 0 and rotary_dim <= head_dim, (rotary_dim, head_dim)
    return max_positions, rotary_dim


def cache_codes(
    cache: torch.Tensor,
    dtype: torch.dtype,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
) -> CacheCodes:
    """Of a cache beside tensors of dtype, and scales that shapes.CacheSignature has seen."""
    if k_scale is None or v_scale is None:
        return CacheCodes(FLOAT_CACHE if cache.dtype == dtype else HALF_CACHES[cache.dtype])
    assert k_scale.stride(-1) == 1 and v_scale.stride(-1) == 1
    pointers = (k_scale.data_ptr(), v_scale.data_ptr())
    if cache.dtype == torch.float8_e4m3fn:
        return CacheCodes(E4M3_CACHE, *pointers)
    return CacheCodes(INT8_CACHE, *pointers, *k_scale.stride()[:2], *v_scale.stride()[:2])


def attention_limits(
    window: int | None, soft_cap: float | None, scale: float
) -> tuple[int, float, float]:
    """The fields window, scale and soft_cap, whose zeros mean none."""
    assert window is None or window > 0, window
    assert soft_cap is None or soft_cap > 0, soft_cap
    return window or 0, scale, soft_cap or 0.0
