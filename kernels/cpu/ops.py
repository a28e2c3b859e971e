"""The CPU backend: C++ ops (csrc/), or torch in their place where they are not built."""

from __future__ import annotations

import ctypes
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from kernels import shapes
from kernels.blocks import copy_rows, run_blocks
from kernels.cpu import library, linear, quantized
from kernels.cpu.blocks import CpuBlocks
from kernels.cpu.experts import CpuExperts
from kernels.cpu.library import (
    ACTIVATIONS,
    DTYPES,
    AttentionSizes,
    HeadNorms,
    Library,
    PackedWeight,
    RopeSizes,
    SamplingColumns,
    attention_limits,
    cache_codes,
    pointer,
    table_sizes,
)
from kernels.cpu.linear import CpuLinear
from kernels.cpu.lora import PackedSlots
from kernels.cpu.memory import WeightMemory
from kernels.cpu.quantized import CpuQuantizedLinear
from kernels.fp8 import DequantizedFp8Linears
from kernels.int4 import DequantizedInt4Linears
from kernels.quantized import dequantize, quantize_q8_0
from kernels.reference.logit_ops import TorchLogitOps
from kernels.reference.ops import ReferenceOps

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kernels.lora import LoraBatch, LoraSlots
    from kernels.ops import (
        Activation,
        AttentionBatch,
        Block,
        BlockBatch,
        BlockStack,
        ExpertWeights,
        KVCache,
        LinearWeight,
        Ops,
        SamplingBatch,
    )
    from kernels.quantized import QuantizedTensor

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TorchLinear:
    weight: torch.Tensor  # [out, in], dense
    bias: torch.Tensor | None  # [out], dense
    out_features: int
    in_features: int


def load_cpu_ops(*, use_library: bool = True) -> Ops:
    """CpuOps for this CPU; TorchCpuOps, with a warning in the log, if the C++ is not built
    (or use_library is off)."""
    supported = library.supported_variants() if use_library else []
    if supported:
        variant = supported[-1]
        ops = CpuOps(Library(variant))
        if variant.uses_tiles:
            plain = CpuOps(Library(supported[-2]))
            if not _agree(ops, plain):
                _log.warning("CPU ops: without %s: its products are wrong here", variant.name)
                variant, ops = supported[-2], plain
        _log.info("CPU ops: %s", variant.path().name)
        return ops
    _log.warning("%s", library.why_missing() if use_library else "the C++ CPU ops are switched off")
    return TorchCpuOps()


def _agree(ops: CpuOps, other: CpuOps) -> bool:
    """Whether both make the same of small integers, whose sums every format holds. Tile
    registers were emulated where they were tested: each machine shows first that its own do
    the same."""
    x = (torch.arange(37 * 96).view(37, 96) % 3 - 1).bfloat16()
    weight = (torch.arange(48 * 96).view(48, 96) % 5 - 2).bfloat16()
    codes = [quantize_q8_0(weight.float())]

    def products(of: CpuOps) -> tuple[torch.Tensor, torch.Tensor]:
        packed = of.prepare_quantized_linear(codes, None, torch.bfloat16)
        return of.linear(x, of.prepare_linear(weight)), of.linear(x, packed)

    return all(map(torch.equal, products(ops), products(other)))


def _check_linear(weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    if bias is None:
        shapes.PREPARE_LINEAR.check(weight)
    else:
        shapes.PREPARE_LINEAR_BIAS.check(weight, bias)


class TorchCpuOps(ReferenceOps):
    """The reference, but with torch's own matrix product, which keeps the weights' dtype."""

    name = "cpu"

    def prepare_linear(  # type: ignore[override]  # another weight type is the point
        self, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> TorchLinear:
        weight = weight.contiguous()
        _check_linear(weight, bias)
        return TorchLinear(weight, bias, *weight.shape)

    def linear(self, x: torch.Tensor, weight: LinearWeight) -> torch.Tensor:
        assert isinstance(weight, TorchLinear), type(weight)
        return torch.nn.functional.linear(x, weight.weight, weight.bias)


class CpuOps(DequantizedInt4Linears, DequantizedFp8Linears, TorchLogitOps):
    """C++ for float32, bfloat16 and float16, with float32 inside; embedding, penalties, biases
    and logprobs are torch's.

    Products and the blocks made of them sum in one order, so that a row's results do not
    depend on the rows beside it, bit for bit.
    """

    name = "cpu"
    kv_cache_dtypes = frozenset((torch.float8_e4m3fn, torch.int8))
    has_narrow_kv_caches = True

    def __init__(self, lib: Library) -> None:
        self._lib = lib
        self._memory = WeightMemory()
        self.variant = lib.variant.name
        # Without byte dot products, codes are slower than floats.
        self.computes_quantized = lib.variant.name != "portable"

    def prepare_linear(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> CpuLinear:
        weight = weight.contiguous()
        _check_linear(weight, bias)
        out_features, in_features = weight.shape
        code = DTYPES[weight.dtype]
        size = self._lib.packed_elements(code, in_features, out_features)
        packed = self._memory.empty(size, weight.dtype)
        self._lib.pack(
            code,
            weight.data_ptr(),
            in_features,
            out_features,
            packed.data_ptr(),
            torch.get_num_threads(),
        )
        bias = None if bias is None else bias.float().contiguous()
        native = PackedWeight(
            code,
            in_features,
            out_features,
            packed.data_ptr(),
            None if bias is None else bias.data_ptr(),
        )
        return CpuLinear(packed, bias, out_features, in_features, native)

    def prepare_quantized_linear(
        self,
        parts: Sequence[QuantizedTensor],
        bias: torch.Tensor | None,
        dtype: torch.dtype,
    ) -> CpuLinear | CpuQuantizedLinear:
        packed = quantized.pack(self._lib, parts, bias, dtype)
        if packed is not None:
            return packed
        return self.prepare_linear(torch.cat([dequantize(part, dtype) for part in parts]), bias)

    def packed_embedding(
        self, input_ids: torch.Tensor, table: LinearWeight, dtype: torch.dtype
    ) -> torch.Tensor:
        """Raises IndexError on an id out of range."""
        assert isinstance(table, CpuLinear | CpuQuantizedLinear), type(table)
        shapes.PACKED_EMBEDDING.check(input_ids)
        assert input_ids.is_contiguous() and table.dtype == dtype, (table.dtype, dtype)
        out = torch.empty(input_ids.shape[0], table.in_features, dtype=dtype)
        if isinstance(table, CpuLinear):
            stray = linear.read_rows(self._lib, table, input_ids, out)
        else:
            stray = quantized.read_rows(self._lib, table, input_ids, out)
        if stray >= 0:
            raise IndexError(
                f"packed_embedding: id {int(input_ids[stray])} of a table of {table.out_features}"
            )
        return out

    def linear(self, x: torch.Tensor, weight: LinearWeight) -> torch.Tensor:
        assert isinstance(weight, CpuLinear | CpuQuantizedLinear), type(weight)
        shapes.LINEAR_INPUT.check(x)
        if x.shape[1] != weight.in_features or x.dtype != weight.dtype:
            raise shapes.ShapeError(
                f"linear: weight is {weight.dtype} [{weight.out_features}, {weight.in_features}], "
                f"x is {x.dtype} {list(x.shape)}"
            )
        out = x.new_empty(x.shape[0], weight.out_features)
        self._lib.linear(
            DTYPES[x.dtype],
            x.data_ptr(),
            x.stride(0),
            ctypes.byref(weight.native),
            out.data_ptr(),
            x.shape[0],
            torch.get_num_threads(),
        )
        return out

    def lora_slots(
        self,
        num_slots: int,
        max_rank: int,
        in_features: int,
        rows: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
    ) -> PackedSlots:
        return PackedSlots(self.prepare_linear, num_slots, rows)

    def add_lora(
        self, y: torch.Tensor, x: torch.Tensor, slots: LoraSlots, batch: LoraBatch
    ) -> None:
        assert isinstance(slots, PackedSlots), type(slots)
        slots.add(self.linear, y, x, batch)

    def prepare_blocks(self, blocks: Sequence[Block]) -> BlockStack:
        return CpuBlocks(blocks)

    def run_blocks(
        self,
        stack: BlockStack,
        residual: torch.Tensor,
        batch: BlockBatch,
        kv_caches: Sequence[KVCache],
    ) -> None:
        """One call of C++ for each run of blocks without experts, whose blocks are composed;
        so are all where a token has an adapter.

        Raises IndexError, before such a run writes anything, on a position, slot, block id
        or sequence bound out of range.
        """
        assert isinstance(stack, CpuBlocks), type(stack)
        if batch.lora is not None:
            run_blocks(self, stack, residual, batch, kv_caches)
            return
        stack.run(self, self._lib, residual, batch, kv_caches)

    def embedding(self, input_ids: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        shapes.EMBEDDING.check(input_ids, table)
        return torch.nn.functional.embedding(input_ids, table)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        shapes.RMS_NORM.check(x, weight)
        tokens, hidden = x.shape
        out = x.new_empty(tokens, hidden)
        self._lib.rms_norm(
            DTYPES[x.dtype],
            x.data_ptr(),
            x.stride(0),
            weight.data_ptr(),
            out.data_ptr(),
            tokens,
            hidden,
            eps,
            torch.get_num_threads(),
        )
        return out

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        shapes.ADD_RMS_NORM.check(x, residual, weight)
        tokens, hidden = x.shape
        out = x.new_empty(tokens, hidden)
        self._lib.add_rms_norm(
            DTYPES[x.dtype],
            x.data_ptr(),
            x.stride(0),
            residual.data_ptr(),
            residual.stride(0),
            weight.data_ptr(),
            out.data_ptr(),
            tokens,
            hidden,
            eps,
            torch.get_num_threads(),
        )
        return out

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
        """Raises IndexError, before anything is written, on a position or slot out of range."""
        arguments = (q, k, v, positions, cos_sin, k_cache, v_cache, slot_mapping, q_norm, k_norm)
        shapes.ROPE_AND_CACHE.check(
            k_cache, arguments, (k_scale, v_scale), may_be_narrow=self.has_narrow_kv_caches
        )
        assert (q_norm is None) == (k_norm is None)
        assert positions.is_contiguous() and slot_mapping.is_contiguous()
        max_positions, rotary_dim = table_sizes(cos_sin, q.shape[2])
        num_blocks, block_size, kv_heads, head_dim = k_cache.shape
        sizes = RopeSizes(
            *(q.shape[0], q.shape[1], kv_heads, head_dim, rotary_dim, max_positions),
            *(num_blocks, block_size),
            *(*q.stride()[:2], *k.stride()[:2], *v.stride()[:2]),
            *(*k_cache.stride()[:3], *v_cache.stride()[:3]),
        )
        norms = HeadNorms(pointer(q_norm), pointer(k_norm), eps)
        wrong = self._lib.rope_and_cache(
            DTYPES[q.dtype],
            q.data_ptr(),
            k.data_ptr(),
            v.data_ptr(),
            positions.data_ptr(),
            pointer(cos_sin),
            k_cache.data_ptr(),
            v_cache.data_ptr(),
            ctypes.byref(cache_codes(k_cache, q.dtype, k_scale, v_scale)),
            slot_mapping.data_ptr(),
            ctypes.byref(sizes),
            ctypes.byref(norms),
            torch.get_num_threads(),
        )
        if wrong >= 0:
            raise IndexError(
                f"rope_and_cache: token {wrong} has position {int(positions[wrong])} of "
                f"{max_positions} and slot {int(slot_mapping[wrong])} of "
                f"{num_blocks * block_size}"
            )

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
        """Raises IndexError on a block id or sequence bound out of range."""
        starts, seq_lens = batch.query_start_loc_host, batch.seq_lens_host
        table = batch.block_table
        arguments = (q, k_cache, v_cache, starts, seq_lens, table)
        shapes.ATTENTION.check(
            k_cache, arguments, (k_scale, v_scale), may_be_narrow=self.has_narrow_kv_caches
        )
        tokens, heads, head_dim = q.shape
        num_blocks, block_size, kv_heads, _ = k_cache.shape
        assert heads % kv_heads == 0, (heads, kv_heads)
        assert starts.is_contiguous() and seq_lens.is_contiguous()
        out = q.new_empty(tokens, heads, head_dim)
        sizes = AttentionSizes(
            *(tokens, seq_lens.shape[0], heads, kv_heads, head_dim, num_blocks, block_size),
            *(*q.stride()[:2], *k_cache.stride()[:3], *v_cache.stride()[:3]),
            *(table.stride(0), table.shape[1]),
            *attention_limits(window, soft_cap, scale),
        )
        wrong = self._lib.attention(
            DTYPES[q.dtype],
            q.data_ptr(),
            k_cache.data_ptr(),
            v_cache.data_ptr(),
            ctypes.byref(cache_codes(k_cache, q.dtype, k_scale, v_scale)),
            out.data_ptr(),
            starts.data_ptr(),
            seq_lens.data_ptr(),
            table.data_ptr(),
            ctypes.byref(sizes),
            torch.get_num_threads(),
        )
        if wrong >= 0:
            raise IndexError(
                f"attention: sequence {wrong} of length {int(seq_lens[wrong])}, with query tokens "
                f"{starts[wrong : wrong + 2].tolist()} of {tokens}, has a block outside "
                f"[0, {num_blocks}) or bounds that contradict each other"
            )
        return out

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
        return self._activation_mul("silu", gate_up)

    def gelu_tanh_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        shapes.GELU_TANH_MUL.check(gate_up)
        return self._activation_mul("gelu_tanh", gate_up)

    def _activation_mul(self, activation: Activation, gate_up: torch.Tensor) -> torch.Tensor:
        tokens, intermediate = gate_up.shape[0], gate_up.shape[1] // 2
        out = gate_up.new_empty(tokens, intermediate)
        self._lib.activation_mul(
            DTYPES[gate_up.dtype],
            ACTIVATIONS[activation],
            gate_up.data_ptr(),
            gate_up.stride(0),
            out.data_ptr(),
            tokens,
            intermediate,
            torch.get_num_threads(),
        )
        return out

    def prepare_experts(self, gate_up: torch.Tensor, down: torch.Tensor) -> CpuExperts:
        shapes.PREPARE_EXPERTS.check(gate_up, down)
        pairs = zip(gate_up, down, strict=True)
        return CpuExperts([(self.prepare_linear(g), self.prepare_linear(d)) for g, d in pairs])

    def experts(
        self,
        x: torch.Tensor,
        weights: ExpertWeights,
        expert_ids: torch.Tensor,
        expert_scales: torch.Tensor,
        activation: Activation,
    ) -> torch.Tensor:
        """Raises IndexError on an id out of range."""
        assert isinstance(weights, CpuExperts), type(weights)
        return weights.mix(self._lib, x, expert_ids, expert_scales, activation)

    def sample(self, logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
        columns = (
            *(batch.temperature, batch.top_k, batch.top_p, batch.min_p),
            *(batch.seed, batch.position, batch.sample_index),
        )
        shapes.SAMPLE.check(logits, *columns)
        rows, vocab_size = logits.shape
        assert vocab_size > 0
        assert all(column.is_contiguous() for column in columns)
        ids = torch.empty(rows, dtype=torch.int64)
        pointers = SamplingColumns(*(column.data_ptr() for column in columns))
        self._lib.sample(
            DTYPES[logits.dtype],
            logits.data_ptr(),
            logits.stride(0),
            rows,
            vocab_size,
            ctypes.byref(pointers),
            ids.data_ptr(),
            torch.get_num_threads(),
        )
        return ids
