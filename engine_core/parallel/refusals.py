"""What --tensor-parallel-size cannot be, told before any rank is started."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine_core.device.select import select_device
from engine_core.model.loader import read_config
from engine_core.model.registry import find_architecture
from engine_core.parallel.split import check_split
from pagewire.errors import ConfigError
from pagewire.model_source import resolve_model

if TYPE_CHECKING:
    from pagewire.config import EngineConfig


def check_ranks(config: EngineConfig) -> None:
    """Raises ConfigError naming the flag where there are too few GPUs, or the model cannot be
    divided so; ModelLoadError naming the file."""
    size = config.tensor_parallel_size
    undivided = {
        "--enable-lora: adapters are": config.enable_lora,
        "--speculative-model: it is": config.speculative_model is not None,
    }
    for what, is_set in undivided.items():
        if is_set:
            raise ConfigError(
                f"--tensor-parallel-size {size} goes without {what} not divided among ranks"
            )
    select_device(config)
    source = resolve_model(config.model, config.served_model_name)
    model = read_config(source)
    architecture = find_architecture(model.architecture, str(source.path))
    check_split(model, architecture.layout, size, str(source.path))
