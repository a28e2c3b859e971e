"""Adapters as the configuration asks for them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from engine_core.lora.adapters import AdapterRefused, Adapters
from engine_core.lora.backend import ModelSlots
from engine_core.lora.checkpoint import AdapterCheckpoint
from engine_core.model.lora import LoraShape, all_products
from engine_core.model.registry import find_architecture
from pagewire.adapter_list import adapter_list
from pagewire.errors import ConfigError, ModelLoadError

if TYPE_CHECKING:
    import torch

    from engine_core.model.decoder import DecoderModel
    from engine_core.model.loader import OpenedModel
    from pagewire.config import EngineConfig


def lora_shape(config: EngineConfig, opened: OpenedModel) -> LoraShape | None:
    """None where adapters are off. Checks those of --lora-modules, before the model's weights
    are read. Raises ConfigError naming the flag, and the file at fault."""
    if not config.enable_lora:
        for flag, value in {
            "--lora-modules": config.lora_modules,
            "--lora-dir": config.lora_dir,
        }.items():
            if value is not None:
                raise ConfigError(f"{flag} needs --enable-lora")
        return None
    if config.lora_dir is not None and not Path(config.lora_dir).expanduser().is_dir():
        raise ConfigError(f"--lora-dir {config.lora_dir}: no such directory")
    modules = {} if config.lora_modules is None else adapter_list(config.lora_modules)
    if len(modules) > config.max_loras:
        raise ConfigError(
            f"--lora-modules has {len(modules)} adapters, but --max-loras is {config.max_loras}"
        )
    model = opened.config
    layout = find_architecture(model.architecture, str(opened.source.path)).layout
    products = all_products(layout, model)
    for name, path in modules.items():
        if name == opened.source.name:
            raise ConfigError(f"--lora-modules: {name} is the name of the model itself")
        try:
            AdapterCheckpoint(_folder(path), products, config.max_lora_rank)
        except ModelLoadError as error:
            raise ConfigError(f"--lora-modules {name}={path}: {error}") from error
    return LoraShape(config.max_loras, config.max_lora_rank)


def _folder(path: str) -> Path:
    return Path(path).expanduser().resolve()


def load_adapters(
    config: EngineConfig, model: DecoderModel, base_name: str, dtype: torch.dtype
) -> Adapters:
    """Those of --lora-modules. Raises ConfigError naming the flag and the file at fault."""
    if not config.enable_lora:
        return Adapters()
    adapters = Adapters(
        ModelSlots(model, config.max_lora_rank, dtype),
        config.max_loras,
        base_name=base_name,
        directory=None if config.lora_dir is None else Path(config.lora_dir).expanduser(),
    )
    modules = {} if config.lora_modules is None else adapter_list(config.lora_modules)
    for name, path in modules.items():
        try:
            adapters.load_static(name, str(_folder(path)))
        except (AdapterRefused, ModelLoadError) as error:
            raise ConfigError(f"--lora-modules {name}={path}: {error}") from error
    return adapters
