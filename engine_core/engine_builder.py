"""From a configuration to a runner that is ready to serve."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch

from engine_core.device.memory import (
    KVPlan,
    block_num_bytes,
    plan_host_blocks,
    plan_kv_cache,
    resolve_max_model_len,
)
from engine_core.device.select import select_device
from engine_core.lora.adapters import Adapters
from engine_core.lora.start import load_adapters, lora_shape
from engine_core.model.kv_scales import (
    FP8,
    describe_kv_cache,
    read_kv_scales,
    resolve_kv_cache_dtype,
)
from engine_core.model.loader import load_model, open_model
from engine_core.model.quantization import describe_computation, resolve_quantization
from engine_core.parallel.ops import parallel_ops
from engine_core.parallel.ranks import SOLE_RANK
from engine_core.parallel.split import share_config, share_heads
from engine_core.runner.batch import BatchBuilder
from engine_core.runner.graphs import graph_sizes, measure_graphs
from engine_core.runner.kv_caches import allocate_kv_caches, set_kv_scales
from engine_core.runner.kv_calibration import calibrate_kv_scales
from engine_core.runner.model_runner import ModelRunner
from engine_core.runner.offload import HostKV
from engine_core.runner.profile import run_dummy_step
from engine_core.runner.rows import Rows
from engine_core.sched.intake import FindUnsupported, all_is_supported
from engine_core.sched.prefill_budget import PrefillBudget
from engine_core.speculative import (
    draft_model_len,
    make_speculation,
    max_sampled_tokens,
    open_draft_model,
    resolve_method,
)
from kernels.registry import UnsupportedOps, load_ops
from pagewire.errors import ConfigError
from pagewire.model_source import resolve_model
from pagewire.number_list import number_list

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine_core.device.base import Device
    from engine_core.device.memory import MemoryBudget
    from engine_core.kv.restore_policy import MeasuredCosts
    from engine_core.model.config import ModelConfig
    from engine_core.model.decoder import DecoderModel
    from engine_core.parallel.group import RankGroup
    from engine_core.parallel.ranks import Ranks
    from engine_core.runner.base import Runner
    from engine_core.sched.speculation import Speculation
    from kernels.ops import Ops
    from pagewire.config import EngineConfig

logger = logging.getLogger(__name__)

ProgressCallback = Callable[[str, int, int], None]
"""stage, done bytes, total bytes. The stages: weights, warm-up (0 then 1 of 1)."""


@dataclass(frozen=True, slots=True)
class BuiltEngine:
    """The runner, and what the scheduler and Ready need to know of it."""

    runner: Runner
    model_name: str
    architecture: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    dtype: str
    device: str
    num_blocks: int
    """The null block among them."""
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    async_scheduling: bool
    """Whether the next step is planned while one runs."""
    default_sampling: dict[str, float]
    window: int | None = None
    """Tokens that any layer sees at most, where all are limited."""
    num_host_blocks: int = 0
    """Of the second tier; 0 where there is none."""
    kv_costs: MeasuredCosts | None = None
    """Measured at warm-up where there is a second tier."""
    speculation: Speculation | None = None
    """What guesses ahead, if anything does."""
    prefill_budget: PrefillBudget | None = None
    """Of steps with decodes, where it is measured."""
    find_unsupported: FindUnsupported = all_is_supported
    """What of the sampling parameters the runner cannot do."""
    adapters: Adapters = field(default_factory=Adapters)
    ranks: Ranks = SOLE_RANK
    """Those that the model is divided among."""


def build_engine(
    config: EngineConfig, progress: ProgressCallback, ranks: Ranks = SOLE_RANK
) -> BuiltEngine:
    """Checks everything that can be checked, then loads the weights, or this rank's part.

    All ranks come through here and do the same; check_ranks() comes before. Raises
    ModelLoadError naming the file, ConfigError naming the flag.
    """
    started = time.monotonic()
    device = select_device(config, ranks.rank)
    prefill_budget = make_prefill_budget(config, device)
    opened = open_model(resolve_model(config.model, config.served_model_name))
    max_model_len = resolve_max_model_len(config.max_model_len, opened.config)
    dtype = device.resolve_dtype(config.dtype, opened.config.dtype)
    ops = _load_ops(config, device, dtype)
    quantization = resolve_quantization(config, opened, ops)
    kv_dtype = resolve_kv_cache_dtype(
        config.kv_cache_dtype,
        dtype,
        ops,
        rounds_activations=config.dtype == "auto" and quantization != "none",
    )
    kv_scales = None
    if kv_dtype == FP8:
        heads = share_heads(
            opened.config.num_heads, opened.config.num_kv_heads, ranks.rank, ranks.size
        )
        kv_scales = read_kv_scales(opened.checkpoint, opened.config, heads.kv)
    max_num_batched_tokens = config.max_num_batched_tokens or device.default_max_num_batched_tokens
    sizes = _graph_sizes(config, device)
    lora = lora_shape(config, opened)
    method = resolve_method(config, device)
    opened_draft = open_draft_model(config, opened)
    max_sampled = max_sampled_tokens(config, method, max_num_batched_tokens)
    own = share_config(opened.config, ranks.rank, ranks.size)
    # A block holds the KV of both.
    beside = 0
    if opened_draft is not None:
        beside = block_num_bytes(opened_draft.config, config.block_size, dtype)
    planner = _KVPlanner(config, own, device, kv_dtype, max_model_len, max_sampled, beside)
    kv_plan = planner.plan_before_load()
    num_host_blocks = planner.plan_host_blocks()
    group = ranks.connect(device.torch_device)
    if group is not None:
        ops = parallel_ops(ops, group)
        kv_plan, num_host_blocks = _agree(group, device, kv_plan, num_host_blocks)
    model = load_model(
        opened,
        ops,
        device.torch_device,
        dtype,
        kv_plan.max_model_len if kv_plan else max_model_len,
        lambda done, total: progress("weights", done, total),
        quantization,
        lora,
        group,
    )
    draft_model = draft_len = None
    if opened_draft is not None:
        draft_len = draft_model_len(
            opened_draft, kv_plan.max_model_len if kv_plan else max_model_len
        )
        draft_model = load_model(
            opened_draft,
            ops,
            device.torch_device,
            dtype,
            draft_len,
            lambda done, total: progress("weights", done, total),
            resolve_quantization(config, opened_draft, ops),
        )
    if kv_plan is None:
        kv_plan = planner.plan_after_load(model, ops, max_num_batched_tokens, sizes)
        if group is not None:
            kv_plan, _ = _agree(group, device, kv_plan, 0)
            assert kv_plan is not None
    if kv_dtype == FP8 and kv_scales is None:
        kv_scales = calibrate_kv_scales(model, device, kv_plan.max_model_len, dtype)
    kv_caches = allocate_kv_caches(model, device, kv_plan.num_blocks, config.block_size, kv_dtype)
    if kv_dtype == FP8 and kv_scales is not None:
        set_kv_scales(kv_caches, kv_scales)
    host_kv = HostKV(device, kv_caches, num_host_blocks) if num_host_blocks else None
    runner = ModelRunner(
        model,
        ops,
        device,
        kv_caches,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=kv_plan.max_model_len,
        host_kv=host_kv,
        graph_sizes=sizes,
        max_sampled_tokens=max_sampled,
    )
    if draft_model is not None:
        draft_caches = allocate_kv_caches(
            draft_model, device, kv_plan.num_blocks, config.block_size, dtype
        )
        runner.add_draft_model(draft_model, ops, draft_caches)
    adapters = load_adapters(config, model, opened.source.name, dtype)
    progress("warm-up", 0, 1)
    runner.warm_up()
    kv_costs = runner.measure_kv_costs() if host_kv is not None else None
    speculation = make_speculation(config, method, runner, max_sampled, draft_len)
    progress("warm-up", 1, 1)
    dtype_name = describe_computation(
        str(dtype).removeprefix("torch."), quantization, model.quantized_formats
    )
    dtype_name = describe_kv_cache(dtype_name, dtype, kv_dtype)
    logger.info(
        "%s ready in %.1f s: %s, %s on %s, %s kernels, %d KV blocks of %d tokens, context %d",
        opened.source.name,
        time.monotonic() - started,
        opened.config.architecture,
        dtype_name,
        device.name,
        ops.name,
        kv_plan.num_blocks,
        config.block_size,
        kv_plan.max_model_len,
    )
    window = opened.config.window
    if window is not None and window < kv_plan.max_model_len:
        logger.info("every layer sees %d tokens at most: KV blocks behind are given back", window)
    return BuiltEngine(
        runner=ranks.lead(runner),
        model_name=opened.source.name,
        architecture=opened.config.architecture,
        max_model_len=kv_plan.max_model_len,
        vocab_size=opened.config.vocab_size,
        eos_token_ids=opened.config.eos_token_ids,
        dtype=dtype_name,
        device=device.name if ranks.size == 1 else f"{ranks.size} x {device.name}",
        num_blocks=kv_plan.num_blocks,
        block_size=config.block_size,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        prefill_budget=prefill_budget,
        async_scheduling=overlaps(config, device) and speculation is None,
        default_sampling=opened.config.default_sampling,
        window=window,
        num_host_blocks=num_host_blocks,
        kv_costs=kv_costs,
        adapters=adapters,
        ranks=ranks,
        speculation=speculation,
    )


def _agree(
    group: RankGroup, device: Device, plan: KVPlan | None, num_host_blocks: int
) -> tuple[KVPlan | None, int]:
    """What every rank has room for: one block table is for the caches of all."""
    if plan is None:
        (host,) = group.least([num_host_blocks], device.torch_device)
        return None, host
    numbers = [plan.num_blocks, plan.max_model_len, num_host_blocks]
    num_blocks, max_model_len, host = group.least(numbers, device.torch_device)
    return replace(plan, num_blocks=num_blocks, max_model_len=max_model_len), host


def overlaps(config: EngineConfig, device: Device) -> bool:
    """Whether to plan while the device runs. On one that computes within the launch there is
    no such time, and results would only come later."""
    return config.async_scheduling == "auto" and not device.is_synchronous


def make_prefill_budget(config: EngineConfig, device: Device) -> PrefillBudget | None:
    """None where a constant is asked for, or no limit. Raises ConfigError."""
    target_ms = config.itl_target_ms
    if config.max_mixed_prefill_tokens is not None:
        if target_ms is not None:
            raise ConfigError(
                f"--itl-target-ms {target_ms:g} sizes what --max-mixed-prefill-tokens "
                f"{config.max_mixed_prefill_tokens} sets: give one of them"
            )
        return None
    first = device.default_max_mixed_prefill_tokens
    if target_ms is not None:
        return PrefillBudget(target_ms / 1e3, first=first)
    return PrefillBudget(first=first) if first else None


def _graph_sizes(config: EngineConfig, device: Device) -> tuple[int, ...]:
    if config.cuda_graphs == "off" or not device.captures_graphs:
        return ()
    if config.cuda_graph_sizes is None:
        return graph_sizes(config.max_num_seqs)
    named = number_list(config.cuda_graph_sizes)
    # Larger batches than that there are none.
    sizes = tuple(size for size in named if size <= config.max_num_seqs)
    if not sizes:
        raise ConfigError(
            f"--cuda-graph-sizes {config.cuda_graph_sizes}: no batch has so many sequences, as "
            f"--max-num-seqs is {config.max_num_seqs}; --cuda-graphs off captures none"
        )
    return sizes


def _load_ops(config: EngineConfig, device: Device, dtype: torch.dtype) -> Ops:
    name = device.default_kernels if config.kernels == "auto" else config.kernels
    if name == "cpu" and dtype is torch.float32:
        # What float32 costs is paid for tokens that are the same every time. Where the C++
        # is not built, torch takes its place below, and says so.
        with suppress(UnsupportedOps):
            return load_ops(name, batch_invariant=True)
    try:
        return load_ops(name, batch_invariant=config.batch_invariant)
    except UnsupportedOps as error:
        mode = " with --batch-invariant" if config.batch_invariant else ""
        raise ConfigError(f"--kernels {config.kernels}{mode}: {error}") from error


class _KVPlanner:
    """Plans before the weights are read where the budget is known by then, to fail early."""

    def __init__(
        self,
        config: EngineConfig,
        model_config: ModelConfig,
        device: Device,
        kv_dtype: torch.dtype,
        max_model_len: int,
        max_sampled_tokens: int,
        bytes_beside: int,
    ) -> None:
        """bytes_beside: of a block, that another model takes."""
        self._config = config
        self._device = device
        self._kv_dtype = kv_dtype
        self._max_model_len = max_model_len
        self._max_sampled_tokens = max_sampled_tokens
        self._target_bytes = block_num_bytes(model_config, config.block_size, kv_dtype)
        self._block_bytes = self._target_bytes + bytes_beside

    def plan_before_load(self) -> KVPlan | None:
        budget = self._device.fixed_kv_budget()
        return None if budget is None else self._plan(budget)

    def plan_after_load(
        self, model: DecoderModel, ops: Ops, max_num_batched_tokens: int, sizes: Sequence[int]
    ) -> KVPlan:
        """sizes: of the graphs to be captured."""
        block_size = self._config.block_size
        one_block = allocate_kv_caches(model, self._device, 1, block_size, self._kv_dtype)
        max_num_seqs = self._config.max_num_seqs

        def largest_step() -> None:
            run_dummy_step(
                model,
                ops,
                one_block,
                max_num_batched_tokens,
                self._max_sampled_tokens,
                self._max_model_len,
            )

        def graphs_bytes() -> int:
            rows = Rows(max_num_seqs, self._max_model_len, block_size)
            builder = BatchBuilder(rows, self._device, max_num_seqs, max_num_batched_tokens)
            return measure_graphs(model, self._device, one_block, builder, sizes)

        return self._plan(self._device.profiled_kv_budget(largest_step, graphs_bytes))

    def plan_host_blocks(self) -> int:
        size = self._config.kv_offload_memory
        if size is None:
            return 0
        if not self._config.enable_prefix_caching:
            raise ConfigError(
                "--kv-offload-memory holds what the prefix cache evicts: "
                "it needs --enable-prefix-caching"
            )
        return plan_host_blocks(size, self._target_bytes)

    def _plan(self, budget: MemoryBudget) -> KVPlan:
        return plan_kv_cache(
            budget,
            self._block_bytes,
            self._config.block_size,
            self._max_model_len,
            self._config.max_model_len is not None,
        )
