"""Says whether an op's rows are the same to the last bit however they are batched."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import torch

from kernels.inputs import Maker, attention_batch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kernels.ops import Ops

BLOCK_SIZE = 16


@dataclass
class Attended:
    """One sequence's queries over its cache, beside a second one that comes along."""

    q: torch.Tensor  # [L, Hq, D]
    other_q: torch.Tensor  # [L, Hq, D]
    k_cache: torch.Tensor  # [N, B, Hk, D]
    v_cache: torch.Tensor  # [N, B, Hk, D]

    @classmethod
    def make(
        cls, dtype: torch.dtype, length: int, heads: int, kv_heads: int, head_dim: int
    ) -> Attended:
        maker = Maker(dtype, seed=length)
        num_blocks = -(-length // BLOCK_SIZE)
        cache = (2 * num_blocks + 1, BLOCK_SIZE, kv_heads, head_dim)
        return cls(
            maker.normal(length, heads, head_dim),
            maker.normal(length, heads, head_dim),
            maker.normal(*cache),
            maker.normal(*cache),
        )

    def run(self, ops: Ops, parts: Sequence[tuple[bool, int, int]]) -> list[torch.Tensor]:
        """One call over these parts of the sequences: (whether of the other, begin, end)."""
        width = (len(self.k_cache) - 1) // 2
        # Every other block belongs to the other sequence.
        table = torch.arange(2 * width, dtype=torch.int32).view(width, 2).T + 1
        rows = table[[int(other) for other, _, _ in parts]]
        q = torch.cat([(self.other_q if o else self.q)[b:e] for o, b, e in parts])
        lens = [e - b for _, b, e in parts]
        batch = attention_batch(lens, [e for _, _, e in parts], rows, "cpu")
        out = ops.attention(q, self.k_cache, self.v_cache, batch, 0.3)
        return list(out.split(lens))


def assert_attention_is_invariant(ops: Ops, attended: Attended, decodes: Sequence[int]) -> None:
    """Whole, in chunks of many sizes, one token at a time, alone and with company."""
    length = len(attended.q)
    (whole,) = attended.run(ops, [(False, 0, length)])
    assert whole.isfinite().all()
    for begin, end in pairwise(
        sorted({n for n in (0, 1, 3, 8, 21, 64, 65, length // 2) if n < length} | {length})
    ):
        (chunk,) = attended.run(ops, [(False, begin, end)])
        assert torch.equal(chunk, whole[begin:end]), f"chunk [{begin}, {end}) of {length}"
        shared, _ = attended.run(ops, [(False, begin, end), (True, 5, 9)])
        assert torch.equal(shared, whole[begin:end]), f"chunk [{begin}, {end}) beside another"
    for at in decodes:
        (token,) = attended.run(ops, [(False, at, at + 1)])
        assert torch.equal(token, whole[at : at + 1]), f"decode at {at} of {length}"
        company = [(True, n, n + 1) for n in range(0, length, max(1, length // 6))]
        beside = attended.run(ops, [*company, (False, at, at + 1), (True, 0, min(40, length))])
        assert torch.equal(beside[len(company)], whole[at : at + 1]), f"decode at {at} beside many"


def assert_linear_is_invariant(
    ops: Ops, dtype: torch.dtype, rows: int, in_features: int, out_features: int
) -> None:
    """Every row alone, and in batches of all sizes at other places."""
    maker = Maker(dtype, seed=in_features)
    x = maker.normal(rows, in_features)
    weight = ops.prepare_linear(maker.normal(out_features, in_features), maker.normal(out_features))
    whole = ops.linear(x, weight)
    for count in (1, 2, 3, 5, 8, 9, 16, 17, 31, 33, rows - 1):
        for begin in sorted({0, rows // 3, rows - count}):
            if begin + count <= rows:
                part = ops.linear(x[begin : begin + count].clone(), weight)
                assert torch.equal(part, whole[begin : begin + count]), (count, begin)
