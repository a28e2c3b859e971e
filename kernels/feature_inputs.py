"""Inputs for parity tests of what only some models have: windows, soft caps, head norms,
layers without rotation, GeGLU, caches of 8-bit floats."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch

from kernels.inputs import NAN, Args, Case, Maker, attention_args, rope_args, silu_args
from kernels.reference.ops import ReferenceOps

if TYPE_CHECKING:
    from collections.abc import Sequence

FP8 = torch.float8_e4m3fn


def featured_attention_args(
    maker: Maker,
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    heads: int,
    kv_heads: int,
    head_dim: int,
    *,
    block_size: int = 16,
    window: int | None = None,
    soft_cap: float | None = None,
    fp8: bool = False,
    int8: bool = False,
) -> Args:
    """With a soft cap, scores are large enough to be bent. fp8: codes up to +-448. int8: where
    no sequence owns a slot its scale is NaN."""
    shape = (heads, kv_heads, head_dim)
    args = attention_args(maker, query_lens, seq_lens, *shape, block_size=block_size)
    args |= {"window": window, "soft_cap": soft_cap}
    if soft_cap is not None:
        args["scale"] *= 4
    if fp8:
        for name, spread in (("k", 60.0), ("v", 120.0)):
            codes = (args[f"{name}_cache"].float() * spread).clamp(-448, 448)
            args[f"{name}_cache"] = codes.to(FP8)
            drawn = maker.normal(kv_heads, dtype=torch.float32).abs() + 0.5
            args[f"{name}_scale"] = drawn / spread
    if int8:
        for name in ("k", "v"):
            cache = args[f"{name}_cache"].float()
            scale = cache.abs().amax(dim=-1) / 127
            codes = (cache / scale.unsqueeze(-1)).nan_to_num(99.0).round()
            args[f"{name}_cache"] = codes.to(torch.int8)
            args[f"{name}_scale"] = scale.transpose(1, 2).contiguous()
    return args


def featured_rope_args(
    maker: Maker,
    tokens: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    *,
    rotary_dim: int | None,
    norm: bool = False,
    fp8: bool = False,
    int8: bool = False,
) -> Args:
    """rotary_dim None: nothing is rotated. fp8: one head's values are out of range, and one
    head's so small that they are subnormal codes. int8: the third token's are all zeros. The
    second token is not written."""
    shape = (tokens, heads, kv_heads, head_dim)
    args = rope_args(maker, *shape, rotary_dim=rotary_dim, skip=(1,))
    if rotary_dim is None:
        args["cos_sin"] = None
    if norm:
        args |= {"q_norm": maker.normal(head_dim), "k_norm": maker.normal(head_dim), "eps": 1e-5}
    if fp8:
        scales = torch.linspace(-3, 2, kv_heads) if kv_heads > 1 else torch.tensor([-1.0])
        for name in ("k", "v"):
            cache = args[f"{name}_cache"]
            args[f"{name}_cache"] = torch.full(cache.shape, NAN).to(FP8).to(maker.device)
            args[f"{name}_scale"] = (10.0**scales).to(maker.device)
    if int8:
        for name in ("k", "v"):
            args[name][2:3] = 0
            num_blocks, block_size = args[f"{name}_cache"].shape[:2]
            cache = torch.full(args[f"{name}_cache"].shape, 99, dtype=torch.int8)
            args[f"{name}_cache"] = cache.to(maker.device)
            scale = torch.full((num_blocks, kv_heads, block_size), NAN)
            args[f"{name}_scale"] = scale.to(maker.device)
    return args


# name, query_lens, seq_lens, heads, kv_heads, head_dim, window, soft_cap, block_size
_AttentionSize = tuple[str, list[int], list[int], int, int, int, int | None, float | None, int]
_ATTENTION_SIZES: tuple[_AttentionSize, ...] = (
    ("decode-w1", [1, 1, 1], [1, 40, 130], 4, 2, 32, 1, None, 16),
    ("decode-w20", [1, 1, 1], [9, 64, 150], 3, 1, 64, 20, None, 32),
    ("decode-w64-cap", [1, 1, 1], [64, 65, 190], 8, 2, 80, 64, 5.0, 16),
    ("decode-cap", [1, 1], [3, 70], 2, 2, 128, None, 2.0, 16),
    ("prefill-w5", [40, 7], [40, 7], 2, 1, 16, 5, None, 8),
    ("prefill-cap", [33], [33], 2, 1, 256, None, 5.0, 16),
    ("chunk-w33", [20, 50], [200, 50], 4, 2, 32, 33, None, 16),
    ("mixed-w16-cap", [1, 1, 5, 33], [80, 17, 5, 97], 6, 2, 64, 16, 2.0, 16),
    ("mixed-w500", [1, 2, 30], [90, 18, 70], 2, 2, 96, 500, None, 16),
)
_ATTENTION_SIZES_OF_CODES: tuple[_AttentionSize, ...] = (
    ("decode", [1, 1, 1], [1, 63, 130], 9, 3, 64, None, None, 16),
    ("mixed", [1, 5, 40], [70, 5, 100], 4, 2, 128, None, None, 16),
    ("mixed-w20-cap", [1, 40], [90, 60], 4, 1, 80, 20, 5.0, 16),
)


def _attention_cases(sizes: Sequence[_AttentionSize], codes: str = "") -> list[Case]:
    """codes: as in _rope_cases()."""
    prefix = f"{codes}-" if codes else ""
    return [
        Case(
            "attention",
            f"{prefix}{name}-{hq}:{hk}-d{d}-b{b}",
            partial(
                featured_attention_args,
                query_lens=ql,
                seq_lens=sl,
                heads=hq,
                kv_heads=hk,
                head_dim=d,
                block_size=b,
                window=window,
                soft_cap=soft_cap,
                fp8=codes == "fp8",
                int8=codes == "int8",
            ),
        )
        for name, ql, sl, hq, hk, d, window, soft_cap, b in sizes
    ]


# tokens, heads, kv_heads, head_dim, rotary_dim, norm
_RopeSize = tuple[int, int, int, int, int | None, bool]
_ROPE_SIZES: tuple[_RopeSize, ...] = (
    (5, 9, 3, 64, 64, True),
    (3, 4, 2, 80, 32, True),
    (4, 5, 1, 10, 6, True),
    (4, 8, 2, 128, None, True),
    (5, 3, 3, 96, None, False),
)
_ROPE_SIZES_OF_CODES: tuple[_RopeSize, ...] = (
    (9, 6, 3, 64, 64, False),
    (4, 4, 2, 80, 32, True),
    (5, 2, 1, 16, None, False),
)


def _rope_cases(sizes: Sequence[_RopeSize], codes: str = "") -> list[Case]:
    """codes: fp8 or int8, of the cache; none is of the dtype."""
    scales = ("k_scale", "v_scale") if codes == "int8" else ()
    prefix = f"{codes}-" if codes else ""
    return [
        Case(
            "rope_and_cache",
            f"{prefix}{t}t-{hq}:{hk}-d{d}-r{r or 0}" + ("-norm" if norm else ""),
            partial(
                featured_rope_args,
                tokens=t,
                heads=hq,
                kv_heads=hk,
                head_dim=d,
                rotary_dim=r,
                norm=norm,
                fp8=codes == "fp8",
                int8=codes == "int8",
            ),
            in_place=("q", "k", "v", "k_cache", "v_cache", *scales),
        )
        for t, hq, hk, d, r, norm in sizes
    ]


def _gelu_cases() -> list[Case]:
    return [
        Case("gelu_tanh_mul", f"{t}x{i}", partial(silu_args, tokens=t, intermediate=i))
        for t, i in [(1, 1), (1, 63), (3, 1536)]
    ]


FEATURE_CASES: tuple[Case, ...] = (
    *_gelu_cases(),
    *_rope_cases(_ROPE_SIZES),
    *_attention_cases(_ATTENTION_SIZES),
)


FP8_ATTENTION_CASES: tuple[Case, ...] = tuple(_attention_cases(_ATTENTION_SIZES_OF_CODES, "fp8"))
INT8_ATTENTION_CASES: tuple[Case, ...] = tuple(_attention_cases(_ATTENTION_SIZES_OF_CODES, "int8"))
FP8_ROPE_CASES: tuple[Case, ...] = tuple(_rope_cases(_ROPE_SIZES_OF_CODES, "fp8"))
INT8_ROPE_CASES: tuple[Case, ...] = tuple(_rope_cases(_ROPE_SIZES_OF_CODES, "int8"))


def exact_kv(case: Case, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """k_cache and v_cache in float64 that a case of int8 caches would fill if they were of
    floats; NaN where nothing is written."""

    def make(maker: Maker) -> Args:
        args = case.make(maker)
        for name in ("k", "v"):
            shape = args[f"{name}_cache"].shape
            args[f"{name}_cache"] = torch.full(shape, NAN, dtype=torch.float64)
            del args[f"{name}_scale"]
        return args

    floats = Case(case.op, case.label, make, ("k_cache", "v_cache"))
    return floats.run(ReferenceOps(torch.float64), dtype, widen=True)


def assert_nearest_codes(
    codes: torch.Tensor, exact: torch.Tensor, dtype: torch.dtype, label: str
) -> None:
    """codes [N, B, Hk, D] float8_e4m3fn of values that were rounded to dtype, against exact
    (float64, in units of the scale; NaN where nothing is written): no farther than half a
    step of e4m3, plus what those roundings are for the head's greatest value. Raises
    AssertionError."""
    actual = codes.double()
    written = ~exact.isnan()
    if not torch.equal(~actual.isnan(), written):
        raise AssertionError(f"{label}: what is NaN differs")
    greatest = exact.nan_to_num(0.0).abs().amax(dim=(0, 1, 3), keepdim=True)
    rounding = 4 * torch.finfo(dtype).eps * greatest
    step = 2.0 ** (exact.abs().clamp(min=2.0**-6).log2().floor() - 3)
    excess = ((actual - exact).abs() - step / 2 - rounding)[written]
    if excess.numel() and float(excess.max()) > 0:
        worst = int(excess.argmax())
        raise AssertionError(
            f"{label}: {int((excess > 0).sum())} of {excess.numel()} codes are not the nearest; "
            f"worst {float(actual[written][worst])} for {float(exact[written][worst])!r}"
        )


def assert_nearest_int8(
    written: dict[str, torch.Tensor], exact: dict[str, torch.Tensor], dtype: torch.dtype, label: str
) -> None:
    """k_cache, v_cache, k_scale and v_scale of int8 caches that were full of 99 with scales of
    NaN, against exact_kv of values that were rounded to dtype. Raises AssertionError."""
    for name in ("k", "v"):
        codes, scale = written[f"{name}_cache"], written[f"{name}_scale"].transpose(1, 2)
        values = exact[f"{name}_cache"]
        owned = ~values[..., 0].isnan()
        if not torch.equal(~scale.isnan(), owned) or (codes[~owned] != 99).any():
            raise AssertionError(f"{label} {name}: what is written differs")
        values, scale = values[owned], scale[owned].double().unsqueeze(-1)
        greatest = values.abs().amax(dim=-1, keepdim=True)
        rounding = 4 * torch.finfo(dtype).eps * greatest
        if ((scale * 127 - greatest).abs() > rounding).any():
            raise AssertionError(f"{label} {name}: a scale is not that of the greatest value")
        excess = (codes[owned].double() * scale - values).abs() - scale / 2 - rounding
        if float(excess.max()) > 0:
            raise AssertionError(
                f"{label} {name}: {int((excess > 0).sum())} of {excess.numel()} codes are not the "
                f"nearest, by {float(excess.max()):.3e}"
            )
