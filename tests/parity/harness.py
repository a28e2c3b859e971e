"""One loaded model under as many engines as a test wants, and transformers beside it."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from engine_core.core import EngineCore
from engine_core.device.cpu import CpuDevice
from engine_core.kv.manager import KVManager
from engine_core.kv.offload import KVOffload
from engine_core.kv.restore_policy import RestorePolicy
from engine_core.kv.window import KVWindow
from engine_core.model.inputs import ModelInput
from engine_core.model.loader import load_model, open_model
from engine_core.parallel.ops import parallel_ops
from engine_core.runner.kv_caches import allocate_kv_caches, set_kv_scales
from engine_core.runner.model_runner import ModelRunner
from engine_core.runner.offload import HostKV
from engine_core.sched.scheduler import Scheduler, SchedulerLimits
from kernels.lora import NO_SLOT, LoraBatch
from kernels.ops import AttentionBatch
from kernels.registry import load_ops
from pagewire.model_source import resolve_model
from pagewire.types import FinishReason, SamplingParams
from pagewire.wire.codec import pack_ids, unpack_counts, unpack_ids, unpack_request_ids
from pagewire.wire.messages import Add

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from engine_core.grammar.gate import GrammarGate
    from engine_core.lora.adapters import Adapters
    from engine_core.model.config import ModelConfig
    from engine_core.model.decoder import DecoderModel
    from engine_core.model.kv_scales import LayerScales
    from engine_core.model.lora import LoraShape
    from engine_core.model.quantization import Quantization
    from engine_core.parallel.group import RankGroup
    from engine_core.runner.base import Runner
    from engine_core.sched.speculation import Speculation
    from kernels.ops import Ops
    from pagewire.wire.messages import StepOutput

FRONTEND_ID = 7
EPOCH = 11
MAX_SAMPLED = 64
_STEP_LIMIT = 5000


class Engine:
    """A real scheduler, KV manager, core and runner over a model that others use too."""

    def __init__(
        self,
        loaded: Loaded,
        *,
        num_blocks: int = 400,
        block_size: int = 16,
        max_num_seqs: int = 32,
        max_num_batched_tokens: int = 512,
        prefix_caching: bool = False,
        grammars: GrammarGate | None = None,
        num_host_blocks: int = 0,
        async_scheduling: bool = False,
        graph_sizes: Sequence[int] = (),
        adapters: Adapters | None = None,
        lead: Callable[[Runner], Runner] = lambda runner: runner,
        speculation: Speculation | None = None,
        draft: Loaded | None = None,
    ) -> None:
        """lead: what of several ranks takes the plans."""
        kv_caches = allocate_kv_caches(
            loaded.model, loaded.device, num_blocks, block_size, loaded.kv_dtype or loaded.dtype
        )
        if loaded.kv_scales is not None:
            set_kv_scales(kv_caches, loaded.kv_scales)
        host_kv = None
        self.offload = None
        if num_host_blocks:
            host_kv = HostKV(loaded.device, kv_caches, num_host_blocks)
            # Without costs everything is restored; then what a restore costs decides.
            self.offload = KVOffload(num_host_blocks, RestorePolicy(block_size))
        window = loaded.config.window
        self.kv_manager = KVManager(
            num_blocks,
            block_size,
            prefix_caching,
            self.offload,
            None if window is None else KVWindow(window, max_num_batched_tokens),
        )
        self.scheduler = Scheduler(
            SchedulerLimits(
                max_num_seqs=max_num_seqs,
                max_num_batched_tokens=max_num_batched_tokens,
                max_model_len=loaded.max_model_len,
                vocab_size=loaded.config.vocab_size,
                eos_token_ids=loaded.config.eos_token_ids,
            ),
            self.kv_manager,
            speculation=speculation,
        )
        self.runner = ModelRunner(
            loaded.model,
            loaded.ops,
            loaded.device,
            kv_caches,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=loaded.max_model_len,
            host_kv=host_kv,
            graph_sizes=graph_sizes,
            max_sampled_tokens=max(max_num_seqs, MAX_SAMPLED),
        )
        if draft is not None:
            caches = allocate_kv_caches(
                draft.model, draft.device, num_blocks, block_size, draft.dtype
            )
            self.runner.add_draft_model(draft.model, draft.ops, caches)
        if graph_sizes:
            self.runner.warm_up()
        self.core = EngineCore(
            self.scheduler,
            lead(self.runner),
            epoch=EPOCH,
            grammars=grammars,
            async_scheduling=async_scheduling,
            adapters=adapters,
        )
        self._next_id = 1

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        max_tokens: int,
        sampling: SamplingParams | None = None,
        adapters: Sequence[str] | None = None,
    ) -> list[list[int]]:
        """All prompts at once, greedily unless sampling says otherwise, past any EOS; adapters:
        the name of one for each."""
        sampling = sampling or SamplingParams(max_tokens, temperature=0.0, ignore_eos=True)
        return self.generate_each([(prompt, sampling) for prompt in prompts], adapters)

    def generate_each(
        self,
        asked: Sequence[tuple[Sequence[int], SamplingParams]],
        adapters: Sequence[str] | None = None,
    ) -> list[list[int]]:
        """The outputs of (prompt, sampling), all at once."""
        outputs: dict[int, list[int]] = {}
        names = adapters or [""] * len(asked)
        for (prompt, sampling), name in zip(asked, names, strict=True):
            outputs[self._next_id] = []
            add = Add(self._next_id, EPOCH, pack_ids(prompt), 0, sampling, adapter=name)
            self.core.add(FRONTEND_ID, add, received_at=0.0)
            self._next_id += 1
        for _ in range(_STEP_LIMIT):
            if not self.core.has_work():
                self.kv_manager.check_all_free()
                self.core.check_integrity()
                return list(outputs.values())
            for output in self.core.step(lambda: None).values():
                self._take(output, outputs)
        raise AssertionError(f"not finished after {_STEP_LIMIT} steps: {self.core.stats()}")

    def _take(self, output: Any, outputs: dict[int, list[int]]) -> None:
        for request_id, token_ids in rows_of(output):
            outputs[request_id] += token_ids
        for finished in output.finished:
            assert finished.reason in (FinishReason.LENGTH, FinishReason.STOP), finished


def rows_of(output: StepOutput) -> Iterator[tuple[int, list[int]]]:
    """(request id, its new ids)"""
    token_ids = iter(unpack_ids(output.token_ids))
    counts = unpack_counts(output.counts)
    for request_id, count in zip(unpack_request_ids(output.request_ids), counts, strict=True):
        yield request_id, list(islice(token_ids, count))
    assert next(token_ids, None) is None


@dataclass
class Loaded:
    model: DecoderModel
    config: ModelConfig
    ops: Ops
    device: CpuDevice
    max_model_len: int
    dtype: torch.dtype = torch.float32
    kv_dtype: torch.dtype | None = None
    """Of the KV cache, if not dtype."""
    kv_scales: Sequence[LayerScales] | None = None

    def logits(self, token_ids: Sequence[int], slot: int = NO_SLOT) -> torch.Tensor:
        """[T, V] of one sequence computed in one step; slot: of an adapter."""
        num = len(token_ids)
        kv_dtype = self.kv_dtype or self.dtype
        kv_caches = allocate_kv_caches(self.model, self.device, num // 16 + 2, 16, kv_dtype)
        if self.kv_scales is not None:
            set_kv_scales(kv_caches, self.kv_scales)
        starts = torch.tensor([0, num], dtype=torch.int32)
        lens = torch.tensor([num], dtype=torch.int32)
        table = torch.arange(1, num // 16 + 2, dtype=torch.int32).view(1, -1)
        positions = torch.arange(num)
        batch = AttentionBatch(starts, lens, table, int(num == 1), num, num, starts, lens)
        lora = LoraBatch.of(np.full(num, slot), torch.from_numpy)
        inputs = ModelInput(torch.tensor(token_ids), positions, positions + 16, batch, None, lora)
        with torch.inference_mode():
            logits = self.model.forward(inputs, kv_caches)
        assert logits is not None
        return logits


def load(
    path: str,
    backend: str,
    max_model_len: int = 512,
    *,
    dtype: torch.dtype = torch.float32,
    batch_invariant: bool = False,
    lora: LoraShape | None = None,
    quantization: Quantization = "none",
    group: RankGroup | None = None,
) -> Loaded:
    """On one thread: the tests share two cores with others. group: of ranks, of which this
    is one."""
    device = CpuDevice("1GiB", 1)
    ops = load_ops(backend, batch_invariant=batch_invariant)
    if group is not None:
        ops = parallel_ops(ops, group)
    opened = open_model(resolve_model(path))
    model = load_model(
        opened,
        ops,
        device.torch_device,
        dtype,
        max_model_len,
        lambda done, total: None,
        quantization,
        lora,
        group,
    )
    return Loaded(model, opened.config, ops, device, max_model_len, dtype)


def transformers_greedy(
    model: Any, prompts: Sequence[Sequence[int]], num_tokens: int
) -> list[list[int]]:
    """num_tokens from generate() for each prompt, padded on the left to one batch."""
    longest = max(len(prompt) for prompt in prompts)
    padding = [longest - len(prompt) for prompt in prompts]
    ids = torch.tensor([[0] * pad + list(p) for pad, p in zip(padding, prompts, strict=True)])
    mask = torch.tensor([[0] * pad + [1] * (longest - pad) for pad in padding])
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    with torch.inference_mode():
        out = model.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=num_tokens)
    tokens: list[list[int]] = out[:, longest:].tolist()
    assert all(len(row) == num_tokens for row in tokens)
    return tokens


def assert_same_tokens(ours: Sequence[Sequence[int]], theirs: Sequence[Sequence[int]]) -> None:
    """Names the first prompt and position that differ."""
    assert len(ours) == len(theirs)
    for index, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
        for at, (a, b) in enumerate(zip(mine, other, strict=True)):
            assert a == b, f"prompt {index}, output token {at}: {a} != {b}"
