"""The Ops of a CUDA device: Triton kernels, and cuBLAS through torch for the products."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from kernels import shapes
from kernels.blocks import ComposedBlocks, copy_rows
from kernels.cuda.activation_mul import activation_mul
from kernels.cuda.configs import experts_config
from kernels.cuda.experts import CudaExperts, experts
from kernels.cuda.float8 import CONVERTS_E4M3
from kernels.cuda.fp8_linear import CudaFp8Linear, fp8_linear
from kernels.cuda.int4_linear import CudaInt4Linear, int4_linear
from kernels.cuda.lora import add_lora
from kernels.cuda.paged_decode import paged_decode
from kernels.cuda.paged_prefill import paged_prefill
from kernels.cuda.penalties import add_logit_bias, apply_penalties
from kernels.cuda.rms_norm import add_rms_norm, rms_norm
from kernels.cuda.rope_and_cache import rope_and_cache
from kernels.cuda.sample import sample
from kernels.cuda.tiles import AttentionVariant
from kernels.cuda.token_logprobs import token_logprobs
from kernels.lora import StackedLora, StackedSlots
from kernels.quantized import DequantizedLinears

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kernels.fp8 import Fp8Tensor
    from kernels.int4 import Int4Tensor
    from kernels.lora import LoraBatch, LoraSlots
    from kernels.ops import (
        Activation,
        AttentionBatch,
        PenaltyBatch,
        SamplingBatch,
        TokenLists,
        TokenLogprobs,
    )


@dataclass(frozen=True, slots=True)
class CudaLinear:
    weight: torch.Tensor  # [out, in]
    bias: torch.Tensor | None  # [out]
    out_features: int
    in_features: int


CudaWeight = CudaLinear | CudaInt4Linear | CudaFp8Linear


class CudaOps(ComposedBlocks, DequantizedLinears, StackedLora):
    """num_sms: multiprocessors to fill when few sequences decode. multiplies_fp8: whether
    products with fp8 weights quantize what they multiply. Both are the current device's by
    default.

    Each op raises kernels.shapes.ShapeError for arguments that its contract does not
    allow. Raises RuntimeError if there is no CUDA device and num_sms is not given (as tests
    under the interpreter give it).
    """

    name = "cuda"

    kv_cache_dtypes = frozenset((torch.float8_e4m3fn, torch.int8))
    has_narrow_kv_caches = False
    computes_int4 = True
    computes_fp8 = True
    _is_invariant = False

    def __init__(self, num_sms: int | None = None, *, multiplies_fp8: bool = False) -> None:
        if num_sms is None:
            if not torch.cuda.is_available():
                raise RuntimeError("no CUDA device: torch.cuda.is_available() is false")
            device = torch.cuda.current_device()
            num_sms = torch.cuda.get_device_properties(device).multi_processor_count
            multiplies_fp8 = torch.cuda.get_device_capability(device) >= CONVERTS_E4M3
        self._num_sms = num_sms
        self._multiplies_fp8 = multiplies_fp8

    def prepare_linear(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> CudaLinear:
        if bias is None:
            shapes.PREPARE_LINEAR.check(weight)
        else:
            shapes.PREPARE_LINEAR_BIAS.check(weight, bias)
        out_features, in_features = weight.shape
        return CudaLinear(weight, bias, out_features, in_features)

    def prepare_int4_linear(
        self, parts: Sequence[Int4Tensor], bias: torch.Tensor | None, dtype: torch.dtype
    ) -> CudaInt4Linear:
        _check_bias("int4", bias, dtype, sum(part.shape[0] for part in parts))
        return CudaInt4Linear.prepare(parts, bias)

    def prepare_fp8_linear(
        self, parts: Sequence[Fp8Tensor], bias: torch.Tensor | None, dtype: torch.dtype
    ) -> CudaFp8Linear:
        _check_bias("fp8", bias, dtype, sum(part.shape[0] for part in parts))
        return CudaFp8Linear.prepare(parts, bias)

    def linear(self, x: torch.Tensor, weight: CudaWeight) -> torch.Tensor:
        if isinstance(weight, CudaLinear):
            shapes.LINEAR.check(x, weight.weight)
            return self._float_linear(x, weight)
        shapes.LINEAR_INPUT.check(x)
        if x.shape[1] != weight.in_features:
            raise shapes.ShapeError(
                f"linear: x is {list(x.shape)}, the weight has {weight.in_features} input features"
            )
        if isinstance(weight, CudaInt4Linear):
            return int4_linear(x, weight, num_sms=self._num_sms, is_invariant=self._is_invariant)
        return fp8_linear(
            x,
            weight,
            multiplies_fp8=self._multiplies_fp8,
            num_sms=self._num_sms,
            is_invariant=self._is_invariant,
        )

    def _float_linear(self, x: torch.Tensor, weight: CudaLinear) -> torch.Tensor:
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
        cos_sin: torch.Tensor | None,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        q_norm: torch.Tensor | None = None,
        k_norm: torch.Tensor | None = None,
        eps: float = 0.0,
        k_scale: torch.Tensor | None = None,
        v_scale: torch.Tensor | None = None,
    ) -> None:
        assert (q_norm is None) == (k_norm is None)
        arguments = (q, k, v, positions, cos_sin, k_cache, v_cache, slot_mapping, q_norm, k_norm)
        shapes.ROPE_AND_CACHE.check(
            k_cache, arguments, (k_scale, v_scale), may_be_narrow=self.has_narrow_kv_caches
        )
        rope_and_cache(*arguments, eps, k_scale, v_scale)

    def attention(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        batch: AttentionBatch,
        scale: float,
        window: int | None = None,
        soft_cap: float | None = None,
        k_scale: torch.Tensor | None = None,
        v_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See Ops.attention. Raises ValueError for a head_dim over 256."""
        assert window is None or window > 0, window
        indexes = (batch.query_start_loc, batch.seq_lens, batch.block_table)
        arguments = (q, k_cache, v_cache, *indexes)
        shapes.ATTENTION.check(
            k_cache, arguments, (k_scale, v_scale), may_be_narrow=self.has_narrow_kv_caches
        )
        assert q.shape[1] % k_cache.shape[2] == 0, (q.shape, k_cache.shape)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        num_tokens = int(batch.query_start_loc_host[-1])
        # Tokens that pad the batch belong to no sequence.
        out[num_tokens:].zero_()
        variant = AttentionVariant(window, soft_cap, k_scale, v_scale)
        self._attend(q, k_cache, v_cache, batch, scale, variant, out)
        return out

    def _attend(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        batch: AttentionBatch,
        scale: float,
        variant: AttentionVariant,
        out: torch.Tensor,
    ) -> None:
        """Fills out [T, Hq, D] for all tokens that belong to a sequence."""
        paged_decode(q, k_cache, v_cache, batch, scale, out, variant, num_sms=self._num_sms)
        paged_prefill(q, k_cache, v_cache, batch, scale, out, variant)

    def copy_blocks(
        self,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        src: torch.Tensor,
        dst: torch.Tensor,
        k_scale: torch.Tensor | None = None,
        v_scale: torch.Tensor | None = None,
    ) -> None:
        shapes.COPY_BLOCKS.check(k_cache, (k_cache, v_cache, src, dst), (k_scale, v_scale))
        copy_rows((k_cache, v_cache, k_scale, v_scale), src, dst)

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        shapes.SILU_MUL.check(gate_up)
        return activation_mul(gate_up, gelu=False)

    def gelu_tanh_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        shapes.GELU_TANH_MUL.check(gate_up)
        return activation_mul(gate_up, gelu=True)

    def prepare_experts(self, gate_up: torch.Tensor, down: torch.Tensor) -> CudaExperts:
        shapes.PREPARE_EXPERTS.check(gate_up, down)
        num_experts, _, in_features = gate_up.shape
        return CudaExperts(gate_up.contiguous(), down.contiguous(), num_experts, in_features)

    def experts(
        self,
        x: torch.Tensor,
        weights: CudaExperts,
        expert_ids: torch.Tensor,
        expert_scales: torch.Tensor,
        activation: Activation,
    ) -> torch.Tensor:
        shapes.EXPERTS.check(x, expert_ids, expert_scales)
        assert x.shape[1] == weights.in_features, (x.shape, weights.in_features)
        # One tile size, whatever the batch: then one order of summation.
        config = experts_config(x.element_size(), 1) if self._is_invariant else None
        return experts(
            x,
            weights,
            expert_ids.contiguous(),
            expert_scales.contiguous(),
            gelu=activation == "gelu_tanh",
            config=config,
        )

    def add_lora(
        self, y: torch.Tensor, x: torch.Tensor, slots: LoraSlots, batch: LoraBatch
    ) -> None:
        assert isinstance(slots, StackedSlots), type(slots)
        shapes.ADD_LORA.check(y, x, slots.a, slots.b, batch.tokens, batch.tiles)
        add_lora(y, x, slots, batch)

    def sample(self, logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
        columns = (batch.temperature, batch.top_k, batch.top_p, batch.min_p)
        draws = (batch.seed, batch.position, batch.sample_index)
        shapes.SAMPLE.check(logits, *columns, *draws)
        return sample(logits, batch, num_sms=self._num_sms)

    def apply_penalties(self, logits: torch.Tensor, batch: PenaltyBatch) -> None:
        shapes.check_penalties(logits, batch)
        apply_penalties(logits, batch)

    def add_logit_bias(self, logits: torch.Tensor, ids: TokenLists, values: torch.Tensor) -> None:
        shapes.ADD_LOGIT_BIAS.check(logits, ids.rows, ids.starts, ids.ids, values)
        add_logit_bias(logits, ids, values)

    def token_logprobs(
        self, logits: torch.Tensor, token_ids: torch.Tensor, *, with_all: bool = False
    ) -> TokenLogprobs:
        shapes.TOKEN_LOGPROBS.check(logits, token_ids)
        return token_logprobs(logits, token_ids, with_all=with_all)


def _check_bias(kind: str, bias: torch.Tensor | None, dtype: torch.dtype, rows: int) -> None:
    if bias is not None and (bias.shape != (rows,) or bias.dtype != dtype):
        raise shapes.ShapeError(
            f"prepare_{kind}_linear: bias is {bias.dtype} {list(bias.shape)}; want {dtype} [{rows}]"
        )
