"""What walks over ZeroMQ between a frontend and the engine core.

Structs are msgpack arrays: fields are only ever appended, with defaults. Token
ids travel as little-endian int32 bytes, internal ids as little-endian uint64.
The framing is in codec.py. Commands go DEALER (frontend) -> ROUTER (engine);
outputs go PUSH (engine) -> PULL (one per frontend, which binds it).
"""

from __future__ import annotations

import msgspec

from pagewire.types import SamplingParams

PROTOCOL_VERSION = 1


class Message(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Base of all messages."""


# Commands, from a frontend.


class Hello(Message, frozen=True):
    """Opens or reopens a session. Sent until Ready answers, and again when the
    engine's heartbeat is lost; the engine answers each with Ready."""

    protocol: int
    frontend_id: int
    """Random 64 bit, one per frontend process life."""
    outputs: str
    """The endpoint of the frontend's PULL socket, as the engine can reach it."""


class Add(Message, frozen=True):
    """Begins (or resumes) a request."""

    request_id: int
    """The frontend's internal id, never reused within its life."""
    epoch: int
    """The engine epoch this is meant for; another one answers ERROR."""
    token_ids: bytes
    """Prompt ids, then the output ids emitted so far. int32."""
    num_output_tokens: int
    """How many of token_ids are output; 0 for a new request."""
    sampling: SamplingParams
    deadline_ms: float | None = None
    """Remaining time when sent."""
    priority: int = 0
    cache_salt: str = ""
    tenant: str = ""
    skip_prefix_cache: bool = False
    sample_index: int = 0
    """Which of the sequences with this prompt and seed it is: each draws its own numbers."""
    leader_id: int | None = None
    """An earlier Add with the same prompt, whose blocks this one waits for and shares. One
    that is not (or no longer) there is as good as none."""
    adapter: str = ""
    """The name of the one that computes it; empty: the base model."""
    adapter_digest: bytes = b""
    """The content that goes with the name, where another would be wrong."""


class Abort(Message, frozen=True):
    """Idempotent. Each id that was running ends with one ABORT finish; an id
    that is unknown is answered in StepOutput.unknown_aborts."""

    request_ids: bytes
    """uint64."""


class Ping(Message, frozen=True):
    """Once a second. A frontend that stays silent for the engine's
    frontend_timeout loses its requests."""

    frontend_id: int


class ResetPrefixCache(Message, frozen=True):
    call_id: int


class LoadAdapter(Message, frozen=True):
    """Answered by AdapterReply; what is sent after it finds the adapter there."""

    call_id: int
    name: str
    path: str
    """Below the engine's --lora-dir."""
    digest: bytes = b""
    """The content that it must have; one that is loaded already, with it, is as good."""


class UnloadAdapter(Message, frozen=True):
    """Answered by AdapterReply. Requests that have it go on."""

    call_id: int
    name: str


# Outputs, from the engine.


class AdapterInfo(Message, frozen=True):
    """A low-rank adapter that requests may name."""

    name: str
    path: str
    """Its folder, as the engine was given it."""
    rank: int
    digest: bytes
    """Of its content."""
    is_static: bool = False
    """Loaded at the start, and again by every engine that is started so."""


class Ready(Message, frozen=True):
    """What the engine really has, learnt at start-up."""

    protocol: int
    epoch: int
    """Random 64 bit, one per engine process life."""
    model_name: str
    architecture: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    dtype: str
    """What is computed, for people: bfloat16, or bfloat16 with Q4_1+Q8_0 weights."""
    device: str
    num_blocks: int
    """Blocks that requests can hold: all but the null block."""
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    pid: int
    default_sampling: dict[str, float]
    """temperature, top_p, top_k, min_p and repetition_penalty from
    generation_config.json, those that are there."""
    adapters: tuple[AdapterInfo, ...] = ()
    """Those that are loaded."""
    max_loras: int = 0
    """How many can be loaded at the same time; 0: adapters are off."""


class Started(Message, frozen=True):
    """A request left the queue: sent once, with its first step's output."""

    request_id: int
    num_cached_tokens: int
    queue_s: float


class PositionLogprobs(Message, frozen=True):
    """Raw-model log probabilities at one position; token_id is -1 where nothing precedes it."""

    token_id: int
    logprob: float
    rank: int
    """1 is the likeliest."""
    top_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()


class RequestLogprobs(Message, frozen=True):
    """For a request that asked: rides on the output with the tokens it describes."""

    request_id: int
    output: tuple[PositionLogprobs, ...] = ()
    """One for each of the request's new ids in this output."""
    prompt: tuple[PositionLogprobs, ...] = ()
    """All prompt positions, once, with the first output token."""


class Beam(Message, frozen=True):
    """One of the sequences that a beam search found."""

    token_ids: bytes
    """int32, the whole output, with the EOS or stop token that ended it."""
    score: float
    reason: int
    """FinishReason: STOP or LENGTH."""
    stop_token_id: int | None = None
    logprobs: tuple[PositionLogprobs, ...] = ()
    """One for each of token_ids, if asked for."""


class Finished(Message, frozen=True):
    """A request's one terminal outcome."""

    request_id: int
    reason: int
    """FinishReason."""
    stop_token_id: int | None = None
    """The stop token or EOS that ended it (it is the last of the new ids)."""
    num_cached_tokens: int = 0
    queue_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    num_preemptions: int = 0
    error: str = ""
    """One sentence for reason ERROR, with no prompt text in it."""
    field: str = ""
    """The request's field that caused an ERROR which its sender can mend."""
    deadline_missed: bool = False
    """For reason ABORT: its deadline passed, or could not be met any more."""
    beams: tuple[Beam, ...] = ()
    """Of a request with sampling.beam: num_return of them, best first; no ids of it come
    in any StepOutput row."""


class StepStats(Message, frozen=True):
    """The engine's state after a step; totals count from the epoch's start."""

    num_running: int
    num_waiting: int
    num_blocks: int
    """Blocks that requests can hold: all but the null block."""
    num_free_blocks: int
    """Blocks that no request holds, cached or not."""
    num_batched_tokens: int
    """Tokens computed in this step."""
    step_s: float
    total_prompt_tokens: int
    total_output_tokens: int
    total_preemptions: int
    prefix_cache_queries: int
    """Prompt tokens looked up."""
    prefix_cache_hits: int
    """Prompt tokens found."""
    abort_to_free_s: tuple[float, ...] = ()
    """For aborts applied since the last output: from receipt to blocks freed."""
    host_cache_queries: int = 0
    """Prompt tokens that the device's cache did not have, looked up on the host."""
    host_cache_hits: int = 0
    """Prompt tokens restored from there."""
    num_host_blocks: int = 0
    """Of the second tier; 0 where there is none."""
    num_used_host_blocks: int = 0
    total_offloaded_blocks: int = 0
    total_restored_blocks: int = 0
    num_free_cached_blocks: int = 0
    """Of num_free_blocks: those whose content a prompt can hit."""
    total_drafts: int = 0
    """Guesses, of one or more draft tokens, that were verified."""
    total_draft_tokens: int = 0
    total_accepted_tokens: int = 0
    """Draft tokens that were right."""
    total_accepted_per_position: tuple[int, ...] = ()
    """The same by their place in the guess."""
    max_mixed_prefill_tokens: int = 0
    """Most prompt tokens of a step with decodes, as things are; 0 is no limit."""


class StepOutput(Message, frozen=True):
    """One engine step, for one frontend. Row i has counts[i] of token_ids."""

    epoch: int
    step: int
    sent_ns: int
    """CLOCK_MONOTONIC at send; comparable on one host only."""
    request_ids: bytes
    """uint64 [R]."""
    counts: bytes
    """uint16 [R]."""
    token_ids: bytes
    """int32 [sum of counts]."""
    started: tuple[Started, ...]
    finished: tuple[Finished, ...]
    unknown_aborts: tuple[int, ...]
    stats: StepStats
    logprobs: tuple[RequestLogprobs, ...] = ()


class Heartbeat(Message, frozen=True):
    """Every second, from a thread, with the loop's own step counter: a counter
    that stands still while num_running > 0 is a hang."""

    epoch: int
    step: int
    sent_ns: int
    stats: StepStats


SHUTDOWN = "shutdown"
"""Dead.reason of an engine that was asked to end."""


class Dead(Message, frozen=True):
    """The engine's last word: after a fatal error, or SHUTDOWN."""

    epoch: int
    reason: str


class ResetPrefixCacheReply(Message, frozen=True):
    call_id: int
    num_blocks_freed: int


class AdapterReply(Message, frozen=True):
    call_id: int
    code: str = ""
    """Of the class in pagewire/errors.py where it was refused."""
    error: str = ""
    field: str = ""
    """Of the call, that is at fault."""


class AdapterList(Message, frozen=True):
    """To every frontend, when what is loaded has changed, and before the reply to who has
    changed it."""

    epoch: int
    adapters: tuple[AdapterInfo, ...]


Command = Hello | Add | Abort | Ping | ResetPrefixCache | LoadAdapter | UnloadAdapter
Output = Ready | StepOutput | Heartbeat | Dead | ResetPrefixCacheReply | AdapterReply | AdapterList
