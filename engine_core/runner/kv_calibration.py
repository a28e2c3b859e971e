"""Scales of an fp8 KV cache for a checkpoint that has none."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch

from engine_core.model.inputs import ModelInput
from engine_core.runner.kv_caches import allocate_kv_caches
from kernels.fp8 import E4M3_MAX
from kernels.ops import AttentionBatch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine_core.device.base import Device
    from engine_core.model.decoder import DecoderModel
    from engine_core.model.kv_scales import LayerScales

logger = logging.getLogger(__name__)

_TOKENS = 256
_BLOCK_SIZE = 16
_HEADROOM = 4.0
"""A text may have greater keys than the tokens here."""


@torch.inference_mode()
def calibrate_kv_scales(
    model: DecoderModel, device: Device, max_model_len: int, dtype: torch.dtype
) -> Sequence[LayerScales]:
    """1 for each head whose keys, or values, stay well below what e4m3 holds, else the power
    of two that brings them there.

    e4m3 is as exact for small numbers as for large ones, so a scale matters only to what
    would be clipped: keys of a model with large biases. Those are there whatever the text,
    so the tokens of one step, spread over the vocabulary, show them. A power of two moves
    no rounding. dtype: of the keys and values as computed.
    """
    num_tokens = min(_TOKENS, max_model_len)
    num_blocks = -(-num_tokens // _BLOCK_SIZE)
    caches = allocate_kv_caches(model, device, num_blocks + 1, _BLOCK_SIZE, dtype)
    vocab_size, there = model.config.vocab_size, device.torch_device
    positions = torch.arange(num_tokens)
    starts = torch.tensor([0, num_tokens], dtype=torch.int32)
    lens = starts[1:].clone()
    attention = AttentionBatch(
        query_start_loc=starts.to(there),
        seq_lens=lens.to(there),
        block_table=torch.arange(1, num_blocks + 1, dtype=torch.int32, device=there).unsqueeze(0),
        num_decodes=int(num_tokens == 1),
        max_query_len=num_tokens,
        max_seq_len=num_tokens,
        query_start_loc_host=starts,
        seq_lens_host=lens,
    )
    inputs = ModelInput(
        input_ids=(positions * max(1, vocab_size // num_tokens) % vocab_size).to(there),
        positions=positions.to(there),
        slot_mapping=(positions + _BLOCK_SIZE).to(there),
        attention=attention,
        sampling_tokens=None,
    )
    model.hidden_states(inputs, caches)
    scales = [(_scale_of(cache.k), _scale_of(cache.v)) for cache in caches]
    raised = sum(int((scale > 1).sum()) for layer in scales for scale in layer)
    greatest = max(float(cache.k.abs().max()) for cache in caches)
    logger.info(
        "fp8 KV cache: the checkpoint has no scales; keys reach %.1f over %d tokens, so that "
        "%d of %d heads get a scale above 1",
        greatest,
        num_tokens,
        raised,
        2 * len(caches) * model.config.num_kv_heads,
    )
    return scales


def _scale_of(written: torch.Tensor) -> torch.Tensor:
    """[N, B, Hk, D] -> [Hk] float32."""
    greatest = written.float().abs().amax(dim=(0, 1, 3)) * (_HEADROOM / E4M3_MAX)
    return torch.exp2(greatest.log2().ceil().clamp(min=0.0))
