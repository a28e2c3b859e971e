"""Sampling on the device: random numbers by a kernel, the distribution by torch.

The filters and the cumulative sum are the reference's own torch code, run on the
device in float64 without a host sync; the 140 small launches that Philox takes in
torch are one kernel here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from kernels.cuda.configs import ENABLE_FP_FUSION
from kernels.reference.sample import kept_weights

if TYPE_CHECKING:
    from kernels.ops import SamplingBatch

BLOCK_S = 32


@triton.jit(do_not_specialize=["num_rows"])
def philox_uniform_kernel(
    seed_ptr,  # [S] int64, the bits of the uint64 seed
    position_ptr,  # [S] int64
    sample_index_ptr,  # [S] int32
    uniform_ptr,  # [S] float64
    num_rows,
    BLOCK_S: tl.constexpr,
):
    """u = (w0 2^21 + floor(w1 / 2^11)) / 2^53, with w = Philox4x32-10 of key = seed and
    counter = (low word of position, sample_index, 0, 0).

    Salmon et al., SC 2011, https://doi.org/10.1145/2063384.2063405.
    """
    offs = tl.program_id(0) * BLOCK_S + tl.arange(0, BLOCK_S)
    in_s = offs < num_rows
    # [BLOCK_S]
    seed = tl.load(seed_ptr + offs, mask=in_s, other=0)
    position = tl.load(position_ptr + offs, mask=in_s, other=0)
    sample_index = tl.load(sample_index_ptr + offs, mask=in_s, other=0)
    zero = tl.zeros([BLOCK_S], dtype=tl.uint32)
    w0, w1, _w2, _w3 = tl.philox(
        seed, (position & 0xFFFFFFFF).to(tl.uint32), sample_index.to(tl.uint32), zero, zero
    )
    bits = (w0.to(tl.int64) << 21) | (w1.to(tl.int64) >> 11)
    # 2^-53: the product is exact.
    tl.store(uniform_ptr + offs, bits.to(tl.float64) * 1.1102230246251565e-16, mask=in_s)


def philox_uniform(
    seed: torch.Tensor, position: torch.Tensor, sample_index: torch.Tensor
) -> torch.Tensor:
    """seed [S] int64, position [S] int64, sample_index [S] int32 -> u [S] float64 in [0, 1)."""
    num_rows = seed.shape[0]
    uniform = torch.empty(num_rows, dtype=torch.float64, device=seed.device)
    if num_rows:
        philox_uniform_kernel[(triton.cdiv(num_rows, BLOCK_S),)](
            seed,
            position,
            sample_index,
            uniform,
            num_rows,
            BLOCK_S=BLOCK_S,
            num_warps=1,
            enable_fp_fusion=ENABLE_FP_FUSION,
        )
    return uniform


def sample(logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
    """logits [S, V] -> ids [S] int64. See kernels.ops.Ops.sample."""
    # NaN would win an argmax; it counts as -inf.
    clean = logits.masked_fill(logits.isnan(), float("-inf"))
    greedy = clean.argmax(dim=-1)
    if batch.all_greedy:
        return greedy
    kept = kept_weights(clean.double(), batch)
    cumulative = kept.cumsum(dim=-1)
    u = philox_uniform(batch.seed, batch.position, batch.sample_index)
    target = (u * cumulative[:, -1]).unsqueeze(1)
    drawn = torch.searchsorted(cumulative, target, right=True).squeeze(1)
    # u * total may round up to total, beyond which there is nothing.
    token_index = torch.arange(logits.shape[1], device=logits.device)
    last_kept = torch.where(kept > 0, token_index, -1).amax(dim=-1)
    drawn = torch.minimum(drawn, last_kept)
    finite = clean.amax(dim=-1).isfinite()
    return torch.where((batch.temperature > 0) & finite, drawn, greedy)
