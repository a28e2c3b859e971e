"""The ops contract: every op that a backend must have, with shapes.

T tokens in the step, R sequences in the step, Hq/Hk query/KV heads, D head_dim,
N KV blocks, B block_size, V vocabulary, I intermediate size. The torch reference
(kernels/reference) defines each op; kernels/cuda and kernels/cpu must agree
with it within kernels/tolerances.py. Outputs are freshly allocated unless the
docstring says "in place". All integer tensors are on the op's device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kernels.fp8 import Fp8Tensor
    from kernels.int4 import Int4Tensor
    from kernels.lora import LoraBatch, LoraSlots
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


@dataclass(frozen=True, slots=True)
class TokenLists:
    """Some ids for each of R rows of logits [S, V]: rows[i] has ids[starts[i]:starts[i + 1]],
    none of them twice. No row is in rows twice."""

    rows: torch.Tensor  # [R] int64
    starts: torch.Tensor  # [R + 1] int64
    ids: torch.Tensor  # [K] int64
    longest: int  # ids of the longest list


@dataclass(frozen=True, slots=True)
class PenaltyBatch:
    """The rows that are penalized, each with the ids of its prompt or output."""

    known: TokenLists
    counts: torch.Tensor  # [K] float32: occurrences of known.ids in the output
    repetition: torch.Tensor  # [R] float32
    frequency: torch.Tensor  # [R] float32
    presence: torch.Tensor  # [R] float32


class TokenLogprobs(NamedTuple):
    values: torch.Tensor
    """[N] float32."""
    ranks: torch.Tensor
    """[N] int64: 1 + the number of tokens that are strictly likelier."""
    all_values: torch.Tensor | None
    """[N, V] float32, if asked for: what values and ranks were read from."""


class KVCache(NamedTuple):
    """One layer's paged keys and values, and what the codes of an 8-bit cache are times."""

    k: torch.Tensor
    """[N, B, Hk, D] in the model's dtype, float8_e4m3fn or int8."""
    v: torch.Tensor
    """The same of the values."""
    k_scale: torch.Tensor | None = None
    """As Ops.rope_and_cache has it: there if and only if k is of 8 bits."""
    v_scale: torch.Tensor | None = None

    @property
    def paged(self) -> tuple[torch.Tensor, ...]:
        """What is of blocks, [N, ...] each: a copy of a block is one of its rows of all these."""
        if self.k.dtype != torch.int8:
            return (self.k, self.v)
        assert self.k_scale is not None and self.v_scale is not None
        return (self.k, self.v, self.k_scale, self.v_scale)


class LinearWeight(Protocol):
    """A weight as its backend keeps it: y = x @ weight.T (+ bias)."""

    @property
    def out_features(self) -> int: ...
    @property
    def in_features(self) -> int: ...


class ExpertWeights(Protocol):
    """The matrices of a layer's experts as their backend keeps them."""

    @property
    def num_experts(self) -> int: ...
    @property
    def in_features(self) -> int:
        """H, which is what comes out too."""
        ...


Activation = Literal["silu", "gelu_tanh"]
"""Of the gate: silu(gate) * up (SwiGLU), or gelu(gate) * up with its tanh approximation
(GeGLU, arXiv:2002.05202; GELU, arXiv:1606.08415)."""


@dataclass(frozen=True, slots=True)
class AttentionBlock:
    """residual += post_norm(out(attention(rope(head_norm(qkv(norm(residual)))))))

    A norm that is None is left out.
    """

    norm: torch.Tensor | None  # [H]
    eps: float
    qkv: LinearWeight  # [(Hq + 2 Hk) D, H]
    out: LinearWeight  # [H, Hq D]
    num_heads: int
    num_kv_heads: int
    head_dim: int
    cos_sin: torch.Tensor | None
    """[max_positions, rotary_dim] float32, as rope_and_cache has it; None rotates nothing
    (NoPE, arXiv:2305.19466)."""
    scale: float
    window: int | None = None
    """As Ops.attention has it."""
    soft_cap: float | None = None
    """As Ops.attention has it."""
    q_norm: torch.Tensor | None = None
    """RMS norm of the queries before the rotation: [D] norms each head by itself, [Hq D]
    all heads as one row."""
    k_norm: torch.Tensor | None = None
    """The same of the keys, [D] or [Hk D]; there if and only if q_norm is."""
    post_norm: torch.Tensor | None = None  # [H]
    qkv_lora: LoraSlots | None = None
    """Of adapters; None where there are none."""
    out_lora: LoraSlots | None = None


@dataclass(frozen=True, slots=True)
class MlpBlock:
    """residual += post_norm(down(activation_mul(gate_up(norm(residual)))))"""

    norm: torch.Tensor | None  # [H]
    eps: float
    gate_up: LinearWeight  # [2I, H]
    down: LinearWeight  # [H, I]
    activation: Activation = "silu"
    post_norm: torch.Tensor | None = None  # [H]
    gate_up_lora: LoraSlots | None = None
    down_lora: LoraSlots | None = None


@dataclass(frozen=True, slots=True)
class MoeBlock:
    """residual += experts(x, *route(router(x))) with x = norm(residual)

    Sparsely gated mixture of experts (arXiv:1701.06538) as Mixtral (arXiv:2401.04088) has it.
    """

    norm: torch.Tensor  # [H]
    eps: float
    router: LinearWeight  # [E, H]
    experts: ExpertWeights
    top_k: int
    renormalizes: bool
    """Whether the weights of the chosen experts are made to sum to 1."""
    activation: Activation = "silu"


Block = AttentionBlock | MlpBlock | MoeBlock


@dataclass(frozen=True, slots=True)
class BlockBatch:
    """What blocks read of a step's flat batch."""

    positions: torch.Tensor  # [T] int64
    slot_mapping: torch.Tensor  # [T] int64
    attention: AttentionBatch
    lora: LoraBatch | None = None
    """The tokens that have an adapter; None where nobody has one."""


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

    computes_int4: bool
    """Whether products with int4 weights use their codes; else prepare_int4_linear makes
    floats of them and says so in the log."""

    def prepare_int4_linear(
        self, parts: Sequence[Int4Tensor], bias: torch.Tensor | None, dtype: torch.dtype
    ) -> LinearWeight:
        """As prepare_quantized_linear. Raises ValueError for parts of different in."""
        ...

    kv_cache_dtypes: frozenset[torch.dtype]
    """Of 8 bits that its caches may have, besides the dtypes of floats."""

    has_narrow_kv_caches: bool
    """Whether caches of bfloat16 and float16 go with tensors of float32."""

    computes_fp8: bool
    """Whether products with fp8 weights use their codes; else prepare_fp8_linear makes
    floats of them and says so in the log. Where the device multiplies fp8, x is quantized
    as kernels.fp8.quantize_activations does it; elsewhere it is not."""

    def prepare_fp8_linear(
        self, parts: Sequence[Fp8Tensor], bias: torch.Tensor | None, dtype: torch.dtype
    ) -> LinearWeight:
        """As prepare_quantized_linear. Raises ValueError for parts that cannot be one weight."""
        ...

    def packed_embedding(
        self, input_ids: torch.Tensor, table: LinearWeight, dtype: torch.dtype
    ) -> torch.Tensor:
        """input_ids [T] int64, table [V, H] -> [T, H] in dtype, that of the table's floats.

        table is of prepare_linear, and the rows are what it was given, bit for bit, or of
        prepare_quantized_linear with one part: so one memory serves as embedding and as head.
        """
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
        """Rotates q in place and writes rotated k, and v, to the cache.

        q [T, Hq, D], k [T, Hk, D], v [T, Hk, D] (rows may be strided: views of
        one fused QKV product), positions [T] int64, cos_sin [max_positions, rotary_dim]
        float32 (cosines, then sines), k_cache and v_cache [N, B, Hk, D],
        slot_mapping [T] int64 (block_id * B + offset; -1 = write nothing).
        Rotation pairs element i with i + rotary_dim / 2; elements past
        rotary_dim pass through. cos_sin None rotates nothing.
        With q_norm and k_norm [D] (both or none), each head of q and k goes through
        rms_norm(head, q_norm or k_norm, eps) first, rounded to its dtype as that op does.
        With k_scale and v_scale (both or none) the caches hold codes of 8 bits for what
        caches of the dtype of k and v would hold: the nearest (ties to the even one) to its
        float32 quotient by the scale.
        float8_e4m3fn: scales [Hk] float32 are read; beyond +-448 a code is +-448; NaN stays
        NaN. int8: scales [N, Hk, B] float32 are written, that of each token's head being
        max |x| / 127 over the head (0 for zeros, whose codes are 0); a head that is not
        finite everywhere is read back as NaN.
        """
        ...

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
        """Causal attention of q [T, Hq, D] over the paged cache -> [T, Hq, D].

        Query head h reads KV head h // (Hq // Hk). Token t of sequence r, at
        absolute position p = seq_lens[r] - query_len[r] + (t - query_start_loc[r]),
        sees cache positions [0, p], or with a window the last `window` of them,
        (p - window, p]. With a soft cap c, a score s is c * tanh(s / c) before the
        softmax (Gemma 2, arXiv:2408.00118). With k_scale and v_scale, a key is what the
        cache holds times its k_scale, a value times its v_scale: see rope_and_cache.
        """
        ...

    def copy_blocks(
        self,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        src: torch.Tensor,
        dst: torch.Tensor,
        k_scale: torch.Tensor | None = None,
        v_scale: torch.Tensor | None = None,
    ) -> None:
        """Blocks dst become copies of blocks src, in place and all at the same time.

        k_cache and v_cache [N, B, Hk, D], src and dst [C] int64; of int8 caches k_scale and
        v_scale [N, Hk, B] float32, otherwise none. No block is twice in dst; a block may be
        in both: src is read before anything is written.
        """
        ...

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """gate_up [T, 2I] -> silu(gate_up[:, :I]) * gate_up[:, I:], [T, I]."""
        ...

    def gelu_tanh_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """gate_up [T, 2I] -> gelu(gate_up[:, :I]) * gate_up[:, I:], [T, I], gelu being
        0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3)))."""
        ...

    def prepare_experts(self, gate_up: torch.Tensor, down: torch.Tensor) -> ExpertWeights:
        """gate_up [E, 2I, H], down [E, H, I]; may repack them, once, at load."""
        ...

    def experts(
        self,
        x: torch.Tensor,
        weights: ExpertWeights,
        expert_ids: torch.Tensor,
        expert_scales: torch.Tensor,
        activation: Activation,
    ) -> torch.Tensor:
        """x [T, H], expert_ids [T, K] int64 (no id twice in a row), expert_scales [T, K]
        float32 -> [T, H]: the sum over k of expert_scales[t, k] times what expert
        expert_ids[t, k] makes of x[t], down(activation_mul(gate_up(x)))."""
        ...

    def lora_slots(
        self,
        num_slots: int,
        max_rank: int,
        in_features: int,
        rows: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
    ) -> LoraSlots:
        """Room for num_slots adapters of ranks up to max_rank, of a product [sum of rows,
        in_features] that is fused of matrices of so many rows. All slots are empty."""
        ...

    def add_lora(
        self, y: torch.Tensor, x: torch.Tensor, slots: LoraSlots, batch: LoraBatch
    ) -> None:
        """y[t] += B A x[t] in place with the matrices of t's slot, for each of batch.tokens.

        x [T, in] is what a product was given, y [T, out] dense is what it gave. An empty
        slot, and a matrix without an adapter, adds nothing.
        """
        ...

    def prepare_blocks(self, blocks: Sequence[Block]) -> BlockStack:
        """All of one model's; may lay them out once, at load."""
        ...

    def run_blocks(
        self,
        stack: BlockStack,
        residual: torch.Tensor,
        batch: BlockBatch,
        kv_caches: Sequence[KVCache],
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

    def apply_penalties(self, logits: torch.Tensor, batch: PenaltyBatch) -> None:
        """logits [S, V] float32, dense, in place. A listed id of logit x and count c becomes

            x = x / repetition if x > 0 else x * repetition     (Keskar et al. 2019, CTRL)
            x = x - frequency * c - presence * [c > 0]           (OpenAI's definition)

        in float32, each operation rounded. A finite logit stays finite (results beyond the
        largest float32 become it), and an infinite one stays what it is.
        """
        ...

    def add_logit_bias(self, logits: torch.Tensor, ids: TokenLists, values: torch.Tensor) -> None:
        """logits [S, V] float32, dense, in place: adds values [K] float32 to those of ids."""
        ...

    def token_logprobs(
        self, logits: torch.Tensor, token_ids: torch.Tensor, *, with_all: bool = False
    ) -> TokenLogprobs:
        """logits [N, V], token_ids [N] int64 -> the ids' log softmax in float32, and their ranks.

        Ranks compare rounded logprobs, so equally likely tokens share one. A row's values do
        not depend on the other rows, nor on with_all, which asks for those of all tokens too.
        """
        ...
