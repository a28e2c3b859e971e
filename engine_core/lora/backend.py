"""From an adapter's folder to the slots of a model."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from engine_core.lora.adapters import AdapterFacts
from engine_core.lora.checkpoint import AdapterCheckpoint

if TYPE_CHECKING:
    from pathlib import Path

    import torch

    from engine_core.model.decoder import DecoderModel

logger = logging.getLogger(__name__)


class ModelSlots:
    """An AdapterBackend (engine_core/lora/adapters.py) for a model that has slots.

    Steps that are queued on the device read the slots before what is written here.
    """

    def __init__(self, model: DecoderModel, max_rank: int, dtype: torch.dtype) -> None:
        self._adapted = model.adapted
        self._max_rank = max_rank
        self._dtype = dtype
        self._device = model.device

    def fill(self, slot: int, directory: Path) -> AdapterFacts:
        began_at = time.monotonic()
        products = [adapted.product for adapted in self._adapted]
        checkpoint = AdapterCheckpoint(directory, products, self._max_rank)
        for product, slots in self._adapted:
            parts = [checkpoint.part(it, self._dtype, self._device) for it in product.modules]
            slots.fill(slot, parts)
        seconds = time.monotonic() - began_at
        logger.info("adapter of rank %d read in %.2f s: %s", checkpoint.rank, seconds, directory)
        return AdapterFacts(checkpoint.rank, checkpoint.digest)

    def clear(self, slot: int) -> None:
        for _, slots in self._adapted:
            slots.clear(slot)
