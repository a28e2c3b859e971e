"""The ops contract: every op that a backend must have, with shapes.

T tokens in the step, R sequences in the step, Hq/Hk query/KV heads, D head_dim,
N KV blocks, B block_size, V vocabulary, I intermediate size. The torch reference
(kernels/reference) defines each op; kernels/cuda and kernels/cpu must agree
with it within kernels/tolerances.py. Outputs are freshly allocated unless the
docstring says "in place". All integer tensors are on the op's device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from kernels.quantized import QuantizedTensor


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """A flat batch: sequence r owns tokens [query_start_loc[r], query_start_loc[r+1]),
    which are the last of its seq_lens[r] tokens. Sequences [0, num_decodes) have
    exactly one token each; the rest are prefill chunks. KV of all the batch's
    tokens is already in the cache when attention runs.
    """

    query_start_loc: torch.Tensor  # [R + 1] int32
    seq_lens: torch.Tensor  # [R] int32
    block_table: torch.Tensor  # [R, max_blocks] int32; entries past a sequence's end are 0
    num_decodes: int
    max_query_len: int
    max_seq_len: int
    # The same numbers where the host can read them without a sync.
    query_start_loc_host: torch.Tensor  # [R + 1] int32, CPU
    seq_lens_host: torch.Tensor  # [R] int32, CPU


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """One row per sequence that samples in this step. S = rows."""

    temperature: torch.Tensor  # [S] float32; 0 = greedy
    top_k: torch.Tensor  # [S] int32; 0 = all
    top_p: torch.Tensor  # [S] float32
    min_p: torch.Tensor  # [S] float32
    seed: torch.Tensor  # [S] int64, the bits of the uint64 seed
    position: torch.Tensor  # [S] int64, absolute output position: 0 for the first output token
    sample_index: torch.Tensor  # [S] int32, the branch when n > 1
    all_greedy: bool
    any_filter: bool  # whether any row has top_k, top_p or min_p on


class LinearWeight(Protocol):
    """A weight as its backend keeps it: y = x @ weight.T (+ bias)."""

    @property
    def out_features(self) -> int: ...
    @property
    def in_features(self) -> int: ...


@dataclass(frozen=True, slots=True)
class AttentionBlock:
    """residual += out(attention(rope(qkv(rms_norm(residual)))))"""

    norm: torch.Tensor  # [H]
    eps: float
    qkv: LinearWeight  # [(Hq + 2 Hk) D, H]
    out: LinearWeight  # [H, Hq D]
    num_heads: int
    num_kv_heads: int
    head_dim: int
    cos_sin: torch.Tensor  # [max_positions, rotary_dim] float32, as rope_and_cache has it
    scale: float


@dataclass(frozen=True, slots=True)
class MlpBlock:
    """residual += down(silu_mul(gate_up(rms_norm(residual))))"""

    norm: torch.Tensor  # [H]
    eps: float
    gate_up: LinearWeight  # [2I, H]
    down: LinearWeight  # [H, I]


Block = AttentionBlock | MlpBlock


@dataclass(frozen=True, slots=True)
class BlockBatch:
    """What blocks read of a step's flat batch."""

    positions: torch.Tensor  # [T] int64
    slot_mapping: torch.Tensor  # [T] int64
    attention: AttentionBatch


class BlockStack:
    """The residual blocks of a model, first to last, as a backend keeps them."""

    def __init__(self, blocks: Sequence[Block]) -> None:
        self.blocks = tuple(blocks)


class Ops(Protocol):
    name: str

    def prepare_linear(
        self, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> LinearWeight:
        """weight [out, in]; may repack it once, at load."""
        ...

    computes_quantized: bool
    """Whether products with quantized weights use their codes, and gain by it; else
    prepare_quantized_linear makes floats of them and says so in the log."""

    def prepare_quantized_linear(
        self,
        parts: Sequence[QuantizedTensor],
        bias: torch.Tensor | None,
        dtype: torch.dtype,
    ) -> LinearWeight:
        """The rows of all parts as one weight for x of dtype; may repack them, once, at load."""
        ...

    def quantized_embedding(
        self, input_ids: torch.Tensor, table: LinearWeight, dtype: torch.dtype
    ) -> torch.Tensor:
        """input_ids [T] int64, table [V, H] of one part -> [T, H] in dtype."""
        ...

    def linear(self, x: torch.Tensor, weight: LinearWeight) -> torch.Tensor:
        """x [T, in] -> [T, out]."""
        ...

    def embedding(self, input_ids: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        """input_ids [T] int64, table [V, H] -> [T, H]."""
        ...

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """x [T, H] -> [T, H]: x / sqrt(mean(x^2) + eps) * weight, float32 inside."""
        ...

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        """residual += x in place; returns rms_norm(residual). x, residual [T, H]."""
        ...

    def rope_and_cache(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        positions: torch.Tensor,
        cos_sin: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Rotates q in place and writes rotated k, and v, to the cache.

        q [T, Hq, D], k [T, Hk, D], v [T, Hk, D] (rows may be strided: views of
        one fused QKV product), positions [T] int64, cos_sin [max_positions, rotary_dim]
        float32 (cosines, then sines), k_cache and v_cache [N, B, Hk, D],
        slot_mapping [T] int64 (block_id * B + offset; -1 = write nothing).
        Rotation pairs element i with i + rotary_dim / 2; elements past
        rotary_dim pass through.
        """
        ...

    def attention(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        batch: AttentionBatch,
        scale: float,
    ) -> torch.Tensor:
        """Causal attention of q [T, Hq, D] over the paged cache -> [T, Hq, D].

        Query head h reads KV head h // (Hq // Hk). Token t of sequence r, at
        absolute position p = seq_lens[r] - query_len[r] + (t - query_start_loc[r]),
        sees cache positions [0, p].
        """
        ...

    def copy_blocks(
        self,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        src: torch.Tensor,
        dst: torch.Tensor,
    ) -> None:
        """Blocks dst become copies of blocks src, in place and all at the same time.

        k_cache and v_cache [N, B, Hk, D], src and dst [C] int64. No block is twice in
        dst; a block may be in both: src is read before anything is written.
        """
        ...

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """gate_up [T, 2I] -> silu(gate_up[:, :I]) * gate_up[:, I:], [T, I]."""
        ...

    def prepare_blocks(self, blocks: Sequence[Block]) -> BlockStack:
        """All of one model's; may lay them out once, at load."""
        ...

    def run_blocks(
        self,
        stack: BlockStack,
        residual: torch.Tensor,
        batch: BlockBatch,
        kv_caches: Sequence[tuple[torch.Tensor, torch.Tensor]],
    ) -> None:
        """residual [T, H] through all blocks, in place; writes the batch's KV to kv_caches,
        whose entries belong to the attention blocks in order. kernels/blocks.py composes
        it of the other ops, which defines it."""
        ...

    def sample(self, logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
        """logits [S, V] -> ids [S] int64.

        temperature 0 takes the argmax (lowest id on ties). Otherwise the
        logits are divided by the temperature, then filtered by top_k, top_p
        and min_p as transformers does it, in that order, and the token is the
        first whose cumulative probability, in id order over the kept tokens,
        exceeds u * total. u in [0, 1) is Philox4x32-10 (Salmon et al., SC 2011)
        with key = seed and counter = (position, sample_index, 0, 0): a pure
        function of (logits, parameters, seed, position, sample_index). Its 53
        bits are spelt out in kernels/reference/philox.py. NaN logits count as
        -inf, and a row whose greatest logit is not finite is greedy.
        """
        ...
