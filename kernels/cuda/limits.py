"""What a multiprocessor has, and whether a compiled kernel fits on it."""

from __future__ import annotations

from dataclasses import dataclass

MAX_REGISTERS = 255
"""Per thread, on every architecture."""
WARP_SIZE = 32
_REGISTER_UNIT = 8
"""A thread's registers are given out in eights."""
_RESERVED_SHARED = 1024
"""Bytes per block that the system keeps."""


@dataclass(frozen=True, slots=True)
class Multiprocessor:
    """CUDA C++ Programming Guide, "Technical Specifications per Compute Capability"."""

    registers: int
    shared_bytes: int
    max_shared_bytes: int
    """Of one block."""
    max_warps: int
    max_blocks: int
    tensor_columns: int
    """Of tensor memory; one block may have all."""


MULTIPROCESSORS = {
    80: Multiprocessor(65536, 164 * 1024, 163 * 1024, 64, 32, 0),
    90: Multiprocessor(65536, 228 * 1024, 227 * 1024, 64, 32, 0),
    100: Multiprocessor(65536, 228 * 1024, 227 * 1024, 64, 32, 512),
}
"""By architecture: those that every kernel must compile for."""


@dataclass(frozen=True, slots=True)
class Usage:
    """What one compiled kernel takes."""

    num_warps: int
    registers: int
    """Per thread."""
    stack_bytes: int
    """Per thread, in local memory: what did not fit in registers."""
    shared_bytes: int
    """Per block."""
    tensor_columns: int
    """Per block."""
    cubin_bytes: int

    def blocks(self, sm: Multiprocessor) -> int:
        """How many blocks run on one multiprocessor at the same time; 0 if none can."""
        if self.registers > MAX_REGISTERS or self.shared_bytes > sm.max_shared_bytes:
            return 0
        per_thread = -(-self.registers // _REGISTER_UNIT) * _REGISTER_UNIT
        per_block = max(per_thread, _REGISTER_UNIT) * WARP_SIZE * self.num_warps
        fits = [
            sm.max_blocks,
            sm.max_warps // self.num_warps,
            sm.registers // per_block,
            sm.shared_bytes // (self.shared_bytes + _RESERVED_SHARED),
        ]
        if self.tensor_columns:
            fits.append(sm.tensor_columns // self.tensor_columns)
        return min(fits)
