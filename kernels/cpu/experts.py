"""The experts of a layer as the C++ reads them (csrc/experts.cpp)."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import torch

from kernels import shapes
from kernels.cpu.library import ACTIVATIONS, DTYPES, ExpertChoices, NativeExpert

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kernels.cpu.library import Library
    from kernels.cpu.linear import CpuLinear
    from kernels.ops import Activation


class CpuExperts:
    """One packed weight for gate_up and one for down, for each expert."""

    def __init__(self, pairs: Sequence[tuple[CpuLinear, CpuLinear]]) -> None:
        self._pairs = tuple(pairs)
        self.num_experts = len(pairs)
        self.in_features = pairs[0][0].in_features
        self.dtype = pairs[0][0].dtype
        natives = [NativeExpert(gate_up.native, down.native) for gate_up, down in pairs]
        self._native = (NativeExpert * len(pairs))(*natives)

    def mix(
        self,
        lib: Library,
        x: torch.Tensor,
        expert_ids: torch.Tensor,
        expert_scales: torch.Tensor,
        activation: Activation,
    ) -> torch.Tensor:
        """As Ops.experts."""
        shapes.EXPERTS.check(x, expert_ids, expert_scales)
        if x.shape[1] != self.in_features or x.dtype != self.dtype:
            raise shapes.ShapeError(
                f"experts: their weights take {self.dtype} [T, {self.in_features}], "
                f"x is {x.dtype} {list(x.shape)}"
            )
        ids, scales = expert_ids.contiguous(), expert_scales.contiguous()
        out = x.new_empty(x.shape)
        choices = ExpertChoices(ids.data_ptr(), scales.data_ptr(), *ids.shape, self.num_experts)
        stray = lib.experts(
            DTYPES[x.dtype],
            x.data_ptr(),
            x.stride(0),
            self._native,
            ctypes.byref(choices),
            ACTIVATIONS[activation],
            out.data_ptr(),
            torch.get_num_threads(),
        )
        if stray >= 0:
            raise IndexError(
                f"experts: token {stray} chose {ids[stray].tolist()} of {self.num_experts}"
            )
        return out
