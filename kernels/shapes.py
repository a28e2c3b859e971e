"""Symbolic shape checks at the public edge of an op.

    ROPE = Signature("rope_and_cache", q="F: T Hq D", k="F: T Hk D", positions="int64: T")
    ROPE.check(q=q, k=k, positions=positions)

One letter binds one size (or one dtype) across all arguments of a call. A
layout that was seen once is not looked at again, so a check in the hot loop
costs about a microsecond a tensor.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import zip_longest
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Hashable

    from kernels.ops import PenaltyBatch

_DTYPES = {
    "F": (torch.float32, torch.bfloat16, torch.float16),
    "float32": (torch.float32,),
    "half": (torch.bfloat16, torch.float16),
    "int32": (torch.int32,),
    "int64": (torch.int64,),
    "float8": (torch.float8_e4m3fn,),
    "int8": (torch.int8,),
}
_SEEN_LIMIT = 4096
_TERM = re.compile(
    r"(?:(?P<factor>\d+)\*)?(?P<name>[A-Za-z]\w*)(?:\+(?P<offset>\d+))?|(?P<size>\d+)"
)


class ShapeError(ValueError):
    """An argument of an op has a shape, dtype or layout that the op does not take."""


@dataclass(frozen=True, slots=True)
class _Term:
    """One dimension: factor * name + offset, or a plain size."""

    text: str
    name: str | None
    factor: int = 1
    offset: int = 0

    @classmethod
    def parse(cls, text: str) -> _Term:
        match = _TERM.fullmatch(text)
        if match is None:
            raise ValueError(f"malformed dimension {text!r}")
        if match["size"]:
            return cls(text, None, offset=int(match["size"]))
        return cls(text, match["name"], int(match["factor"] or 1), int(match["offset"] or 0))

    def matches(self, size: int, bound: dict[str, int]) -> bool:
        """Whether size fits; binds the name if it is new and size can be solved for it."""
        if self.name is None:
            return size == self.offset
        if self.name in bound:
            return size == self.factor * bound[self.name] + self.offset
        value, rest = divmod(size - self.offset, self.factor)
        bound[self.name] = value
        return rest == 0 and value >= 0


@dataclass(frozen=True, slots=True)
class _Argument:
    name: str
    dtype: str
    terms: tuple[_Term, ...]
    is_optional: bool

    @property
    def text(self) -> str:
        return f"{self.dtype} [{', '.join(term.text for term in self.terms)}]"


class Signature:
    """The arguments of one op: name="dtype: dimensions".

    dtype is F (one float type, the same for all F arguments of a call),
    float32, half (bfloat16 or float16), int32, int64, int8 or float8 (e4m3fn). A dimension is
    a name, a number, "2*I" or "R+1". An argument named with dtype "float32?" may be None, or
    left out at the end.
    """

    def __init__(self, op: str, **arguments: str) -> None:
        self.op = op
        self._arguments = tuple(self._parse(name, spec) for name, spec in arguments.items())
        self._seen: set[Hashable] = set()

    @property
    def num_arguments(self) -> int:
        return len(self._arguments)

    @staticmethod
    def _parse(name: str, spec: str) -> _Argument:
        dtype, _, dims = spec.partition(":")
        is_optional = dtype.endswith("?")
        dtype = dtype.removesuffix("?")
        if dtype not in _DTYPES:
            raise ValueError(f"{name}: unknown dtype {dtype!r}; known: {sorted(_DTYPES)}")
        terms = tuple(_Term.parse(text) for text in dims.split())
        return _Argument(name, dtype, terms, is_optional)

    def check(self, *tensors: torch.Tensor | None) -> None:
        """tensors in the order of the signature. Raises ShapeError naming the argument.

        All must be on one device, and the last dimension must be dense.
        """
        key = tuple(
            [None if t is None else (t.shape, t.dtype, t.stride(), t.device) for t in tensors]
        )
        if key in self._seen:
            return
        self._check(tensors)
        if len(self._seen) >= _SEEN_LIMIT:
            self._seen.clear()
        self._seen.add(key)

    def _check(self, tensors: tuple[torch.Tensor | None, ...]) -> None:
        assert len(tensors) <= len(self._arguments), (self.op, len(tensors))
        bound: dict[str, int] = {}
        float_dtype: torch.dtype | None = None
        device: torch.device | None = None
        for argument, tensor in zip_longest(self._arguments, tensors):
            if tensor is None:
                if not argument.is_optional:
                    raise ShapeError(f"{self.op}: {argument.name} is missing; want {argument.text}")
                continue
            device = device or tensor.device
            fits = tensor.ndim == len(argument.terms) and all(
                term.matches(size, bound)
                for term, size in zip(argument.terms, tensor.shape, strict=True)
            )
            if not fits:
                raise self._error(argument, tensor, f"with {bound}" if bound else "")
            if tensor.dtype not in _DTYPES[argument.dtype]:
                raise self._error(argument, tensor, "")
            if argument.dtype == "F":
                float_dtype = float_dtype or tensor.dtype
                if tensor.dtype != float_dtype:
                    raise self._error(argument, tensor, f"where F is {float_dtype}")
            if tensor.numel() and tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
                raise self._error(argument, tensor, "with a dense last dimension")
            if tensor.device != device:
                raise self._error(argument, tensor, f"on {device}")

    def _error(self, argument: _Argument, tensor: torch.Tensor, note: str) -> ShapeError:
        got = f"{tensor.dtype} {list(tensor.shape)}, strides {tensor.stride()}, on {tensor.device}"
        return ShapeError(
            f"{self.op}: {argument.name} is {got}; want {argument.text} {note}".strip()
        )


class CacheSignature:
    """The arguments of an op on a KV cache: those of dtype C are F, half where F is float32,
    float8 or int8, and of the latter two there are k_scale and v_scale, the last arguments."""

    def __init__(self, op: str, *, reads_scales: bool = True, **arguments: str) -> None:
        """reads_scales: of float8 caches; those of int8 lie beside the codes."""

        def with_codes(dtype: str, scale: str | None) -> Signature:
            codes = {name: spec.replace("C:", f"{dtype}:") for name, spec in arguments.items()}
            scales = {} if scale is None else {"k_scale": scale, "v_scale": scale}
            return Signature(op, **codes, **scales)

        self._op = op
        self._floats = with_codes("F", None)
        self._halves = with_codes("half", None)
        self._codes = {
            torch.float8_e4m3fn: with_codes("float8", "float32: Hk" if reads_scales else None),
            torch.int8: with_codes("int8", "float32: N Hk B"),
        }

    def check(
        self,
        cache: torch.Tensor,
        arguments: tuple[torch.Tensor | None, ...],
        scales: tuple[torch.Tensor | None, torch.Tensor | None],
        *,
        may_be_narrow: bool = False,
    ) -> None:
        """arguments: all but scales, and cache is one of them. may_be_narrow: half beside
        float32. Raises ShapeError."""
        first = arguments[0]
        is_float32 = first is not None and first.dtype == torch.float32
        is_narrow = may_be_narrow and is_float32 and cache.dtype != torch.float32
        signature = self._codes.get(cache.dtype, self._halves if is_narrow else self._floats)
        if len(arguments) < signature.num_arguments:
            signature.check(*arguments, *scales)
            return
        signature.check(*arguments)
        if scales != (None, None):
            raise ShapeError(f"{self._op}: caches of {cache.dtype} have no k_scale and v_scale")


RMS_NORM = Signature("rms_norm", x="F: T H", weight="F: H")
ADD_RMS_NORM = Signature("add_rms_norm", x="F: T H", residual="F: T H", weight="F: H")
SILU_MUL = Signature("silu_mul", gate_up="F: T 2*I")
GELU_TANH_MUL = Signature("gelu_tanh_mul", gate_up="F: T 2*I")
EMBEDDING = Signature("embedding", input_ids="int64: T", table="F: V H")
PACKED_EMBEDDING = Signature("packed_embedding", input_ids="int64: T")
PREPARE_EXPERTS = Signature("prepare_experts", gate_up="F: E 2*I H", down="F: E H I")
EXPERTS = Signature("experts", x="F: T H", expert_ids="int64: T K", expert_scales="float32: T K")
LINEAR = Signature("linear", x="F: T I", weight="F: O I")
LINEAR_INPUT = Signature("linear", x="F: T I")
PREPARE_LINEAR = Signature("prepare_linear", weight="F: O I")
PREPARE_LINEAR_BIAS = Signature("prepare_linear", weight="F: O I", bias="F: O")
ROPE_AND_CACHE = CacheSignature(
    "rope_and_cache",
    q="F: T Hq D",
    k="F: T Hk D",
    v="F: T Hk D",
    positions="int64: T",
    cos_sin="float32?: M 2*P",
    k_cache="C: N B Hk D",
    v_cache="C: N B Hk D",
    slot_mapping="int64: T",
    q_norm="F?: D",
    k_norm="F?: D",
)
ATTENTION = CacheSignature(
    "attention",
    q="F: T Hq D",
    k_cache="C: N B Hk D",
    v_cache="C: N B Hk D",
    query_start_loc="int32: R+1",
    seq_lens="int32: R",
    block_table="int32: R M",
)
COPY_BLOCKS = CacheSignature(
    "copy_blocks",
    reads_scales=False,
    k_cache="C: N B Hk D",
    v_cache="C: N B Hk D",
    src="int64: C",
    dst="int64: C",
)
ADD_LORA = Signature(
    "add_lora",
    y="F: T O",
    x="F: T I",
    a="F: S P I",
    b="F: S O R",
    tokens="int64: M",
    tiles="int32: N 3",
)
RUN_BLOCKS = Signature(
    "run_blocks",
    residual="F: T H",
    positions="int64: T",
    slot_mapping="int64: T",
    query_start_loc="int32: R+1",
    seq_lens="int32: R",
    block_table="int32: R M",
)
BLOCK_CACHE = CacheSignature(
    "run_blocks", residual="F: T H", k_cache="C: N B Hk D", v_cache="C: N B Hk D"
)
SAMPLE = Signature(
    "sample",
    logits="F: S V",
    temperature="float32: S",
    top_k="int32: S",
    top_p="float32: S",
    min_p="float32: S",
    seed="int64: S",
    position="int64: S",
    sample_index="int32: S",
)
APPLY_PENALTIES = Signature(
    "apply_penalties",
    logits="float32: S V",
    rows="int64: R",
    starts="int64: R+1",
    ids="int64: K",
    counts="float32: K",
    repetition="float32: R",
    frequency="float32: R",
    presence="float32: R",
)
ADD_LOGIT_BIAS = Signature(
    "add_logit_bias",
    logits="float32: S V",
    rows="int64: R",
    starts="int64: R+1",
    ids="int64: K",
    values="float32: K",
)
TOKEN_LOGPROBS = Signature("token_logprobs", logits="F: N V", token_ids="int64: N")  # noqa: S106


def check_penalties(logits: torch.Tensor, batch: PenaltyBatch) -> None:
    """Raises ShapeError naming the argument."""
    lists = (batch.known.rows, batch.known.starts, batch.known.ids)
    factors = (batch.repetition, batch.frequency, batch.presence)
    APPLY_PENALTIES.check(logits, *lists, batch.counts, *factors)
