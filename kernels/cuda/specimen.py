"""One kernel with the types, constants and launch options of a case that a model brings."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kernels.cuda.cache_codes import FLOATS, FP8_BITS, FP8_INSTRUCTION
from kernels.cuda.float8 import CONVERTS_E4M3
from kernels.cuda.limits import MULTIPROCESSORS

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, slots=True)
class Specimen:
    kernel: Any
    case: str
    element: str
    """The model's dtype as Triton writes it: bf16, fp16, fp32."""
    constants: Mapping[str, int]
    num_warps: int
    num_stages: int = 3
    cache: int = FLOATS
    """A kernels.cuda.cache_codes format."""
    types: Mapping[str, str] = field(default_factory=dict)
    """Of parameters that are neither the element's nor what their name says elsewhere."""
    needs_e4m3: bool = False
    """Whether it runs only where there are instructions for 8-bit floats."""

    @property
    def archs(self) -> tuple[int, ...]:
        """Those that it runs on."""
        can = [arch for arch in MULTIPROCESSORS if divmod(arch, 10) >= CONVERTS_E4M3]
        if self.needs_e4m3 or self.cache == FP8_INSTRUCTION:
            return tuple(can)
        if self.cache == FP8_BITS:
            return tuple(arch for arch in MULTIPROCESSORS if arch not in can)
        return tuple(MULTIPROCESSORS)

    @property
    def name(self) -> str:
        return str(self.kernel.__name__)

    def __str__(self) -> str:
        return f"{self.name}-{self.element}-{self.case}"
