"""Opens a model source: first its configuration, then its weights."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine_core.model.checkpoint import Checkpoint, check_shapes
from engine_core.model.gguf_checkpoint import GgufCheckpoint
from engine_core.model.gguf_config import read_gguf_config
from engine_core.model.hf_config import read_hf_config
from engine_core.model.kv_scales import kv_scale_names
from engine_core.model.quantized.checkpoint import QuantizedCheckpoint
from engine_core.model.registry import find_architecture
from engine_core.model.safetensors_checkpoint import SafetensorsCheckpoint
from engine_core.model.weights import Weights
from engine_core.parallel.split import share_config, share_tensors
from engine_core.parallel.weights import ParallelWeights
from pagewire.gguf_file import GgufFile

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from engine_core.model.config import ModelConfig
    from engine_core.model.decoder import DecoderModel
    from engine_core.model.lora import LoraShape
    from engine_core.model.quantization import Quantization
    from engine_core.parallel.group import RankGroup
    from kernels.ops import Ops
    from pagewire.model_source import ModelSource

logger = logging.getLogger(__name__)

# Old checkpoints store this table, which follows from the configuration.
_DERIVED_SUFFIX = "rotary_emb.inv_freq"


@dataclass(frozen=True, slots=True)
class OpenedModel:
    """All of it checked except the values of the weights, none of which is read yet."""

    source: ModelSource
    config: ModelConfig
    checkpoint: Checkpoint


def open_model(source: ModelSource) -> OpenedModel:
    """Raises ModelLoadError naming the file, and the key or tensor, that is wrong."""
    checkpoint: Checkpoint
    if source.kind == "gguf":
        file = GgufFile(source.path)
        config = read_gguf_config(file)
        architecture = find_architecture(config.architecture, str(source.path))
        assert architecture.gguf is not None
        checkpoint = GgufCheckpoint(file, config.head_dim, architecture.gguf)
    else:
        config = read_hf_config(source.path)
        architecture = find_architecture(config.architecture, str(source.path))
        scheme = config.quantization
        tensors = SafetensorsCheckpoint(
            source.path, architecture.hf_prefix, has_codes=scheme is not None
        )
        checkpoint = tensors if scheme is None else QuantizedCheckpoint(tensors, scheme)
    expected = architecture.tensor_shapes(config)
    check_shapes(checkpoint, expected)
    known = set(expected) | kv_scale_names(checkpoint.shapes(), config.num_layers)
    _warn_of_unused(checkpoint, config, known)
    return OpenedModel(source, config, checkpoint)


def read_config(source: ModelSource) -> ModelConfig:
    """The configuration by itself, where the weights need not be there. Raises
    ModelLoadError naming the file and the key that is wrong."""
    if source.kind == "gguf":
        return read_gguf_config(GgufFile(source.path))
    return read_hf_config(source.path)


def load_model(
    opened: OpenedModel,
    ops: Ops,
    device: torch.device,
    dtype: torch.dtype,
    max_model_len: int,
    progress: Callable[[int, int], None],
    quantization: Quantization = "none",
    lora: LoraShape | None = None,
    group: RankGroup | None = None,
) -> DecoderModel:
    """Reads the weights; progress(done, total) counts bytes of the checkpoint.

    lora: room for adapters, all of it empty. group: of the ranks that each hold a part; ops
    are then ParallelOps.
    """
    config = opened.config
    architecture = find_architecture(config.architecture, str(opened.source.path))
    options = (opened.checkpoint, ops, device, dtype, progress, quantization)
    weights = Weights(*options)
    if group is not None:
        is_quantized = quantization != "none"
        place = (group.rank, group.size)
        parts = share_tensors(config, architecture.layout, *place, is_quantized=is_quantized)
        weights = ParallelWeights(group, *options, parts)
        config = share_config(config, *place)
    model = architecture(config, weights, ops, device, max_model_len, lora)
    if quantization == "none":
        _warn_of_floats(opened, dtype)
    for reason, names in weights.why_floats.items():
        logger.warning(
            "%s: %d matrices are computed as floats (%s), the first: %s",
            opened.source.path,
            len(names),
            reason,
            names[0],
        )
    if weights.left_floats:
        _tell_of_left_floats(opened, dtype, quantization, weights.left_floats)
    return model


def _tell_of_left_floats(
    opened: OpenedModel, dtype: torch.dtype, quantization: Quantization, names: Sequence[str]
) -> None:
    shapes = opened.checkpoint.shapes()
    size = sum(math.prod(shapes[name]) for name in names) * dtype.itemsize
    logger.info(
        "%s: %.1f MiB of matrices are left %s with --quantization %s: %s%s",
        opened.source.path,
        size / 2**20,
        str(dtype).removeprefix("torch."),
        quantization,
        ", ".join(names[:2]),
        f" and {len(names) - 2} more" if len(names) > 2 else "",
    )


def _warn_of_floats(opened: OpenedModel, dtype: torch.dtype) -> None:
    if isinstance(opened.checkpoint, QuantizedCheckpoint):
        stored, floats = opened.checkpoint.sizes(dtype.itemsize)
        logger.warning(
            "%s: the matrices are dequantized to %s: %.1f MiB of %s codes take %.1f MiB",
            opened.source.path,
            str(dtype).removeprefix("torch."),
            stored / 2**20,
            opened.checkpoint.scheme.method,
            floats / 2**20,
        )


def _warn_of_unused(checkpoint: Checkpoint, config: ModelConfig, expected: set[str]) -> None:
    """A tensor that the model has no place for usually means that the configuration is wrong."""
    if config.tie_embeddings:
        expected = expected | {"lm_head.weight"}
    unused = [
        name
        for name in checkpoint.shapes()
        if name not in expected and not name.endswith(_DERIVED_SUFFIX)
    ]
    if unused:
        logger.warning(
            "%s: %d tensors are not part of %s and are ignored, the first: %s",
            checkpoint.file_of(unused[0]),
            len(unused),
            config.architecture,
            ", ".join(unused[:3]),
        )
