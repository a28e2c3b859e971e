"""The memory of all layers' KV."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernels.ops import KVCache

if TYPE_CHECKING:
    import torch

    from engine_core.device.base import Device
    from engine_core.model.decoder import DecoderModel
    from engine_core.model.inputs import KVCaches


def allocate_kv_caches(
    model: DecoderModel, device: Device, num_blocks: int, block_size: int, dtype: torch.dtype
) -> KVCaches:
    """Zeros, num_blocks of them in each layer."""
    config = model.config
    layers = range(config.num_layers)
    shape = (block_size, config.num_kv_heads, config.head_dim)
    if device.layers_share_blocks:
        blocks = device.zeros((num_blocks, len(layers), 2, *shape), dtype)
        return tuple(KVCache(blocks[:, layer, 0], blocks[:, layer, 1]) for layer in layers)
    one_layer = (num_blocks, *shape)
    return tuple(
        KVCache(device.zeros(one_layer, dtype), device.zeros(one_layer, dtype)) for _ in layers
    )
