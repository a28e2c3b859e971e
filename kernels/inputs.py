"""Inputs for parity tests: per op, makers and a list of awkward cases.

Everything is drawn on the CPU from a fixed seed, so a case is the same on every
device. Memory that an op must not read or write is NaN.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from kernels.ops import AttentionBatch, PenaltyBatch, SamplingBatch, TokenLists

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kernels.ops import Ops

Args = dict[str, Any]
NAN = float("nan")


@dataclass(slots=True)
class Maker:
    """Draws tensors of one dtype for one device, the same ones every time."""

    dtype: torch.dtype
    device: str = "cpu"
    seed: int = 0
    _generator: torch.Generator = field(init=False)

    def __post_init__(self) -> None:
        self._generator = torch.Generator().manual_seed(self.seed)

    def normal(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        drawn = torch.randn(shape, generator=self._generator)
        return drawn.to(dtype or self.dtype).to(self.device)

    def permutation(self, n: int) -> torch.Tensor:
        return torch.randperm(n, generator=self._generator)

    def integers(self, low: int, high: int, *shape: int) -> torch.Tensor:
        """int64 in [low, high)."""
        drawn = torch.randint(low, high, shape, generator=self._generator)
        return drawn.to(self.device)

    def full(self, shape: Sequence[int], value: float) -> torch.Tensor:
        return torch.full(tuple(shape), value, dtype=self.dtype, device=self.device)


def norm_args(maker: Maker, tokens: int, hidden: int) -> Args:
    return {"x": maker.normal(tokens, hidden), "weight": maker.normal(hidden), "eps": 1e-5}


def add_norm_args(maker: Maker, tokens: int, hidden: int) -> Args:
    args = norm_args(maker, tokens, hidden)
    return {**args, "residual": maker.normal(tokens, hidden) * 3}


def silu_args(maker: Maker, tokens: int, intermediate: int) -> Args:
    return {"gate_up": maker.normal(tokens, 2 * intermediate) * 4}


def linear_args(
    maker: Maker, tokens: int, in_features: int, out_features: int, *, bias: bool = False
) -> Args:
    return {
        "x": maker.normal(tokens, in_features),
        "weight": maker.normal(out_features, in_features) / in_features**0.5,
        "bias": maker.normal(out_features) if bias else None,
    }


def embedding_args(maker: Maker, tokens: int, vocab_size: int, hidden: int) -> Args:
    return {
        "input_ids": maker.integers(0, vocab_size, tokens),
        "table": maker.normal(vocab_size, hidden),
    }


def cos_sin_table(
    max_positions: int, rotary_dim: int, theta: float = 10000.0, device: str = "cpu"
) -> torch.Tensor:
    """[max_positions, rotary_dim] float32: cosines, then sines."""
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float64) / rotary_dim
    angles = torch.arange(max_positions, dtype=torch.float64).outer(theta**-exponents)
    return torch.cat((angles.cos(), angles.sin()), dim=-1).float().to(device)


def rope_args(
    maker: Maker,
    tokens: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    *,
    block_size: int = 16,
    rotary_dim: int | None = None,
    skip: Sequence[int] = (),
) -> Args:
    """q, k and v are views of one fused product; tokens listed in skip get slot -1."""
    fused = maker.normal(tokens, heads + 2 * kv_heads, head_dim)
    q, k, v = fused[:, :heads], fused[:, heads : heads + kv_heads], fused[:, heads + kv_heads :]
    num_blocks = -(-tokens // block_size) + 2
    slots = maker.permutation(num_blocks * block_size)[:tokens]
    slots[list(skip)] = -1
    max_positions = 4096
    return {
        "q": q,
        "k": k,
        "v": v,
        "positions": maker.integers(0, max_positions, tokens),
        "cos_sin": cos_sin_table(max_positions, rotary_dim or head_dim, device=maker.device),
        "k_cache": maker.full((num_blocks, block_size, kv_heads, head_dim), NAN),
        "v_cache": maker.full((num_blocks, block_size, kv_heads, head_dim), NAN),
        "slot_mapping": slots.to(maker.device),
    }


def attention_batch(
    query_lens: Sequence[int], seq_lens: Sequence[int], block_table: torch.Tensor, device: str
) -> AttentionBatch:
    """block_table [R, max_blocks] int32. Leading sequences of one query token are decodes."""
    num_decodes = 0
    while num_decodes < len(query_lens) and query_lens[num_decodes] == 1:
        num_decodes += 1
    starts = torch.tensor([0, *query_lens], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    lens = torch.tensor(seq_lens, dtype=torch.int32)
    return AttentionBatch(
        query_start_loc=starts.to(device),
        seq_lens=lens.to(device),
        block_table=block_table.to(device),
        num_decodes=num_decodes,
        max_query_len=max(query_lens),
        max_seq_len=max(seq_lens),
        query_start_loc_host=starts,
        seq_lens_host=lens,
    )


def attention_args(
    maker: Maker,
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    heads: int,
    kv_heads: int,
    head_dim: int,
    *,
    block_size: int = 16,
) -> Args:
    """A cache whose blocks are scattered; every slot that no sequence owns is NaN, block 0
    (where unused block-table entries point) included."""
    blocks_of = [-(-n // block_size) for n in seq_lens]
    num_blocks = sum(blocks_of) + 2
    shuffled = (maker.permutation(num_blocks - 1) + 1).int()
    block_table = torch.zeros(len(seq_lens), max(blocks_of) + 1, dtype=torch.int32)
    shape = (num_blocks, block_size, kv_heads, head_dim)
    k_cache, v_cache = maker.full(shape, NAN), maker.full(shape, NAN)
    first = 0
    for row, (count, seq_len) in enumerate(zip(blocks_of, seq_lens, strict=True)):
        block_ids = shuffled[first : first + count]
        block_table[row, :count] = block_ids
        first += count
        token = torch.arange(seq_len)
        slots = (block_ids.long()[token // block_size] * block_size + token % block_size).to(
            maker.device
        )
        k_cache.flatten(0, 1)[slots] = maker.normal(seq_len, kv_heads, head_dim)
        v_cache.flatten(0, 1)[slots] = maker.normal(seq_len, kv_heads, head_dim)
    fused = maker.normal(sum(query_lens), heads + 2 * kv_heads, head_dim)
    return {
        "q": fused[:, :heads],
        "k_cache": k_cache,
        "v_cache": v_cache,
        "batch": attention_batch(query_lens, seq_lens, block_table, maker.device),
        "scale": head_dim**-0.5,
    }


def copy_args(maker: Maker, num_blocks: int, src: Sequence[int], dst: Sequence[int]) -> Args:
    shape = (num_blocks, 16, 3, 20)
    return {
        "k_cache": maker.normal(*shape),
        "v_cache": maker.normal(*shape),
        "src": torch.tensor(src, dtype=torch.int64, device=maker.device),
        "dst": torch.tensor(dst, dtype=torch.int64, device=maker.device),
    }


@dataclass(frozen=True, slots=True)
class Row:
    """Sampling parameters of one row, as SamplingBatch holds them."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    position: int = 0
    sample_index: int = 0


def sampling_batch(rows: Sequence[Row], device: str = "cpu") -> SamplingBatch:
    def column(name: str, dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor([getattr(row, name) for row in rows], dtype=dtype, device=device)

    signed_seeds = [row.seed - 2**64 if row.seed >= 2**63 else row.seed for row in rows]
    return SamplingBatch(
        temperature=column("temperature", torch.float32),
        top_k=column("top_k", torch.int32),
        top_p=column("top_p", torch.float32),
        min_p=column("min_p", torch.float32),
        seed=torch.tensor(signed_seeds, dtype=torch.int64, device=device),
        position=column("position", torch.int64),
        sample_index=column("sample_index", torch.int32),
        all_greedy=all(row.temperature == 0 for row in rows),
        any_filter=any(row.top_k > 0 or row.top_p < 1 or row.min_p > 0 for row in rows),
    )


def penalized_rows(
    maker: Maker, vocab_size: int, sizes: Sequence[int], num_rows: int
) -> tuple[torch.Tensor, PenaltyBatch]:
    """Logits [num_rows, V] float32 and penalties of all kinds for every other row, last rows
    first, on as many ids as sizes say."""
    logits = maker.normal(num_rows, vocab_size, dtype=torch.float32) * 4
    rows = torch.arange(num_rows).flip(0)[::2][: len(sizes)]
    ids = torch.cat([maker.permutation(vocab_size)[:size] for size in sizes])
    known = TokenLists(
        rows=rows.contiguous().to(maker.device),
        starts=torch.tensor([0, *sizes]).cumsum(0).to(maker.device),
        ids=ids.to(maker.device),
        longest=max(sizes),
    )
    counts = maker.integers(0, 4, len(ids)).float()
    repetition, frequency, presence = maker.normal(3, len(sizes), dtype=torch.float32)
    return logits, PenaltyBatch(known, counts, repetition.exp(), frequency, presence)


@dataclass(frozen=True, slots=True)
class Case:
    """One parity case: how to make an op's arguments, and which of them it changes."""

    op: str
    label: str
    make: Callable[[Maker], Args]
    in_place: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.op}-{self.label}"

    def run(
        self, ops: Ops, dtype: torch.dtype, device: str = "cpu", *, widen: bool = False
    ) -> dict[str, torch.Tensor]:
        """Fresh arguments through one op: its result as "out", and what it changed, on the CPU.

        widen turns the float arguments, drawn in dtype, into float64 first.
        """
        args = self.make(Maker(dtype, device))
        if widen:
            args = {name: _widened(value) for name, value in args.items()}
        if self.op == "linear":
            out = ops.linear(args["x"], ops.prepare_linear(args["weight"], args["bias"]))
        else:
            out = getattr(ops, self.op)(**args)
        results = {name: args[name].cpu() for name in self.in_place}
        return results if out is None else {"out": out.cpu(), **results}


def _widened(value: Any) -> Any:
    is_float = isinstance(value, torch.Tensor) and value.is_floating_point()
    return value.double() if is_float else value


def _norm_cases() -> list[Case]:
    shapes = [(1, 1), (1, 63), (3, 65), (7, 576), (2, 1000), (65, 64), (1, 4096)]
    cases = []
    for t, h in shapes:
        cases += [
            Case("rms_norm", f"{t}x{h}", partial(norm_args, tokens=t, hidden=h)),
            Case(
                "add_rms_norm",
                f"{t}x{h}",
                partial(add_norm_args, tokens=t, hidden=h),
                in_place=("residual",),
            ),
        ]
    return cases


def _silu_cases() -> list[Case]:
    shapes = [(1, 1), (1, 63), (3, 65), (5, 1536), (2, 1000)]
    return [
        Case("silu_mul", f"{t}x{i}", partial(silu_args, tokens=t, intermediate=i))
        for t, i in shapes
    ]


def _linear_cases() -> list[Case]:
    # tokens, in, out
    sizes = [(1, 1, 1), (1, 63, 65), (2, 576, 960), (3, 65, 1000), (5, 1000, 63), (8, 1536, 576)]
    sizes += [(9, 576, 576), (65, 576, 100), (4, 64, 1), (16, 1024, 1024)]
    return [
        Case(
            "linear",
            f"{t}x{i}x{o}{'-bias' if bias else ''}",
            partial(linear_args, tokens=t, in_features=i, out_features=o, bias=bias),
        )
        for bias in (False, True)
        for t, i, o in sizes
    ]


def _embedding_cases() -> list[Case]:
    shapes = [(1, 1), (65, 63), (3, 576)]
    return [
        Case("embedding", f"{t}x{h}", partial(embedding_args, tokens=t, vocab_size=100, hidden=h))
        for t, h in shapes
    ]


def _rope_cases() -> list[Case]:
    # tokens, heads, kv_heads, head_dim, block_size, rotary_dim, skipped tokens
    sizes: list[tuple[int, int, int, int, int, int | None, tuple[int, ...]]] = [
        (1, 9, 3, 64, 16, None, ()),
        (65, 9, 3, 64, 16, None, (0, 7, 64)),
        (17, 8, 2, 80, 8, None, (3,)),
        (5, 4, 4, 32, 1, None, ()),
        (7, 5, 1, 96, 16, 48, ()),
        (3, 2, 1, 128, 16, 32, (0, 1, 2)),
        (4, 2, 2, 10, 3, 6, ()),
    ]
    return [
        Case(
            "rope_and_cache",
            f"{t}t-{hq}:{hk}-d{d}-b{b}" + (f"-r{r}" if r else "") + ("-skip" if skip else ""),
            partial(
                rope_args,
                tokens=t,
                heads=hq,
                kv_heads=hk,
                head_dim=d,
                block_size=b,
                rotary_dim=r,
                skip=skip,
            ),
            in_place=("q", "k", "v", "k_cache", "v_cache"),
        )
        for t, hq, hk, d, b, r, skip in sizes
    ]


def _attention_cases() -> list[Case]:
    # name, query_lens, seq_lens, heads, kv_heads, head_dim, block_size
    decode = [1] * 6
    edges = [1, 15, 16, 17, 63, 65]
    sizes: list[tuple[str, list[int], list[int], int, int, int, int]] = [
        ("decode", decode, edges, 9, 3, 64, 16),
        ("decode", decode, edges, 8, 2, 80, 8),
        ("decode", decode, edges, 4, 4, 32, 1),
        ("decode", decode, edges, 5, 1, 96, 16),
        ("decode", decode, edges, 8, 1, 128, 16),
        ("decode", decode, edges, 34, 2, 32, 16),
        ("decode-long", [1, 1, 1], [1000, 2049, 512], 9, 3, 64, 16),
        ("decode-odd-dim", decode, edges, 3, 1, 10, 4),
        ("prefill", [1, 63, 65], [1, 63, 65], 9, 3, 64, 16),
        ("prefill", [17, 100], [17, 100], 8, 2, 80, 8),
        ("prefill", [33], [33], 4, 4, 32, 1),
        ("prefill", [40], [40], 5, 1, 96, 16),
        ("prefill", [70], [70], 2, 2, 128, 16),
        ("prefill-odd-dim", [19, 5], [19, 5], 3, 3, 10, 4),
        ("chunk", [16, 1, 130], [48, 100, 1000], 9, 3, 64, 16),
        ("chunk", [3, 64], [67, 129], 34, 2, 32, 16),
        ("mixed", [1, 1, 5, 33], [80, 17, 5, 97], 9, 3, 64, 16),
        ("mixed", [1, 2, 3], [1, 18, 259], 6, 2, 48, 16),
    ]
    return [
        Case(
            "attention",
            f"{name}-{hq}:{hk}-d{d}-b{b}",
            partial(
                attention_args,
                query_lens=ql,
                seq_lens=sl,
                heads=hq,
                kv_heads=hk,
                head_dim=d,
                block_size=b,
            ),
        )
        for name, ql, sl, hq, hk, d, b in sizes
    ]


def _copy_cases() -> list[Case]:
    # blocks, src, dst
    moves: list[tuple[str, int, list[int], list[int]]] = [
        ("none", 2, [], []),
        ("one", 3, [1], [2]),
        ("one-source", 9, [4, 4, 4, 4], [8, 1, 3, 5]),
        ("swap", 5, [1, 3, 2], [3, 1, 4]),
    ]
    return [
        Case(
            "copy_blocks",
            name,
            partial(copy_args, num_blocks=num, src=src, dst=dst),
            in_place=("k_cache", "v_cache"),
        )
        for name, num, src, dst in moves
    ]


CASES: tuple[Case, ...] = tuple(
    _norm_cases()
    + _silu_cases()
    + _linear_cases()
    + _embedding_cases()
    + _rope_cases()
    + _attention_cases()
    + _copy_cases()
)
"""Every op but sample, whose ids are compared exactly."""
