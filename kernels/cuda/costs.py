"""What each kernel moves and computes, and how fast that could be on an H200.

The formulas are text, printed in docs/kernels.md and evaluated here, so that a figure
cannot say something else than its formula.
"""

from __future__ import annotations

import ast
import operator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kernels.cuda.configs import num_splits
from kernels.cuda.lora import block_in_for, num_splits_for

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

BANDWIDTH = 4.3e12
"""Bytes per second that copies reach on an H200 (measured; 4.8e12 is its data sheet's)."""
TENSOR_OPS = 790e12
"""Operations per second that products in bfloat16 reach on an H200 (measured)."""
H200_SMS = 132

LLAMA_1B = {"H": 2048, "I": 8192, "Hq": 32, "Hk": 8, "D": 64, "e": 2, "c": 2, "B": 16}
"""Llama-3.2-1B in bfloat16."""
DECODE = {**LLAMA_1B, "R": 64, "T": 64, "S": 2048, "P": num_splits(64 * 8, 2048, H200_SMS)}
"""64 sequences with 2048 tokens each decode."""
FEW = {**LLAMA_1B, "R": 4, "T": 4, "S": 2048, "P": num_splits(4 * 8, 2048, H200_SMS)}
"""4 of them, whose caches are split."""
PREFILL = {**LLAMA_1B, "R": 1, "T": 2048, "S": 2048}
"""One prompt of 2048 tokens."""
ADAPTED = {**DECODE, "G": 4, "r": 16, "K": 3, "P": num_splits_for(2048, block_in_for(2))}
"""4 adapters of rank 16, of three fused matrices."""


@dataclass(frozen=True, slots=True)
class Cost:
    kernel: str
    case: str
    sizes: Mapping[str, int]
    bytes_moved: str
    operations: str

    @property
    def num_bytes(self) -> int:
        return round(evaluate(self.bytes_moved, self.sizes))

    @property
    def num_operations(self) -> int:
        return round(evaluate(self.operations, self.sizes))

    @property
    def memory_seconds(self) -> float:
        return self.num_bytes / BANDWIDTH

    @property
    def compute_seconds(self) -> float:
        return self.num_operations / TENSOR_OPS

    @property
    def floor_seconds(self) -> float:
        """No launch can take less."""
        return max(self.memory_seconds, self.compute_seconds)


_OPERATORS: dict[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def evaluate(formula: str, sizes: Mapping[str, int]) -> float:
    """+, -, * and / of numbers and names. Raises KeyError for a name without a size."""

    def value(node: ast.expr) -> float:
        if isinstance(node, ast.BinOp):
            return _OPERATORS[type(node.op)](value(node.left), value(node.right))
        if isinstance(node, ast.Name):
            return sizes[node.id]
        assert isinstance(node, ast.Constant) and isinstance(node.value, int), ast.dump(node)
        return node.value

    return value(ast.parse(formula, mode="eval").body)


_DECODE_BYTES = "R * (2*c*S*Hk*D + 2*e*Hq*D + 4*S/B)"
_ROPE_BYTES = "T * (e*D*(2*Hq + 2*Hk) + 2*c*Hk*D + 4*D + 16)"

COSTS = (
    Cost("paged_decode_kernel", "64 sequences of 2048", DECODE, _DECODE_BYTES, "4*R*S*Hq*D"),
    Cost(
        "paged_decode_kernel",
        "the same, fp8 cache",
        {**DECODE, "c": 1},
        _DECODE_BYTES,
        "4*R*S*Hq*D",
    ),
    Cost(
        "paged_decode_kernel",
        "4 sequences of 2048, split",
        FEW,
        "R * (2*c*S*Hk*D + e*Hq*D + 4*S/B + 4*Hq*P*(D + 1))",
        "4*R*S*Hq*D",
    ),
    Cost(
        "paged_decode_combine_kernel",
        "4 sequences of 2048, split",
        FEW,
        "R * (4*Hq*P*(D + 1) + e*Hq*D)",
        "2*R*Hq*P*D",
    ),
    Cost(
        "paged_prefill_kernel",
        "a prompt of 2048",
        PREFILL,
        "2*e*T*Hq*D + 2*c*S*Hk*D",
        "4*Hq*D * T*(T + 1)/2",
    ),
    Cost(
        "linear_invariant_kernel",
        "gate and up, 64 tokens",
        DECODE,
        "e * (T*H + 2*I*H + T*2*I)",
        "2*T*H*2*I",
    ),
    Cost(
        "lora_shrink_kernel",
        "qkv, 64 tokens of 4 adapters",
        ADAPTED,
        "e * (T*H + G*K*r*H) + 4*P*T*K*r",
        "2*T*K*r*H",
    ),
    Cost(
        "lora_expand_kernel",
        "qkv, 64 tokens of 4 adapters",
        ADAPTED,
        "4*P*T*K*r + e * (G*r*(Hq + 2*Hk)*D + 2*T*(Hq + 2*Hk)*D)",
        "2*T*r*(Hq + 2*Hk)*D",
    ),
    Cost("rms_norm_kernel", "64 tokens", DECODE, "e * (2*T*H + H)", "4*T*H"),
    Cost("add_rms_norm_kernel", "64 tokens", DECODE, "e * (4*T*H + H)", "5*T*H"),
    Cost("rope_and_cache_kernel", "64 tokens", DECODE, _ROPE_BYTES, "3*T*D*(Hq + Hk)"),
    Cost(
        "rope_and_cache_kernel",
        "64 tokens, fp8 cache",
        {**DECODE, "c": 1},
        _ROPE_BYTES,
        "3*T*D*(Hq + Hk)",
    ),
    Cost("activation_mul_kernel", "64 tokens", DECODE, "3*e*T*I", "5*T*I"),
    Cost("activation_mul_kernel", "a prompt of 2048", PREFILL, "3*e*T*I", "5*T*I"),
)


def table() -> list[str]:
    """The lines of docs/kernels.md."""
    head = ["kernel", "case", "bytes moved", "operations", "MB", "GFLOP", "floor us", "bound by"]
    lines = ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    for cost in COSTS:
        is_memory = cost.memory_seconds >= cost.compute_seconds
        cells = [
            f"`{cost.kernel}`",
            cost.case,
            f"`{cost.bytes_moved}`",
            f"`{cost.operations}`",
            f"{cost.num_bytes / 1e6:.3g}",
            f"{cost.num_operations / 1e9:.3g}",
            f"{cost.floor_seconds * 1e6:.3g}",
            "memory" if is_memory else "tensor cores",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return lines
