"""A request as the frontend sees it: what the caller asked, and its whole life.

GenerateCall is the caller's message in plain values, nothing checked. Job is
the same after validation. RequestState is the truth of a running request: it
holds enough to start it again on another engine or another tokenizer worker.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pagewire.types import FinishReason

if TYPE_CHECKING:
    import asyncio

    from frontend.admission import Reservation
    from frontend.stream import Outbox
    from pagewire.errors import PagewireError
    from pagewire.types import SamplingParams


@dataclass(frozen=True, slots=True)
class TextPrompt:
    text: str
    field = "prompt"


@dataclass(frozen=True, slots=True)
class ChatMessage:
    role: str
    content: str


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    messages: tuple[ChatMessage, ...]
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    template_kwargs: dict[str, Any] | None = None
    """JSON values."""
    field = "chat"


@dataclass(frozen=True, slots=True)
class IdsPrompt:
    ids: list[int]
    field = "prompt_token_ids"


Prompt = TextPrompt | ChatPrompt | IdsPrompt


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


@dataclass(frozen=True, slots=True)
class GenerateCall:
    """The caller's message, nothing checked."""

    prompt: Prompt | None
    sampling: SamplingCall = field(default_factory=SamplingCall)
    request_id: str | None = None
    model: str | None = None
    priority: int = 0
    cache_salt: str = ""
    return_token_ids: bool = False


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
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    priority: int = 0
    cache_salt: str = ""
    return_token_ids: bool = False


@dataclass(slots=True, eq=False)
class RequestState:
    """One request from admission to its outcome.

    output_ids, by three counters that only grow:

        0 ........ num_acked ........ num_sent ........ len(output_ids)
        | text is in the | with the        | came from the
        | outbox         | tokenizer       | engine
    """

    internal_id: int
    job: Job
    outbox: Outbox
    reservation: Reservation
    arrived_at: float
    """Monotonic seconds, as are all times here."""
    deadline: float | None
    prompt_ids: list[int] = field(default_factory=list)
    sampling: SamplingParams | None = None
    """Final: seed drawn, max_tokens fitted to the context."""
    output_ids: list[int] = field(default_factory=list)

    tokenizing: asyncio.Future[list[int]] | None = None
    """The wait for the prompt's ids, so that a cancel can end it."""
    error: PagewireError | None = None
    """Why it failed, once it has."""
    outcome: str = ""
    """stop, length, abort or error once it is settled."""

    # With the engine.
    submitted_at: float = 0.0
    """When Add was sent; 0 before."""
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
        """Fills in the times of a request that ended before the engine could tell them."""
        told = (FinishReason.STOP, FinishReason.LENGTH)
        if self.first_token_at and self.finish_reason not in told:
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
