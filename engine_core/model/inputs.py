"""What a forward pass takes besides weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from kernels.lora import LoraBatch
    from kernels.ops import AttentionBatch, KVCache

    KVCaches = Sequence[KVCache]
    """One of each layer."""


@dataclass(frozen=True, slots=True)
class ModelInput:
    """One step's flat batch on the model's device."""

    input_ids: torch.Tensor  # [T] int64
    positions: torch.Tensor  # [T] int64
    slot_mapping: torch.Tensor  # [T] int64
    attention: AttentionBatch
    sampling_tokens: torch.Tensor | None
    """[S] int64, the tokens whose logits are wanted; None means all T."""
    lora: LoraBatch | None = None
    """The tokens that have an adapter; None where nobody has one."""
