"""How much memory there is, and how many KV blocks and tokens it makes."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from pagewire.errors import ConfigError
from pagewire.memory_size import memory_size

if TYPE_CHECKING:
    from engine_core.model.config import ModelConfig

logger = logging.getLogger(__name__)

_MIB = 1 << 20
_GIB = 1 << 30
_LEAST_MODEL_LEN = 2


def parse_memory_size(text: str, flag: str) -> int:
    """512MiB, 4 GiB, 1.5gb or plain bytes, as bytes > 0. Raises ConfigError naming the flag."""
    try:
        return memory_size(text)
    except ValueError as error:
        raise ConfigError(f"{flag} {text!r}: {error}") from error


def available_memory(root: Path = Path("/")) -> int:
    """Bytes this process may still take: of the machine, and of its cgroup where one is set.

    root stands for / in tests.
    """
    available = _meminfo_available(root)
    for group in (_cgroup_v2_left(root), _cgroup_v1_left(root)):
        if group is not None:
            available = min(available, group)
    return max(available, 0)


def _meminfo_available(root: Path) -> int:
    for line in (root / "proc/meminfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) * 1024
    raise ConfigError("/proc/meminfo has no MemAvailable; set --kv-cache-memory")


def _cgroup_v2_left(root: Path) -> int | None:
    return _left(root / "sys/fs/cgroup/memory.max", root / "sys/fs/cgroup/memory.current")


def _cgroup_v1_left(root: Path) -> int | None:
    folder = root / "sys/fs/cgroup/memory"
    return _left(folder / "memory.limit_in_bytes", folder / "memory.usage_in_bytes")


def _left(limit: Path, used: Path) -> int | None:
    try:
        text = limit.read_text().strip()
        return None if text == "max" else int(text) - int(used.read_text())
    except (OSError, ValueError):
        return None


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """Bytes for the KV cache, and what set them, as a message spells it."""

    num_bytes: int
    origin: str
    enough_tokens: int | None = None
    """For how many it need not be more; None: for any number."""


_LEAST_MARGIN = 64 * _MIB
_MARGIN_SHARE = 8


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Bytes of a device that has its own memory, and who takes them beside the KV cache."""

    total: int
    weights: int
    largest_step: int
    """What it takes at its peak, beside the weights."""
    graphs: int
    elsewhere: int
    """The driver, libraries and other processes."""

    @property
    def margin(self) -> int:
        """Kept free: a step of another shape may leave other gaps between its tensors."""
        return max(_LEAST_MARGIN, self.largest_step // _MARGIN_SHARE)

    def kv_budget(self, utilization: float, device: str) -> MemoryBudget:
        """What is left of a share of the device. Raises ConfigError with the figures."""
        taken = self.weights + self.largest_step + self.graphs + self.elsewhere + self.margin
        left = int(self.total * utilization) - taken
        origin = f"--gpu-memory-utilization {utilization}"
        figures = (
            f"weights take {self.weights / _GIB:.2f} GiB, the largest step "
            f"{self.largest_step / _GIB:.2f} GiB, CUDA graphs {self.graphs / _GIB:.2f} GiB, "
            f"everything else on the device {self.elsewhere / _GIB:.2f} GiB, and "
            f"{self.margin / _GIB:.2f} GiB are kept free"
        )
        if left <= 0:
            raise ConfigError(
                f"{origin} of {device} with {self.total / _GIB:.2f} GiB leaves nothing for the "
                f"KV cache: {figures}"
            )
        logger.info(
            "%s of %.2f GiB: %.2f GiB for the KV cache; %s",
            origin,
            self.total / _GIB,
            left / _GIB,
            figures,
        )
        return MemoryBudget(left, origin)


@dataclass(frozen=True, slots=True)
class KVPlan:
    num_blocks: int
    """The null block among them."""
    max_model_len: int


def plan_host_blocks(size: str, block_bytes: int) -> int:
    """How many KV blocks --kv-offload-memory holds. Raises ConfigError with the figures."""
    num_bytes = parse_memory_size(size, "--kv-offload-memory")
    available = available_memory()
    if num_bytes > available:
        raise ConfigError(
            f"--kv-offload-memory {size} is {num_bytes / _MIB:.1f} MiB, but this process may "
            f"take {available / _MIB:.1f} MiB more"
        )
    num_blocks = num_bytes // block_bytes
    if num_blocks < 1:
        raise ConfigError(
            f"--kv-offload-memory {size} is {num_bytes / _MIB:.3f} MiB, "
            f"but a KV block takes {block_bytes / _MIB:.3f} MiB"
        )
    return num_blocks


def block_num_bytes(config: ModelConfig, block_size: int, dtype: torch.dtype) -> int:
    """Keys and values of one block in all layers, as allocate_kv_caches lays them out; dtype
    is that of the cache."""
    return kv_bytes_per_token(config, dtype) * block_size


def kv_bytes_per_token(config: ModelConfig, dtype: torch.dtype) -> int:
    """In all layers, with the scales that int8 has for each token's head."""
    per_head = config.head_dim * dtype.itemsize
    if dtype == torch.int8:
        per_head += torch.float32.itemsize
    return 2 * config.num_layers * config.num_kv_heads * per_head


def resolve_max_model_len(requested: int | None, config: ModelConfig) -> int:
    """Raises ConfigError with both figures where more is asked than the model can,
    or too little to serve anything."""
    if requested is not None and requested > config.max_positions:
        raise ConfigError(
            f"--max-model-len {requested} is above the model's own context of "
            f"{config.max_positions}"
        )
    max_model_len = requested or config.max_positions
    if max_model_len < _LEAST_MODEL_LEN:
        raise ConfigError(
            f"--max-model-len {max_model_len}: a prompt token and an output token are the least"
        )
    return max_model_len


def plan_kv_cache(
    budget: MemoryBudget,
    block_bytes: int,
    block_size: int,
    max_model_len: int,
    max_model_len_is_given: bool,
) -> KVPlan:
    """As many blocks as the budget holds, but no more than are enough.

    One sequence of max_model_len must fit. Where the operator asked for that
    length, ConfigError says by how much it does not; else the length is
    lowered to what fits, with a line in the log.
    """
    usable = budget.num_bytes // block_bytes - 1
    if usable < 1:
        raise ConfigError(
            f"{budget.origin} gives the KV cache {budget.num_bytes / _MIB:.1f} MiB, but a block of "
            f"{block_size} tokens takes {block_bytes / _MIB:.3f} MiB and two are the least"
        )
    if usable * block_size >= max_model_len:
        if budget.enough_tokens is not None:
            enough = max(budget.enough_tokens, max_model_len)
            usable = min(usable, -(-enough // block_size))
        return KVPlan(usable + 1, max_model_len)
    needed = (-(-max_model_len // block_size) + 1) * block_bytes
    shortage = (
        f"{budget.origin} gives the KV cache {budget.num_bytes / _MIB:.1f} MiB = "
        f"{usable * block_size} tokens; one sequence of {max_model_len} tokens takes "
        f"{needed / _MIB:.1f} MiB"
    )
    if max_model_len_is_given:
        raise ConfigError(f"{shortage}: raise it or lower --max-model-len")
    logger.warning("%s: max_model_len is lowered to %d", shortage, usable * block_size)
    return KVPlan(usable + 1, usable * block_size)
