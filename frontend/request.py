"""A request as the frontend sees it: what the caller asked, and its whole life.

GenerateCall is the caller's message in plain values, nothing checked. Job is
the same after validation. RequestState is the truth of a running request: it
holds enough to start it again on another engine or another tokenizer worker.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TYPE_CHECKING, Any, Literal

from frontend.logprobs import LogprobsRecord
from frontend.output_text import OutputText
from frontend.tool_plan import ToolPlan
from pagewire.types import FinishReason

if TYPE_CHECKING:
    import asyncio

    from frontend.admission import Reservation
    from frontend.engine_link import EngineLink
    from frontend.prompt import ReadPrompt
    from frontend.request_trace import RequestTrace
    from frontend.stream import Outbox, SequenceEnd
    from frontend.tenant_limits import TenantShare
    from pagewire.errors import PagewireError
    from pagewire.tools import Tool, ToolCall
    from pagewire.types import ConstraintKind, EarlyStopping, SamplingParams
    from pagewire.wire.messages import AdapterInfo


@dataclass(frozen=True, slots=True)
class TextPrompt:
    text: str
    add_special_tokens: bool = True
    field = "prompt"


@dataclass(frozen=True, slots=True)
class ChatMessage:
    role: str
    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    name: str | None = None


@dataclass(frozen=True, slots=True)
class ToolChoiceCall:
    kind: Literal["auto", "none", "required", "name"] | None
    """None where none is set."""
    name: str = ""
    flag: bool = True
    """What the others than name are set to."""


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    messages: tuple[ChatMessage, ...]
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    template_kwargs: dict[str, Any] | None = None
    """JSON values."""
    tools: tuple[Tool, ...] = ()
    tool_choice: ToolChoiceCall | None = None
    field = "chat"


@dataclass(frozen=True, slots=True)
class IdsPrompt:
    ids: list[int]
    field = "prompt_token_ids"


Prompt = TextPrompt | ChatPrompt | IdsPrompt


@dataclass(frozen=True, slots=True)
class StructuredOutputCall:
    kind: ConstraintKind | None
    """None where none is set; the other fields are of their own kinds."""
    text: str = ""
    choices: tuple[str, ...] = ()
    json_object: bool = False


@dataclass(frozen=True, slots=True)
class BeamSearchCall:
    beam_width: int
    length_penalty: float = 1.0
    early_stopping: EarlyStopping = "false"


@dataclass(frozen=True, slots=True)
class SamplingCall:
    """Sampling as the caller sent it; None where a field is absent."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    min_tokens: int = 0
    repetition_penalty: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    bad_words: tuple[str, ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    n: int = 1
    best_of: int | None = None
    structured_output: StructuredOutputCall | None = None
    spaces_between_special_tokens: bool = True
    truncate_prompt_tokens: int | None = None
    beam_search: BeamSearchCall | None = None


class WhenLost(Enum):
    """What becomes of a resumable request while nobody reads it."""

    RUN_ON = auto()
    PAUSE = auto()
    """It gives up its place at the engine."""


@dataclass(frozen=True, slots=True)
class Received:
    """How much of a sequence a client has; one of the counts is None."""

    index: int
    num_tokens: int | None
    num_chars: int | None


@dataclass(frozen=True, slots=True)
class ResumeCall:
    """A client that comes back, nothing checked."""

    request_id: str
    received: tuple[Received, ...]


@dataclass(frozen=True, slots=True)
class GenerateCall:
    """The caller's message, nothing checked."""

    prompt: Prompt | None
    sampling: SamplingCall = field(default_factory=SamplingCall)
    request_id: str | None = None
    model: str | None = None
    priority: int = 0
    cache_salt: str = ""
    tenant: str | None = None
    skip_prefix_cache: bool = False
    return_token_ids: bool = False
    echo: bool = False
    resumable: WhenLost | None = None
    report_queue: bool = False
    streams: bool = False
    """Whether the output is wanted as it is made."""


@dataclass(frozen=True, slots=True)
class Job:
    """A validated call. Only the length of a text prompt is still unknown."""

    request_id: str
    model: str
    prompt: Prompt
    sampling: SamplingParams
    """max_tokens in it is 0 until the prompt's length is known."""
    max_tokens: int | None
    """What the caller asked for; None fills the context."""
    stop: tuple[str, ...] = ()
    bad_words: tuple[str, ...] = ()
    """Whose ids are not in `sampling` yet."""
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    truncate_prompt_tokens: int | None = None
    echo: bool = False
    tools: ToolPlan = field(default_factory=ToolPlan)
    priority: int = 0
    cache_salt: str = ""
    tenant: str = ""
    skip_prefix_cache: bool = False
    return_token_ids: bool = False
    resumable: WhenLost | None = None
    """None: it ends with its connection."""
    report_queue: bool = False
    n: int = 1
    """Sequences to return."""
    best_of: int = 1
    """Sequences to draw."""
    adapter: AdapterInfo | None = None
    """What `model` names, where it is not the base model."""


@dataclass(slots=True, eq=False)
class RequestState:
    """One request from admission to its outcome, or one of its n sequences
    (frontend/branches.py).

    output_ids, by three counters that only grow:

        0 ........ num_acked ........ num_sent ........ len(output_ids)
        | text is in the | with the        | came from the
        | outbox         | tokenizer       | engine
    """

    internal_id: int
    job: Job
    outbox: Outbox
    reservation: Reservation
    share: TenantShare
    arrived_at: float
    """Monotonic seconds, as are all times here."""
    deadline: float | None
    prompt_ids: list[int] = field(default_factory=list)
    echo: str = ""
    """The prompt's text, if its sequences begin with it."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """The job's, in token ids."""
    sampling: SamplingParams | None = None
    """Final: seed drawn, max_tokens fitted to the context."""
    index: int = 0
    """Which of the request's sequences it is; 0 stands for the request."""
    branches: tuple[RequestState, ...] = ()
    """All of the request's sequences; none where it is the only one."""
    end: SequenceEnd | None = None
    """How the sequence ended, once it has ended well."""
    output_ids: list[int] = field(default_factory=list)
    beam_score: float | None = None
    text: OutputText = field(default_factory=OutputText)
    logprobs: LogprobsRecord = field(default_factory=LogprobsRecord)

    tokenizing: asyncio.Future[ReadPrompt] | None = None
    """The wait for the prompt's ids, so that a cancel can end it."""
    error: PagewireError | None = None
    """Why it failed, once it has."""
    outcome: str = ""
    """stop, length, abort or error once it is settled."""
    trace_id: str | None = None
    """Of the trace in which it can be found; None where it is not recorded."""
    trace: RequestTrace | None = None
    """Its spans in the making, of the first sequence only; None where none are made."""

    # With the engine.
    link: EngineLink | None = None
    """The engine that has it, or had it last."""
    engine_id: int = 0
    """Its id in its present life at an engine; internal_id is the first, and names
    it to the tokenizer for good."""
    num_adds: int = 0
    """How many engines were given it, or one engine how often."""
    num_resent: int = 0
    """How many of output_ids went out with the last Add."""
    num_deaths: int = 0
    """See frontend/replay.py."""
    num_returns: int = 0
    """How often the same engine gave it back unasked."""
    submitted_at: float = 0.0
    """When the request was handed over; 0 before."""
    started: bool = False
    engine_finished: bool = False
    finish_reason: int = 0
    stop_token_id: int | None = None
    num_cached_tokens: int = 0
    queue_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    num_preemptions: int = 0
    first_token_at: float = 0.0
    last_token_at: float = 0.0

    # With the tokenizer.
    num_sent: int = 0
    num_acked: int = 0
    emitted_chars: int = 0
    opened_in: int = -1
    """Number of the message that carried its (last) OPEN; -1 before."""
    num_reopens: int = 0

    def measure(self) -> None:
        """Fills in the times that the engine could not tell: of a request that ended
        early, and of one that had several lives."""
        told = self.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)
        if self.first_token_at and not (told and self.num_adds == 1):
            in_engine = self.first_token_at - self.submitted_at
            self.prefill_s = max(0.0, in_engine - self.queue_s)
            self.decode_s = self.last_token_at - self.first_token_at

    def fail(self, error: PagewireError) -> None:
        """Ends the caller's wait with `error`, wherever it is."""
        if self.error is None:
            self.error = error
        self.outbox.fail(error)
        if self.tokenizing is not None:
            self.tokenizing.cancel()
