"""The memory of all layers' KV."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kernels.ops import KVCache

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine_core.device.base import Device
    from engine_core.model.decoder import DecoderModel
    from engine_core.model.inputs import KVCaches
    from engine_core.model.kv_scales import LayerScales


def allocate_kv_caches(
    model: DecoderModel, device: Device, num_blocks: int, block_size: int, dtype: torch.dtype
) -> KVCaches:
    """Zeros, num_blocks of them in each layer. Scales of float8 are ones: see set_kv_scales."""
    config = model.config
    layers = range(config.num_layers)
    heads = config.num_kv_heads
    codes = _by_layer(device, num_blocks, len(layers), (block_size, heads, config.head_dim), dtype)
    if dtype == torch.int8:
        shape = (heads, block_size)
        scales = _by_layer(device, num_blocks, len(layers), shape, torch.float32)
        return tuple(KVCache(*codes[layer], *scales[layer]) for layer in layers)
    if dtype == torch.float8_e4m3fn:
        ones = torch.ones(len(layers), 2, heads, device=device.torch_device)
        return tuple(KVCache(*codes[layer], *ones[layer]) for layer in layers)
    return tuple(KVCache(*codes[layer]) for layer in layers)


def _by_layer(
    device: Device, num_blocks: int, num_layers: int, shape: tuple[int, ...], dtype: torch.dtype
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """[N, *shape] twice for each layer."""
    if device.layers_share_blocks:
        blocks = device.zeros((num_blocks, num_layers, 2, *shape), dtype)
        return [(blocks[:, layer, 0], blocks[:, layer, 1]) for layer in range(num_layers)]
    one = (num_blocks, *shape)
    return [(device.zeros(one, dtype), device.zeros(one, dtype)) for _ in range(num_layers)]


def set_kv_scales(kv_caches: KVCaches, scales: Sequence[LayerScales]) -> None:
    """Of float8 caches that hold nothing yet."""
    for cache, (k_scale, v_scale) in zip(kv_caches, scales, strict=True):
        assert cache.k_scale is not None and cache.v_scale is not None
        cache.k_scale.copy_(k_scale)
        cache.v_scale.copy_(v_scale)
