"""From a configuration to a runner that only takes its time."""

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING

import torch

from engine_core.device.memory import block_num_bytes, plan_kv_cache, resolve_max_model_len
from engine_core.device.roofline import GPUS, ModelCost
from engine_core.device.sim import SimDevice
from engine_core.engine_builder import BuiltEngine, make_prefill_budget, overlaps
from engine_core.grammar.vocabulary import read_vocabulary
from engine_core.model.kv_scales import FP8, INT8, KV_DTYPES, describe_kv_cache
from engine_core.model.loader import read_config
from engine_core.model.registry import find_architecture
from engine_core.runner.sim_runner import SimRunner, find_unsimulated, printable_ids
from pagewire.errors import ConfigError, ModelLoadError
from pagewire.model_source import resolve_model

if TYPE_CHECKING:
    from engine_core.model.config import ModelConfig
    from pagewire.config import EngineConfig
    from pagewire.model_source import ModelSource

logger = logging.getLogger(__name__)


def build_simulated(config: EngineConfig) -> BuiltEngine:
    """Of the model, its configuration is read and its vocabulary, if there is one, so that
    the made-up output is a text. Raises ModelLoadError naming the file, ConfigError naming
    the flag."""
    _refuse_unsimulated(config)
    gpu = GPUS[config.device.removeprefix("sim:")]
    source = resolve_model(config.model, config.served_model_name)
    model = read_config(source)
    max_model_len = resolve_max_model_len(config.max_model_len, model)
    _refuse_unsimulated_layers(model, max_model_len, config.device)
    device = SimDevice(config.device, gpu, config.kv_cache_memory, config.gpu_memory_utilization)
    dtype = device.resolve_dtype(config.dtype, model.dtype)
    shapes = find_architecture(model.architecture, str(source.path)).tensor_shapes(model)
    kv_dtype = KV_DTYPES.get(config.kv_cache_dtype, dtype)
    if kv_dtype not in (dtype, FP8, INT8):
        raise ConfigError(
            f"--kv-cache-dtype {config.kv_cache_dtype}: GPUs have no such cache beside {dtype}"
        )
    cost = ModelCost.of(model, sum(map(math.prod, shapes.values())), dtype, kv_dtype)
    max_num_batched_tokens = config.max_num_batched_tokens or device.default_max_num_batched_tokens
    device.hold(cost.weight_bytes)
    activations = _activation_bytes(model, max_num_batched_tokens, config.max_num_seqs, dtype)
    budget = device.fixed_kv_budget() or device.profiled_kv_budget(
        lambda: device.hold(activations), lambda: 0
    )
    kv_plan = plan_kv_cache(
        budget,
        block_num_bytes(model, config.block_size, kv_dtype),
        config.block_size,
        max_model_len,
        config.max_model_len is not None,
    )
    runner = SimRunner(
        gpu,
        cost,
        device,
        _token_ids(source, model),
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=kv_plan.max_model_len,
        block_size=config.block_size,
    )
    dtype_name = describe_kv_cache(str(dtype).removeprefix("torch."), dtype, kv_dtype)
    logger.warning(
        "SIMULATED: --device %s computes nothing. The output of %s is made up, and steps take as "
        "long as an %s would take at best (%.2f TB/s, %.0f TFLOP/s): %.2f GB of %s weights, "
        "%d KV blocks of %d tokens, context %d",
        config.device,
        source.name,
        gpu.name,
        gpu.bandwidth / 1e12,
        gpu.flops / 1e12,
        cost.weight_bytes / 1e9,
        dtype_name,
        kv_plan.num_blocks,
        config.block_size,
        kv_plan.max_model_len,
    )
    return BuiltEngine(
        runner=runner,
        model_name=source.name,
        architecture=model.architecture,
        max_model_len=kv_plan.max_model_len,
        vocab_size=model.vocab_size,
        eos_token_ids=model.eos_token_ids,
        dtype=dtype_name,
        device=device.name,
        num_blocks=kv_plan.num_blocks,
        block_size=config.block_size,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        prefill_budget=make_prefill_budget(config, device),
        async_scheduling=overlaps(config, device),
        default_sampling=model.default_sampling,
        find_unsupported=find_unsimulated,
    )


def _refuse_unsimulated(config: EngineConfig) -> None:
    wrong = {
        "--quantization": config.quantization not in ("auto", "none"),
        "--kv-offload-memory": config.kv_offload_memory is not None,
        "--kernels": config.kernels != "auto",
        "--batch-invariant": config.batch_invariant,
        "--enable-lora": config.enable_lora,
        "--lora-modules": config.lora_modules is not None,
        "--lora-dir": config.lora_dir is not None,
        "--tensor-parallel-size": config.tensor_parallel_size > 1,
        "--speculative-method": config.speculative_method not in ("auto", "none"),
        "--speculative-model": config.speculative_model is not None,
    }
    for flag, is_set in wrong.items():
        if is_set:
            raise ConfigError(f"{flag} is not simulated by --device {config.device}")


def _refuse_unsimulated_layers(model: ModelConfig, max_model_len: int, device: str) -> None:
    """The roofline counts all weights and all keys as read."""
    windows = [layer.window for layer in model.layers if layer.window is not None]
    if model.quantization is not None:
        raise ConfigError(
            f"--device {device} does not simulate {model.quantization.method} checkpoints"
        )
    if model.has_experts:
        raise ConfigError(f"--device {device} does not simulate mixtures of experts")
    if windows and min(windows) < max_model_len:
        raise ConfigError(
            f"--device {device} does not simulate a sliding window of {min(windows)} at a context "
            f"of {max_model_len}: set --max-model-len to at most the window"
        )


def _activation_bytes(
    model: ModelConfig, num_tokens: int, num_seqs: int, dtype: torch.dtype
) -> int:
    """Of the largest step: hidden states, gate and up of one layer, and two copies of the
    logits in float32."""
    per_token = (4 * model.hidden_size + 3 * model.intermediate_size) * dtype.itemsize
    return num_tokens * per_token + 2 * num_seqs * model.vocab_size * torch.float32.itemsize


def _token_ids(source: ModelSource, model: ModelConfig) -> list[int]:
    """What the output is made of: no end of sequence, no special tokens."""
    try:
        vocabulary = read_vocabulary(source, model.vocab_size)
    except ModelLoadError as error:
        logger.warning("made-up output may hold any id but the end of sequence: %s", error)
        return [index for index in range(model.vocab_size) if index not in model.eos_token_ids]
    excluded = vocabulary.special_ids | set(model.eos_token_ids)
    token_ids = printable_ids(vocabulary.tokens, excluded)
    if not token_ids:
        raise ModelLoadError(f"{source.path}: no token of its vocabulary is printable text")
    return token_ids
