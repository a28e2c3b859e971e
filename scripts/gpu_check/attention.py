"""How fast is attention? Against the memory's bandwidth, and against torch's own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from kernels.inputs import attention_batch
from kernels.registry import load_ops
from scripts.gpu_check.outcome import Outcome

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from kernels.ops import AttentionBatch, Ops
    from scripts.gpu_check.measure import Bench

_BLOCK_SIZE = 16
_BANDWIDTH_GOAL = 0.85
_PREFILL_GOAL = 1.0


@dataclass(frozen=True, slots=True)
class _Case:
    num_seqs: int
    seq_len: int
    heads: int
    kv_heads: int
    head_dim: int

    def __str__(self) -> str:
        heads = f"{self.heads}:{self.kv_heads} heads of {self.head_dim}"
        return f"{self.num_seqs} x {self.seq_len}, {heads}"


@dataclass(frozen=True, slots=True)
class _Inputs:
    q: torch.Tensor  # [T, Hq, D]
    k_cache: torch.Tensor  # [N, B, Hk, D]
    v_cache: torch.Tensor
    batch: AttentionBatch
    scale: float

    def run(self, ops: Ops) -> torch.Tensor:
        return ops.attention(self.q, self.k_cache, self.v_cache, self.batch, self.scale)

    def contiguous(self, cache: torch.Tensor) -> torch.Tensor:
        """[R, Hk, S, D]: a cache as torch's attention wants it."""
        lens, table = self.batch.seq_lens_host, self.batch.block_table.long()
        seqs = cache[table].flatten(1, 2)[:, : int(lens[0])]
        return seqs.transpose(1, 2).contiguous()


def _inputs(case: _Case, query_len: int, bench: Bench) -> _Inputs:
    """Random values, in blocks that lie anywhere."""
    blocks = -(-case.seq_len // _BLOCK_SIZE)
    num_blocks = case.num_seqs * blocks + 1

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=bench.dtype, device=bench.device)

    cache = (num_blocks, _BLOCK_SIZE, case.kv_heads, case.head_dim)
    order = torch.randperm(num_blocks - 1, generator=torch.Generator().manual_seed(0)) + 1
    return _Inputs(
        q=normal(case.num_seqs * query_len, case.heads, case.head_dim),
        k_cache=normal(*cache),
        v_cache=normal(*cache),
        batch=attention_batch(
            [query_len] * case.num_seqs,
            [case.seq_len] * case.num_seqs,
            order.int().view(case.num_seqs, blocks),
            bench.device,
        ),
        scale=case.head_dim**-0.5,
    )


def decode(bench: Bench, work: Path) -> Outcome:
    """The bytes a decode needs over its time, as a share of a copy's."""
    outcome = Outcome()
    ops = load_ops("cuda" if bench.is_cuda else "cpu")
    bandwidth = bench.copy_bandwidth()
    outcome.add("device copy", bandwidth / 1e9, "GB/s")
    cases = [
        _Case(64, 2048, 32, 8, 64),
        _Case(64, 2048, 32, 8, 128),
        _Case(256, 1024, 32, 8, 64),
        _Case(4, 32768, 32, 8, 128),
        _Case(1, 131072, 32, 8, 128),
        _Case(64, 4096, 14, 2, 64),
    ]
    for case in [_Case(3, 40, 4, 2, 16)] if bench.tiny else cases:
        inputs = _inputs(case, 1, bench)
        seconds = bench.graph_seconds(lambda given=inputs: given.run(ops))  # type: ignore[misc]
        kv = 2 * case.seq_len * case.kv_heads * case.head_dim
        elements = kv + 2 * case.heads * case.head_dim
        table = 4 * -(-case.seq_len // _BLOCK_SIZE)
        num_bytes = case.num_seqs * (elements * bench.dtype.itemsize + table)
        reached = num_bytes / seconds
        outcome.add(
            f"decode attention over copy, {case}",
            reached / 1e9,
            "GB/s",
            ratio=reached / bandwidth,
            goal=_BANDWIDTH_GOAL,
        )
    return outcome


def prefill(bench: Bench, work: Path) -> Outcome:
    """Whole prompts, against scaled_dot_product_attention and FlexAttention on contiguous
    keys and values of the same numbers."""
    outcome = Outcome()
    ops = load_ops("cuda" if bench.is_cuda else "cpu")
    cases = [
        _Case(4, 2048, 32, 8, 128),
        _Case(1, 8192, 32, 8, 128),
        _Case(4, 2048, 32, 8, 64),
        _Case(1, 8192, 32, 8, 64),
    ]
    for case in [_Case(2, 40, 4, 2, 16)] if bench.tiny else cases:
        inputs = _inputs(case, case.seq_len, bench)
        ours = inputs.run(ops)
        seconds = bench.seconds(lambda given=inputs: given.run(ops))  # type: ignore[misc]
        flop = 2 * case.num_seqs * case.heads * case.head_dim * case.seq_len * (case.seq_len + 1)
        outcome.add(f"prefill attention, {case}", flop / seconds / 1e12, "TFLOP/s")
        for name, rival in _rivals(case, inputs, bench):
            try:
                theirs = rival()
                rival_seconds = bench.seconds(rival)
            except RuntimeError as error:
                # Not every backend takes every shape, on every device.
                first = (str(error).splitlines() or ["no message"])[0]
                outcome.notes.append(f"{name}, {case}: {first[:200]}")
                continue
            _check_same(outcome, f"{name}, {case}", ours, theirs)
            outcome.add(
                f"prefill attention over {name}, {case}",
                flop / rival_seconds / 1e12,
                "TFLOP/s",
                ratio=rival_seconds / seconds,
                goal=_PREFILL_GOAL if name != "cuDNN" and case.head_dim == 128 else None,
            )
    return outcome


def _rivals(
    case: _Case, inputs: _Inputs, bench: Bench
) -> Sequence[tuple[str, Callable[[], torch.Tensor]]]:
    """By name; each returns [R, Hq, S, D]."""
    q = inputs.q.view(case.num_seqs, case.seq_len, case.heads, case.head_dim)
    q = q.transpose(1, 2).contiguous()
    k, v = inputs.contiguous(inputs.k_cache), inputs.contiguous(inputs.v_cache)

    def sdpa() -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=inputs.scale, enable_gqa=True
        )

    def cudnn() -> torch.Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return sdpa()

    def is_seen(b: Any, h: Any, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return query >= key

    mask = create_block_mask(
        is_seen, B=None, H=None, Q_LEN=case.seq_len, KV_LEN=case.seq_len, device=bench.device
    )
    # On a CPU it would take a compiler to compile it with, for a figure that says nothing.
    attend = torch.compile(flex_attention, dynamic=False) if bench.is_cuda else flex_attention

    def flex() -> torch.Tensor:
        return attend(q, k, v, block_mask=mask, scale=inputs.scale, enable_gqa=True)

    rivals = [("SDPA", sdpa), ("FlexAttention", flex)]
    return [*rivals, ("cuDNN", cudnn)] if bench.is_cuda else rivals


def _check_same(outcome: Outcome, label: str, ours: torch.Tensor, theirs: torch.Tensor) -> None:
    """That both computed the same thing; how exactly is for tests/gpu."""
    apart = float((ours.view(theirs.transpose(1, 2).shape) - theirs.transpose(1, 2)).abs().max())
    allowed = 16 * torch.finfo(ours.dtype).eps * float(theirs.abs().max())
    if not apart <= allowed:
        outcome.failures.append(f"{label}: {apart:.3g} apart, allowed {allowed:.3g}")
