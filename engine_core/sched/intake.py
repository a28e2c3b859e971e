"""From an Add off the wire to a Request, or the sentence that refuses it."""

from __future__ import annotations

import logging
import math
from array import array
from collections.abc import Callable
from typing import TYPE_CHECKING

from engine_core.request import Request
from engine_core.sched.beam_intake import find_beam_fault, find_beam_room_fault, make_group
from engine_core.sched.logits_params import find_fault
from engine_core.sched.logprobs import PromptLogprobs
from engine_core.sched.structured_output import find_constraint_fault
from pagewire.errors import ModelLoadError
from pagewire.types import MAX_LOGPROBS, MAX_TENANT_CHARS, SamplingParams
from pagewire.wire.codec import unpack_ids

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine_core.kv.manager import KVManager
    from engine_core.lora.adapters import Adapter, Adapters
    from engine_core.sched.limits import SchedulerLimits
    from pagewire.wire.messages import Add

_log = logging.getLogger(__name__)

_BEAM_FIELD = "sampling_params.beam_search"
_UINT64 = range(2**64)
_INT31 = range(2**31)


FindUnsupported = Callable[[SamplingParams], tuple[str, str] | None]
"""(field as the API names it, a sentence) of what the runner cannot do, or None."""


class Refused(Exception):
    """An Add that cannot be served. The message is one sentence with the field
    and its figures, and holds no prompt ids."""

    def __init__(self, message: str, field: str = "") -> None:
        """field: what its sender can mend, as the API names it."""
        super().__init__(message)
        self.field = field


def no_token_bytes() -> Sequence[bytes]:
    """For an engine that knows no tokens. Raises ModelLoadError."""
    raise ModelLoadError("this engine has no vocabulary")


def all_is_supported(_sampling: SamplingParams) -> None:
    """For a runner that does whatever the API offers."""


def read_add(
    frontend_id: int,
    add: Add,
    received_at: float,
    *,
    limits: SchedulerLimits,
    kv_manager: KVManager,
    token_bytes: Callable[[], Sequence[bytes]] = no_token_bytes,
    find_unsupported: FindUnsupported = all_is_supported,
    adapters: Adapters | None = None,
) -> Request:
    """Validates wholly before anything is taken. Raises Refused.

    The frontend has checked most of this already; a request that came past
    those checks must still not be able to hurt the others.
    """
    _check_sampling(add.sampling, limits.vocab_size)
    unsupported = find_unsupported(add.sampling)
    if unsupported is not None:
        field, sentence = unsupported
        raise Refused(sentence, field)
    fault = find_constraint_fault(add.sampling, limits.eos_token_ids)
    if fault is not None:
        raise Refused(fault)
    fault = find_beam_fault(add.sampling, limits)
    if fault is not None:
        raise Refused(fault, _BEAM_FIELD)
    adapter = _find_adapter(add, adapters)
    _check_tenant(add.tenant)
    if add.sample_index not in _INT31:
        raise Refused(f"sample_index is {add.sample_index}, must be from 0 to {_INT31[-1]}")
    try:
        token_ids = array("i", unpack_ids(add.token_ids))
    except ValueError as error:
        raise Refused(f"token_ids: {error}") from error
    num_prompt_tokens = _check_ids(add, token_ids, limits)
    _check_room(num_prompt_tokens, add.sampling.max_tokens, limits, kv_manager)
    # A replay brings output of an earlier engine, which has told the prompt's with it.
    wants_prompt = add.sampling.prompt_logprobs is not None and add.num_output_tokens == 0
    request = Request(
        frontend_id=frontend_id,
        request_id=add.request_id,
        table=kv_manager.new_table(
            token_ids,
            add.cache_salt,
            adapter=b"" if adapter is None else adapter.digest,
            # A hit has no logits.
            reads_cache=not (add.skip_prefix_cache or wants_prompt),
            writes_cache=not add.skip_prefix_cache,
        ),
        num_prompt_tokens=num_prompt_tokens,
        sampling=add.sampling if add.sampling.max_tokens else _prompt_only(add.sampling),
        max_model_len=limits.max_model_len,
        sample_index=add.sample_index,
        eos_token_ids=limits.eos_token_ids,
        priority=add.priority,
        tenant=add.tenant,
        arrived_at=received_at,
        deadline_at=_deadline_at(add.deadline_ms, received_at),
        adapter=adapter,
    )
    if wants_prompt:
        request.prompt_logprobs = PromptLogprobs()
    if add.sampling.beam is not None:
        _make_group(request, add, limits, kv_manager, token_bytes)
    return request


def _find_adapter(add: Add, adapters: Adapters | None) -> Adapter | None:
    if not add.adapter:
        return None
    adapter = None if adapters is None else adapters.find(add.adapter)
    if adapter is None:
        raise Refused(f"model {add.adapter!r} does not exist", "model")
    if add.adapter_digest and add.adapter_digest != adapter.digest:
        raise Refused(f"model {add.adapter!r} is another one than it was", "model")
    return adapter


def _make_group(
    request: Request,
    add: Add,
    limits: SchedulerLimits,
    kv_manager: KVManager,
    token_bytes: Callable[[], Sequence[bytes]],
) -> None:
    beam = add.sampling.beam
    assert beam is not None
    if add.num_output_tokens or add.leader_id is not None:
        raise Refused("a beam search is neither resumed nor one of several sequences", _BEAM_FIELD)
    num_kv_tokens = request.max_num_tokens - 1
    fault = find_beam_room_fault(request.num_prompt_tokens, num_kv_tokens, beam, kv_manager)
    if fault is not None:
        raise Refused(fault, _BEAM_FIELD)
    try:
        make_group(request, beam, limits, kv_manager, add.cache_salt, token_bytes)
    except ModelLoadError as error:
        # It names files, which are nobody's business outside.
        _log.warning("a beam search with stop strings is refused: %s", error)
        raise Refused(
            "the model's tokens do not stand for fixed bytes, in which a beam search could look "
            "for stop strings",
            "sampling_params.stop",
        ) from error


def _prompt_only(sampling: SamplingParams) -> SamplingParams:
    """Without what is for an output: no constraint is compiled for it, no ban can leave it
    nothing to draw, and the token that is drawn has no logprob to tell."""
    return SamplingParams(max_tokens=0, prompt_logprobs=sampling.prompt_logprobs)


def _check_ids(add: Add, token_ids: array[int], limits: SchedulerLimits) -> int:
    """Returns the number of prompt tokens."""
    num_tokens = len(token_ids)
    if not num_tokens:
        raise Refused("token_ids is empty")
    lowest, highest = min(token_ids), max(token_ids)
    if lowest < 0 or highest >= limits.vocab_size:
        wrong = lowest if lowest < 0 else highest
        raise Refused(f"token_ids holds {wrong}, outside the vocabulary of {limits.vocab_size}")
    if num_tokens >= limits.max_model_len:
        raise Refused(
            f"token_ids has {num_tokens} ids, which leaves no room for output "
            f"in max_model_len {limits.max_model_len}"
        )
    if not 0 <= add.num_output_tokens < num_tokens:
        raise Refused(
            f"num_output_tokens is {add.num_output_tokens}, "
            f"but token_ids has {num_tokens} ids with at least one of the prompt"
        )
    if add.num_output_tokens >= max(1, add.sampling.max_tokens):
        raise Refused(
            f"num_output_tokens is {add.num_output_tokens}, "
            f"so max_tokens {add.sampling.max_tokens} has been reached already"
        )
    return num_tokens - add.num_output_tokens


def _check_room(
    num_prompt_tokens: int, max_tokens: int, limits: SchedulerLimits, kv_manager: KVManager
) -> None:
    """That the request fits the KV cache when it has all of it to itself."""
    # The last token of all is drawn but never computed: it needs no KV.
    num_kv_tokens = min(num_prompt_tokens + max(1, max_tokens), limits.max_model_len) - 1
    if num_kv_tokens > kv_manager.max_tokens:
        raise Refused(
            f"{num_prompt_tokens} prompt tokens with max_tokens {max_tokens} need KV for "
            f"{num_kv_tokens} tokens, but the whole KV cache holds {kv_manager.max_tokens} "
            f"({kv_manager.num_usable_blocks} blocks of {kv_manager.block_size})"
        )


def _check_sampling(sampling: SamplingParams, vocab_size: int) -> None:
    # Written so that NaN fails every comparison.
    least = 0 if sampling.beam is None else 1
    if sampling.max_tokens < least:
        raise Refused(f"max_tokens is {sampling.max_tokens}, must be at least {least}")
    if not 0 <= sampling.temperature < math.inf:
        raise Refused(f"temperature is {sampling.temperature}, must be finite and at least 0")
    if not 0 < sampling.top_p <= 1:
        raise Refused(f"top_p is {sampling.top_p}, must be above 0 and at most 1")
    if sampling.top_k < 0:
        raise Refused(f"top_k is {sampling.top_k}, must be at least 0")
    if not 0 <= sampling.min_p <= 1:
        raise Refused(f"min_p is {sampling.min_p}, must be from 0 to 1")
    if sampling.seed not in _UINT64:
        raise Refused(f"seed is {sampling.seed}, must be an unsigned 64-bit number")
    for name in ("logprobs", "prompt_logprobs"):
        count = getattr(sampling, name)
        if count is not None and not 0 <= count <= MAX_LOGPROBS:
            raise Refused(f"{name} is {count}, must be from 0 to {MAX_LOGPROBS}")
    fault = find_fault(sampling, vocab_size)
    if fault is not None:
        raise Refused(fault)


def _check_tenant(tenant: str) -> None:
    # The name outlives the request, and there may be many.
    if len(tenant) > MAX_TENANT_CHARS:
        raise Refused(
            f"tenant has {len(tenant)} characters, at most {MAX_TENANT_CHARS} are allowed"
        )


def _deadline_at(deadline_ms: float | None, received_at: float) -> float | None:
    if deadline_ms is None:
        return None
    if math.isnan(deadline_ms):
        raise Refused("deadline_ms is not a number")
    return received_at + deadline_ms / 1000.0
