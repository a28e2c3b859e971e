"""A request inside the engine, and the moves its status may make."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING

from pagewire.types import FinishReason, Timings

if TYPE_CHECKING:
    from array import array

    from engine_core.grammar.grammar import Grammar
    from engine_core.kv.block_table import BlockTable
    from engine_core.lora.adapters import Adapter
    from engine_core.sched.acceptance import Acceptance
    from engine_core.sched.beam_group import BeamGroup
    from engine_core.sched.logprobs import PromptLogprobs
    from engine_core.sched.ngram import NgramIndex
    from pagewire.types import SamplingParams


class Status(enum.Enum):
    """Where a request stands."""

    WAITING = "waiting"
    """Accepted, never scheduled."""
    RUNNING = "running"
    """Holds a row and blocks."""
    PREEMPTED = "preempted"
    """Waits again, with its output; its KV is to be recomputed."""
    STOPPED = "stopped"
    LENGTH = "length"
    ABORTED = "aborted"
    FAILED = "failed"


_FINISH_REASONS = {
    Status.STOPPED: FinishReason.STOP,
    Status.LENGTH: FinishReason.LENGTH,
    Status.ABORTED: FinishReason.ABORT,
    Status.FAILED: FinishReason.ERROR,
}

_ENDS = frozenset(_FINISH_REASONS)
_ENDS_UNSCHEDULED = frozenset({Status.ABORTED, Status.FAILED})

# Statuses that are no key here are terminal.
_MOVES = {
    Status.WAITING: _ENDS_UNSCHEDULED | {Status.RUNNING},
    Status.RUNNING: _ENDS | {Status.PREEMPTED},
    # It ends with a token that was drawn before, and is read only now.
    Status.PREEMPTED: _ENDS | {Status.RUNNING},
}


class Request:
    """One request: num_computed_tokens runs after num_tokens until it stops.

        0          num_computed      num_prompt        num_tokens   max_num_tokens
        | KV computed  | to compute: prompt | ..and output |  may be drawn  |

    Prefill, chunk, decode, prefix hit and resume are all the one subtraction
    num_tokens - num_computed_tokens. Equality is identity.
    """

    __slots__ = (
        "acceptance",
        "adapter",
        "admission_index",
        "arrival_index",
        "arrived_at",
        "deadline_at",
        "finish_token_id",
        "first_scheduled_at",
        "first_token_at",
        "frontend_id",
        "grammar",
        "group",
        "last_token_at",
        "max_num_tokens",
        "ngrams",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_draft_computed",
        "num_preemptions",
        "num_prompt_tokens",
        "num_unread",
        "priority",
        "prompt_logprobs",
        "request_id",
        "row",
        "sample_index",
        "sampling",
        "status",
        "stop_ids",
        "table",
        "tenant",
        "token_ids",
    )

    def __init__(
        self,
        *,
        frontend_id: int,
        request_id: int,
        table: BlockTable,
        num_prompt_tokens: int,
        sampling: SamplingParams,
        max_model_len: int,
        sample_index: int = 0,
        eos_token_ids: tuple[int, ...] = (),
        priority: int = 0,
        tenant: str = "",
        arrived_at: float = 0.0,
        deadline_at: float | None = None,
        adapter: Adapter | None = None,
    ) -> None:
        """table: the empty block table over the ids known so far: the prompt,
        then output already emitted if this continues a request.

        Times are of the engine's monotonic clock, in seconds.
        """
        self.frontend_id = frontend_id
        self.request_id = request_id
        self.table = table
        self.token_ids: array[int] = table.token_ids
        """Prompt, then output; only appended to, except that a beam may go on as another."""
        self.num_prompt_tokens = num_prompt_tokens
        self.sampling = sampling
        self.sample_index = sample_index
        self.priority = priority
        self.tenant = tenant
        self.adapter = adapter
        """None: the base model computes it."""
        self.max_num_tokens = min(num_prompt_tokens + sampling.max_tokens, max_model_len)
        """Prompt and output at which it ends with LENGTH."""
        self.stop_ids = frozenset(sampling.stop_token_ids)
        if not sampling.ignore_eos:
            self.stop_ids |= frozenset(eos_token_ids)

        self.status = Status.WAITING
        self.row: int = -1
        """The runner's row while RUNNING, else -1."""
        self.arrival_index = -1
        """Order of arrival, given by the scheduler."""
        self.admission_index = -1
        """Order of the first admission, kept over preemptions; -1 before it."""
        self.num_computed_tokens = 0
        """Leading tokens whose KV is in the cache, or will be once all plans made
        so far have run. Only the scheduler moves it."""
        self.num_unread = 0
        """Tokens that plans made so far draw, and whose ids are still to come. Those of beams
        are not counted: what a beam goes on with is the search's choice."""
        self.num_cached_tokens = 0
        """Prompt tokens that the first admission found in the prefix cache."""
        self.num_preemptions = 0
        self.prompt_logprobs: PromptLogprobs | None = None
        """What is known of them until the first token takes them along; None where
        they are not wanted (any more)."""
        self.grammar: Grammar | None = None
        """What its output must follow, compiled before it is queued."""
        self.group: BeamGroup | None = None
        """The beam search that it leads, or is a beam of."""
        self.acceptance: Acceptance | None = None
        """Of guesses at its next tokens, once there was one."""
        self.ngrams: NgramIndex | None = None
        """Where its guesses come from, if they come from itself."""
        self.num_draft_computed = 0
        """Leading tokens whose KV the draft model has, if there is one."""
        self.finish_token_id: int | None = None
        """The stop token that ended it, for STOPPED."""

        self.arrived_at = arrived_at
        self.deadline_at = deadline_at
        self.first_scheduled_at: float | None = None
        self.first_token_at: float | None = None
        self.last_token_at: float | None = None

    @property
    def num_tokens(self) -> int:
        """Known ids: prompt and output."""
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def output_token_ids(self) -> list[int]:
        """A copy of the output ids; not for the hot loop."""
        return self.token_ids[self.num_prompt_tokens :].tolist()

    @property
    def adapter_slot(self) -> int | None:
        return None if self.adapter is None else self.adapter.slot

    @property
    def num_reserved_rows(self) -> int:
        """Rows that its admission takes, for itself and for the beams to come."""
        if self.group is None:
            return 1
        return self.group.width if self.group.leader is self else 0

    @property
    def is_finished(self) -> bool:
        return self.status not in _MOVES

    @property
    def finish_reason(self) -> FinishReason | None:
        """None until it is finished."""
        return _FINISH_REASONS.get(self.status)

    def move(self, to: Status) -> None:
        """Changes the status; a move that is not in the table is our bug."""
        assert to in _MOVES.get(self.status, ()), (self.request_id, self.status, to)
        self.status = to

    def append(self, token_id: int, now: float) -> None:
        """Adds a sampled id. O(1)."""
        self.token_ids.append(token_id)
        if self.first_token_at is None:
            self.first_token_at = now
        self.last_token_at = now

    def new_branch(self, table: BlockTable) -> Request:
        """A beam of its group: the same request, over other ids."""
        branch = Request(
            frontend_id=self.frontend_id,
            request_id=self.request_id,
            table=table,
            num_prompt_tokens=self.num_prompt_tokens,
            sampling=self.sampling,
            max_model_len=self.max_num_tokens,
            priority=self.priority,
            tenant=self.tenant,
            arrived_at=self.arrived_at,
            adapter=self.adapter,
        )
        branch.group = self.group
        branch.arrival_index = self.arrival_index
        branch.admission_index = self.admission_index
        return branch

    def restart(self, table: BlockTable) -> None:
        """Goes on as another sequence, of which nothing is computed. Holds no row."""
        assert self.row == -1, self
        self.table = table
        self.token_ids = table.token_ids
        self.num_computed_tokens = 0

    def trade_places(self, other: Request) -> None:
        """Two that run go on as each other's sequence, row and blocks."""
        self.table, other.table = other.table, self.table
        self.token_ids, other.token_ids = other.token_ids, self.token_ids
        self.row, other.row = other.row, self.row
        mine = self.num_computed_tokens
        self.num_computed_tokens, other.num_computed_tokens = other.num_computed_tokens, mine

    def end_prefill(self, now: float) -> None:
        """The prompt is computed, and no output is wanted."""
        self.first_token_at = self.last_token_at = now

    def timings(self, now: float) -> Timings:
        """Seconds in the queue, in prefill (to the first token) and in decode.

        A phase that was never entered is 0; one that was cut short ends now.
        Time lost to preemption counts in the phase that it interrupted.
        """
        if self.first_scheduled_at is None:
            return Timings(queue=now - self.arrived_at, prefill=0.0, decode=0.0)
        queue = self.first_scheduled_at - self.arrived_at
        if self.first_token_at is None or self.last_token_at is None:
            return Timings(queue=queue, prefill=now - self.first_scheduled_at, decode=0.0)
        return Timings(
            queue=queue,
            prefill=self.first_token_at - self.first_scheduled_at,
            decode=self.last_token_at - self.first_token_at,
        )

    def __repr__(self) -> str:
        return (
            f"Request({self.request_id} of frontend {self.frontend_id}, {self.status.value}, "
            f"{self.num_computed_tokens} computed of {self.num_tokens}, "
            f"{self.num_prompt_tokens} prompt)"
        )
