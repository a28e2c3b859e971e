"""The Ops of a CUDA device: Triton kernels, and cuBLAS through torch for the products."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from kernels import shapes
from kernels.blocks import ComposedBlocks
from kernels.cuda.paged_decode import paged_decode
from kernels.cuda.paged_prefill import paged_prefill
from kernels.cuda.rms_norm import add_rms_norm, rms_norm
from kernels.cuda.rope_and_cache import rope_and_cache
from kernels.cuda.sample import sample
from kernels.cuda.silu_mul import silu_mul
from kernels.quantized import DequantizedLinears

if TYPE_CHECKING:
    from kernels.ops import AttentionBatch, SamplingBatch


@dataclass(frozen=True, slots=True)
class CudaLinear:
    weight: torch.Tensor  # [out, in]
    bias: torch.Tensor | None  # [out]
    out_features: int
    in_features: int


class CudaOps(ComposedBlocks, DequantizedLinears):
    """num_sms: multiprocessors to fill when few sequences decode; the current device's by default.

    Each op raises kernels.shapes.ShapeError for arguments that its contract does not
    allow. Raises RuntimeError if there is no CUDA device and num_sms is not given (as tests
    under the interpreter give it).
    """

    name = "cuda"

    def __init__(self, num_sms: int | None = None) -> None:
        if num_sms is None:
            if not torch.cuda.is_available():
                raise RuntimeError("no CUDA device: torch.cuda.is_available() is false")
            device = torch.cuda.current_device()
            num_sms = torch.cuda.get_device_properties(device).multi_processor_count
        self._num_sms = num_sms

    def prepare_linear(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> CudaLinear:
        if bias is None:
            shapes.PREPARE_LINEAR.check(weight)
        else:
            shapes.PREPARE_LINEAR_BIAS.check(weight, bias)
        out_features, in_features = weight.shape
        return CudaLinear(weight, bias, out_features, in_features)

    def linear(self, x: torch.Tensor, weight: CudaLinear) -> torch.Tensor:
        shapes.LINEAR.check(x, weight.weight)
        return torch.nn.functional.linear(x, weight.weight, weight.bias)

    def embedding(self, input_ids: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        shapes.EMBEDDING.check(input_ids, table)
        return torch.nn.functional.embedding(input_ids, table)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        shapes.RMS_NORM.check(x, weight)
        return rms_norm(x, weight, eps)

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        shapes.ADD_RMS_NORM.check(x, residual, weight)
        return add_rms_norm(x, residual, weight, eps)

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
        shapes.ROPE_AND_CACHE.check(q, k, v, positions, cos_sin, k_cache, v_cache, slot_mapping)
        rope_and_cache(q, k, v, positions, cos_sin, k_cache, v_cache, slot_mapping)

    def attention(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        batch: AttentionBatch,
        scale: float,
    ) -> torch.Tensor:
        """See Ops.attention. Raises ValueError for a head_dim over 256."""
        shapes.ATTENTION.check(
            q, k_cache, v_cache, batch.query_start_loc, batch.seq_lens, batch.block_table
        )
        assert q.shape[1] % k_cache.shape[2] == 0, (q.shape, k_cache.shape)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        num_tokens = int(batch.query_start_loc_host[-1])
        # Tokens that pad the batch belong to no sequence.
        out[num_tokens:].zero_()
        self._attend(q, k_cache, v_cache, batch, scale, out)
        return out

    def _attend(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        batch: AttentionBatch,
        scale: float,
        out: torch.Tensor,
    ) -> None:
        """Fills out [T, Hq, D] for all tokens that belong to a sequence."""
        paged_decode(q, k_cache, v_cache, batch, scale, out, num_sms=self._num_sms)
        paged_prefill(q, k_cache, v_cache, batch, scale, out)

    def copy_blocks(
        self,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        src: torch.Tensor,
        dst: torch.Tensor,
    ) -> None:
        shapes.COPY_BLOCKS.check(k_cache, v_cache, src, dst)
        for cache in (k_cache, v_cache):
            cache.index_copy_(0, dst, cache.index_select(0, src))

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        shapes.SILU_MUL.check(gate_up)
        return silu_mul(gate_up)

    def sample(self, logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
        columns = (batch.temperature, batch.top_k, batch.top_p, batch.min_p)
        draws = (batch.seed, batch.position, batch.sample_index)
        shapes.SAMPLE.check(logits, *columns, *draws)
        return sample(logits, batch)
