"""A model made of integers, so that the engine's loop can be checked without torch.

Its "KV" of a token is a number that depends on the token and on the KV before
it, as a real model's does, and is written to and read back from an array
[num_blocks, block_size] through the block table alone. The next token is a hash
of everything read back. So any slip in scheduling, in block tables or in the
prefix cache changes the text, and `alone()` says what it should have been.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from engine_core.core import EngineCore
from engine_core.kv.manager import KVManager
from engine_core.kv.offload import KVOffload
from engine_core.kv.restore_policy import MeasuredCosts, RestorePolicy
from engine_core.lora.adapters import AdapterFacts, Adapters
from engine_core.sched.plan import (
    BY_MODEL,
    BlockMoves,
    DraftStep,
    NewSeq,
    SeqStep,
    StepLogprobs,
    StepPlan,
    StepResult,
)
from engine_core.sched.scheduler import Scheduler, SchedulerLimits
from pagewire.errors import ModelLoadError
from pagewire.types import FinishReason, SamplingParams
from pagewire.wire.codec import (
    pack_ids,
    unpack_counts,
    unpack_ids,
    unpack_request_ids,
)
from pagewire.wire.messages import (
    Add,
    Finished,
    PositionLogprobs,
    Started,
    StepOutput,
    StepStats,
)

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Sequence

    from engine_core.request import Request
    from engine_core.sched.policy import Policy
    from engine_core.sched.prefill_budget import PrefillBudget
    from engine_core.sched.speculation import Speculation

VOCAB_SIZE = 61
EOS = 2
EPOCH = 77

_MASK = (1 << 62) - 1
_FACTORS = np.array([pow(1_000_003, power, 1 << 62) for power in range(4096)], dtype=np.int64)


def token_kv(previous: int, token_id: int) -> int:
    """The "KV" of a token after the one whose KV is `previous` (0 at the start)."""
    return (previous * 6_364_136_223_846_793_005 + token_id * 2_654_435_761 + 1_442_695) & _MASK


def next_token(values: np.ndarray, vocab_size: int = VOCAB_SIZE, sample_index: int = 0) -> int:
    """The token that follows; values: int64 [num_tokens], the KV read back."""
    mixed = int(np.bitwise_xor.reduce(values * _FACTORS[: len(values)]))
    mixed ^= sample_index * 2_654_435_761
    return (mixed ^ (mixed >> 29)) % vocab_size


def token_logprobs(values: np.ndarray, vocab_size: int = VOCAB_SIZE) -> list[float]:
    """By id, of the token that follows. They are no distribution, and hardly ever equal;
    their sums are exact."""
    mixed = int(np.bitwise_xor.reduce(values * _FACTORS[: len(values)]))
    return [-(token_kv(mixed, token_id) % 1_000_003) / 131_072 for token_id in range(vocab_size)]


def token_bytes() -> list[bytes]:
    """What each token adds to the text: one letter of 26."""
    return [bytes([97 + token_id % 26]) for token_id in range(VOCAB_SIZE)]


def alone(
    token_ids: Sequence[int],
    max_new: int,
    stop_ids: Sequence[int] = (EOS,),
    sample_index: int = 0,
    start: int = 0,
) -> list[int]:
    """What a request yields that nothing shares, chunks, preempts or caches. start: of its
    adapter (FakeRunner.adapters)."""
    values: list[int] = []
    for token_id in token_ids:
        values.append(token_kv(values[-1] if values else start, token_id))
    output: list[int] = []
    while len(output) < max_new:
        read = np.array(values, dtype=np.int64)
        output.append(next_token(read, sample_index=sample_index))
        if output[-1] in stop_ids:
            break
        values.append(token_kv(values[-1], output[-1]))
    return output


class Guesser:
    """A Drafter without a draft model, but for its guesses."""

    def begin_step(self, budget: int) -> None:
        pass

    def seconds(self, num_rows: int, length: int) -> float:
        return 0.0

    def steps(self, chosen: Sequence[tuple[Request, int]]) -> tuple[DraftStep, ...]:
        return ()

    def verified(self, request: Request, num_drafts: int, num_accepted: int) -> None:
        pass


class Oracle(Guesser):
    """A Drafter that knows what comes, and is wrong at each place with a given chance."""

    def __init__(self, rng: random.Random, wrong: float, *, short: bool = True) -> None:
        """short: guesses are as often shorter than they may be."""
        self._rng = rng
        self._wrong = wrong
        self._short = short

    def propose(self, request: Request, most: int) -> list[int]:
        known = request.token_ids.tolist()
        num = self._rng.randint(0, most) if self._short else most
        ids = alone(known, num, (), request.sample_index)
        return [(token_id + (self._rng.random() < self._wrong)) % VOCAB_SIZE for token_id in ids]


@dataclass(slots=True)
class _Row:
    token_ids: list[int]
    sample_index: int = 0
    computed: int = -1
    """Unknown until the first step, which may begin after a prefix hit."""
    table: list[int] = field(default_factory=list)
    guesses: list[int] = field(default_factory=list)
    """Of the draft model, for this step."""
    num_candidates: int = 0
    """Of a beam."""
    start: int = 0
    """The "KV" before the first token."""


class DonePending:
    def __init__(self, result: StepResult, on_read: Callable[[], None] = lambda: None) -> None:
        self._result = result
        self._on_read = on_read

    def result(self) -> StepResult:
        self._on_read()
        return self._result


class FakeRunner:
    """Implements Runner, and asserts all that a plan promises."""

    def __init__(
        self, num_blocks: int, block_size: int, limits: SchedulerLimits, num_host_blocks: int = 0
    ) -> None:
        self.kv = np.full((num_blocks, block_size), -1, dtype=np.int64)
        self.draft_kv = np.full((num_blocks, block_size), -1, dtype=np.int64)
        self.guesses_wrong: Callable[[], bool] = lambda: False
        """Whether the draft model is wrong this time."""
        self.host_kv = np.full((num_host_blocks, block_size), -1, dtype=np.int64)
        self.block_copy_s = 0.0
        """What each restore of a block takes, by its own word."""
        self.plans: list[StepPlan] = []
        self.on_launch: Callable[[StepPlan], None] = lambda plan: None
        self.on_read: Callable[[StepPlan], None] = lambda plan: None
        self.rows: dict[int, _Row] = {}
        self.adapters: dict[int, int] = {}
        """What each slot makes of the "KV" before the first token."""
        self._limits = limits
        self._block_size = block_size
        self._vocab_size = min(limits.vocab_size, VOCAB_SIZE)
        self._copied: set[int] = set()
        """Targets of all copies."""

    def launch(self, plan: StepPlan) -> DonePending:
        self._check(plan)
        self.plans.append(plan)
        self.on_launch(plan)
        for row in plan.freed_rows:
            del self.rows[row]
        for row, token_id in plan.chosen:
            self.rows[row].token_ids[-1] = token_id
        self._move_tiers(plan.moves)
        self._copy(plan.moves)
        for seq in plan.new_seqs:
            self._enter(seq)
        for guessing in plan.draft_steps:
            self._guess(guessing)
        for step in plan.seqs:
            self._write(step)
        drawn = [(step.row, self._draw(step)) for step in plan.seqs if step.samples]
        drafted = [step.row for step in plan.seqs if step.draft_token_ids]
        assert len(plan.draft_steps) == len({step.row for step in plan.draft_steps})
        accepted = {row: tuple(ids[:-1]) for row, ids in drawn if row in drafted}
        return DonePending(
            StepResult(
                tuple(row for row, _ in drawn),
                tuple(ids[-1] for _, ids in drawn),
                self._candidates(plan),
                accepted,
                restore_s=self.block_copy_s * len(plan.moves.restore),
            ),
            lambda: self.on_read(plan),
        )

    def _move_tiers(self, moves: BlockMoves) -> None:
        for tier, (source, pairs) in (
            (self.host_kv, (self.kv, moves.offload)),
            (self.kv, (self.host_kv, moves.restore)),
        ):
            if pairs:
                sources, targets = (list(side) for side in zip(*pairs, strict=True))
                assert len(set(targets)) == len(targets), moves
                assert (source[sources] >= 0).all(), "a block was moved that was never full"
                tier[targets] = source[sources]

    def _copy(self, moves: BlockMoves) -> None:
        sources, targets = ([pair[side] for pair in moves.copy] for side in (0, 1))
        assert len(set(targets)) == len(targets), "a block is the target of two copies"
        held = {block for row in self.rows.values() for block in row.table}
        assert set(targets).isdisjoint(sources), "copies are made at the same time"
        assert (self.kv[sources, 0] >= 0).all(), "a block that was never written is copied"
        assert held.isdisjoint(targets), "a block that somebody holds is overwritten"
        self.kv[targets] = self.kv[sources]
        self._copied.update(targets)

    def _check(self, plan: StepPlan) -> None:
        assert plan.seqs, "an empty plan was launched"
        assert plan.num_tokens <= self._limits.max_num_batched_tokens
        assert plan.has_drafts == any(seq.draft_token_ids for seq in plan.seqs)
        assert len(plan.seqs) <= self._limits.max_num_seqs
        assert not self.plans or plan.step > self.plans[-1].step
        rows = [seq.row for seq in plan.seqs]
        assert len(set(rows)) == len(rows), rows
        assert all(0 <= row < self._limits.max_num_seqs for row in rows)
        # A fork may have to wait for tokens of the budget.
        assert {seq.row for seq in plan.new_seqs if not seq.block_ids} <= set(rows)
        chunk_seen = False
        for seq in plan.seqs:
            decode = seq.num_new_tokens == 1 and seq.samples
            assert not (decode and chunk_seen), "a decode after a chunk"
            chunk_seen |= not decode

    def _enter(self, seq: NewSeq) -> None:
        assert seq.row not in self.rows, f"row {seq.row} is taken"
        assert 1 <= seq.num_prompt_tokens <= len(seq.token_ids)
        row = _Row(list(seq.token_ids), seq.sample_index, table=list(seq.block_ids))
        if seq.sampling.beam is not None:
            row.num_candidates = seq.sampling.logprobs or 0
        if seq.adapter_slot is not None:
            row.start = self.adapters[seq.adapter_slot]
        self.rows[seq.row] = row

    def _guess(self, step: DraftStep) -> None:
        """Of a draft model whose KV is like the model's."""
        row, begin = self.rows[step.row], step.num_computed_tokens
        end = begin + step.num_new_tokens
        assert step.num_new_tokens > 0
        assert end <= len(row.token_ids)
        assert (step.num_drafts > 0) == (end == len(row.token_ids))
        previous = 0
        for token_id in row.token_ids[:begin]:
            previous = token_kv(previous, token_id)
        row.guesses = alone(row.token_ids, step.num_drafts, (), row.sample_index)
        row.guesses = [(it + self.guesses_wrong()) % self._vocab_size for it in row.guesses]
        (this,) = [it for it in self.plans[-1].seqs if it.row == step.row]
        table = [*row.table, *this.new_block_ids]

        def place(position: int) -> tuple[int, int]:
            block, offset = divmod(position, self._block_size)
            return table[block], offset

        assert begin == 0 or self.draft_kv[place(begin - 1)] == previous, "not what it computed"
        # Its last guess it does not compute.
        for position, token_id in enumerate([*row.token_ids[begin:], *row.guesses[:-1]], begin):
            if step.num_drafts or position < end:
                previous = token_kv(previous, token_id)
                self.draft_kv[place(position)] = previous

    def _drafts(self, step: SeqStep) -> tuple[int, ...]:
        """The draft tokens, whoever made them."""
        if BY_MODEL not in step.draft_token_ids:
            return step.draft_token_ids
        guesses = self.rows[step.row].guesses
        assert len(guesses) == len(step.draft_token_ids)
        return tuple(guesses)

    def _write(self, step: SeqStep) -> None:
        row = self.rows[step.row]
        if row.computed < 0:
            row.computed = step.num_computed_tokens
            first, offset = divmod(row.computed, self._block_size)
            # What a partial block holds is only its own if it is a copy.
            assert offset == 0 or [*row.table, *step.new_block_ids][first] in self._copied
        assert step.num_computed_tokens == row.computed
        assert step.num_new_tokens >= 1
        end = row.computed + step.num_new_tokens
        token_ids = [*row.token_ids, *self._drafts(step)]
        assert end <= len(token_ids)
        assert step.samples == (end == len(token_ids))
        assert step.samples or not step.draft_token_ids
        assert len(token_ids) < self._limits.max_model_len or not step.draft_token_ids
        row.table.extend(step.new_block_ids)
        assert end <= len(row.table) * self._block_size
        # Only a prefix that is never written again may be shared.
        written = set(row.table[row.computed // self._block_size :])
        assert 0 not in row.table, "the null block was handed out"
        for number, other in self.rows.items():
            assert number == step.row or written.isdisjoint(other.table)
        previous = self._read(row, row.computed)[-1] if row.computed else row.start
        for position in range(row.computed, end):
            previous = token_kv(int(previous), token_ids[position])
            block, offset = divmod(position, self._block_size)
            self.kv[row.table[block], offset] = previous
        row.computed = end

    def _candidates(self, plan: StepPlan) -> StepLogprobs:
        """The likeliest tokens of the beams, after all have drawn."""
        output = {}
        for step in plan.seqs:
            row = self.rows[step.row]
            if step.samples and row.num_candidates:
                logprobs = token_logprobs(self._read(row, row.computed), self._vocab_size)
                top = sorted(range(self._vocab_size), key=lambda token_id: -logprobs[token_id])
                del top[row.num_candidates :]
                drawn = row.token_ids[-1]
                output[step.row] = PositionLogprobs(
                    drawn, logprobs[drawn], 0, tuple(top), tuple(logprobs[it] for it in top)
                )
        return StepLogprobs(output)

    def _read(self, row: _Row, num_tokens: int) -> np.ndarray:
        num_blocks = -(-num_tokens // self._block_size)
        return self.kv[row.table[:num_blocks]].reshape(-1)[:num_tokens]

    def _draw(self, step: SeqStep) -> list[int]:
        """After the known ids, and after each draft token as long as they are right."""
        row, drafts = self.rows[step.row], self._drafts(step)
        row.computed -= len(drafts)
        drawn: list[int] = []
        for draft in (*drafts, None):
            values = self._read(row, row.computed)
            drawn.append(next_token(values, self._vocab_size, row.sample_index))
            if drawn[-1] != draft:
                break
            row.computed += 1
        row.token_ids += drawn
        return drawn


class FakeSlots:
    """An AdapterBackend: an adapter's content is its path."""

    def __init__(self, runner: FakeRunner) -> None:
        self._runner = runner

    def fill(self, slot: int, directory: Path) -> AdapterFacts:
        assert slot not in self._runner.adapters
        if directory.name == "bad":
            raise ModelLoadError(f"{directory}: bad")
        self._runner.adapters[slot] = adapter_start(str(directory))
        return AdapterFacts(4, str(directory).encode())

    def clear(self, slot: int) -> None:
        del self._runner.adapters[slot]


def adapter_start(path: str) -> int:
    """alone()'s start for the adapter of a path."""
    return zlib.crc32(path.encode()) + 1


class FakeQueue:
    """Times of a device that works by itself: a step begins when the one before is done,
    and whoever reads its result waits for its end."""

    def __init__(
        self, runner: FakeRunner, clock: FakeClock, step_s: Callable[[int], float]
    ) -> None:
        self._clock = clock
        self._step_s = step_s
        self._done_at: dict[int, float] = {}
        self._free_at = 0.0
        runner.on_launch = self._launch
        runner.on_read = self._read

    def _launch(self, plan: StepPlan) -> None:
        self._free_at = max(self._free_at, self._clock.now) + self._step_s(plan.num_tokens)
        self._done_at[plan.step] = self._free_at

    def _read(self, plan: StepPlan) -> None:
        self._clock.now = max(self._clock.now, self._done_at.pop(plan.step))


class FakeClock:
    """Seconds that pass when told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now

    def pass_time(self, seconds: float) -> None:
        self.now += seconds


@dataclass(slots=True)
class Heard:
    """All that one frontend has heard about one request."""

    token_ids: list[int] = field(default_factory=list)
    started: list[Started] = field(default_factory=list)
    finished: list[Finished] = field(default_factory=list)

    @property
    def reason(self) -> FinishReason:
        assert len(self.finished) == 1, self.finished
        return FinishReason(self.finished[0].reason)


class FakeEngine:
    """An EngineCore over the fake model, and the frontends' side of its outputs."""

    def __init__(
        self,
        *,
        num_blocks: int = 64,
        block_size: int = 16,
        max_num_seqs: int = 8,
        max_num_batched_tokens: int = 64,
        max_model_len: int = 512,
        vocab_size: int = 1000,
        eos_token_ids: tuple[int, ...] = (EOS,),
        enable_prefix_caching: bool = True,
        long_prefill_token_threshold: int = 0,
        max_mixed_prefill_tokens: int = 0,
        short_prefill_share: float = 0.0,
        policy: Policy | None = None,
        step_s: Callable[[int], float] | None = None,
        num_host_blocks: int = 0,
        costs: MeasuredCosts | None = None,
        async_scheduling: bool = False,
        num_adapters: int = 0,
        speculation: Speculation | None = None,
        prefill_budget: PrefillBudget | None = None,
    ) -> None:
        """step_s: how long a step of so many tokens takes. Default: no time, with a
        second between steps. num_host_blocks: of the second tier; 0 is none."""
        self.limits = SchedulerLimits(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=max_model_len,
            vocab_size=vocab_size,
            eos_token_ids=eos_token_ids,
            long_prefill_token_threshold=long_prefill_token_threshold,
            max_mixed_prefill_tokens=max_mixed_prefill_tokens,
            short_prefill_share=short_prefill_share,
        )
        self.clock = FakeClock()
        self.offload = None
        if num_host_blocks:
            self.offload = KVOffload(num_host_blocks, RestorePolicy(block_size, costs))
        self.kv_manager = KVManager(num_blocks, block_size, enable_prefix_caching, self.offload)
        self.scheduler = Scheduler(
            self.limits, self.kv_manager, policy, speculation, prefill_budget
        )
        self.runner = FakeRunner(num_blocks, block_size, self.limits, num_host_blocks)
        self.adapters = Adapters(FakeSlots(self.runner), num_adapters, directory=Path("/"))
        self.core = EngineCore(
            self.scheduler,
            self.runner,
            epoch=EPOCH,
            clock=self.clock,
            token_bytes=token_bytes,
            async_scheduling=async_scheduling,
            adapters=self.adapters,
        )
        self.heard: dict[tuple[int, int], Heard] = {}
        self.unknown_aborts: list[tuple[int, int]] = []
        self.abort_to_free_s: list[float] = []
        self.stats: StepStats | None = None
        self.num_steps = 0
        self._contents: dict[bytes, tuple[int, ...]] = {}
        """Of every block that could ever be hit, by hash."""
        self._between_s = 1.0
        if step_s is not None:
            self._between_s = 0.0
            FakeQueue(self.runner, self.clock, step_s)

    def add(
        self,
        request_id: int,
        token_ids: Sequence[int],
        *,
        max_tokens: int = 8,
        frontend_id: int = 1,
        num_output_tokens: int = 0,
        ignore_eos: bool = False,
        stop_token_ids: tuple[int, ...] = (),
        epoch: int = EPOCH,
        deadline_ms: float | None = None,
        priority: int = 0,
        cache_salt: str = "",
        tenant: str = "",
        skip_prefix_cache: bool = False,
        sample_index: int = 0,
        leader_id: int | None = None,
        sampling: SamplingParams | None = None,
        adapter: str = "",
        adapter_digest: bytes = b"",
    ) -> None:
        sampling = sampling or SamplingParams(
            max_tokens=max_tokens,
            temperature=0.0,
            ignore_eos=ignore_eos,
            stop_token_ids=stop_token_ids,
        )
        add = Add(
            request_id=request_id,
            epoch=epoch,
            token_ids=pack_ids(token_ids),
            num_output_tokens=num_output_tokens,
            sampling=sampling,
            deadline_ms=deadline_ms,
            priority=priority,
            cache_salt=cache_salt,
            tenant=tenant,
            skip_prefix_cache=skip_prefix_cache,
            sample_index=sample_index,
            leader_id=leader_id,
            adapter=adapter,
            adapter_digest=adapter_digest,
        )
        self.core.add(frontend_id, add, self.clock.now)

    def abort(self, *request_ids: int, frontend_id: int = 1) -> None:
        self.core.abort(frontend_id, request_ids, self.clock.now)

    def step(self, poll: Callable[[], None] = lambda: None) -> dict[int, StepOutput]:
        """One step of the core, heard and checked."""
        outputs = self.core.step(poll)
        self.clock.pass_time(self._between_s)
        self.num_steps += 1
        self.core.check_integrity()
        if self.offload is not None:
            self._check_contents(self.offload)
        for frontend_id, output in outputs.items():
            self._hear(frontend_id, output)
        return outputs

    def run(self, max_steps: int = 2000) -> None:
        """Steps until nothing is left to do."""
        first = self.num_steps
        while self.core.has_work():
            assert self.num_steps - first < max_steps, "the engine does not come to an end"
            self.step()

    def of(self, request_id: int, frontend_id: int = 1) -> Heard:
        return self.heard.setdefault((frontend_id, request_id), Heard())

    def check_at_rest(self) -> None:
        """Nothing is running, waiting or held."""
        assert not self.core.has_work()
        assert not self.scheduler.has_unfinished()
        self.core.check_integrity()
        assert self.kv_manager.num_free_blocks == self.kv_manager.num_usable_blocks

    def _check_contents(self, offload: KVOffload) -> None:
        """A hash stands for the same KV wherever and whenever it can be hit."""
        for kv, items in (
            (self.runner.kv, self.kv_manager.pool.cached_items()),
            (self.runner.host_kv, offload.pool.settled_items()),
        ):
            for block_hash, block_id in items:
                content = tuple(kv[block_id].tolist())
                assert self._contents.setdefault(block_hash, content) == content, block_id

    def _hear(self, frontend_id: int, output: StepOutput) -> None:
        assert output.epoch == EPOCH
        assert output.step == self.core.step_id
        token_ids = unpack_ids(output.token_ids)
        request_ids = unpack_request_ids(output.request_ids)
        for started in output.started:
            heard = self.of(started.request_id, frontend_id)
            assert not heard.finished
            assert not heard.token_ids
            heard.started.append(started)
        begin = 0
        for request_id, count in zip(request_ids, unpack_counts(output.counts), strict=True):
            heard = self.of(request_id, frontend_id)
            assert heard.started, f"tokens of {request_id} before it started"
            assert not heard.finished, f"tokens of {request_id} after its end"
            heard.token_ids.extend(token_ids[begin : begin + count])
            begin += count
        assert begin == len(token_ids)
        for finished in output.finished:
            self.of(finished.request_id, frontend_id).finished.append(finished)
        self.unknown_aborts.extend((frontend_id, unknown) for unknown in output.unknown_aborts)
        self.abort_to_free_s.extend(output.stats.abort_to_free_s)
        self.stats = output.stats
