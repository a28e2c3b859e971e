"""Beam search: what a request may ask of it, and what becomes of the beams.

To the engine a search is one sequence, of which nothing is heard until its end. Its beams
then become the request's sequences (frontend/branches.py), whole ones, best first, and
their text comes from the tokenizer like any other's.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from frontend.branches import branch_out
from frontend.output_text import OutputText
from pagewire.errors import InternalError, InvalidRequest
from pagewire.types import MAX_BEAM_WIDTH, BeamParams
from pagewire.wire.codec import unpack_ids
from pagewire.wire.messages import RequestLogprobs

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from frontend.request import RequestState, SamplingCall
    from pagewire.types import SamplingParams
    from pagewire.wire.messages import Beam, Ready

FIELD = "sampling_params.beam_search"
MAX_LENGTH_PENALTY = 10.0
# What draws, or changes the distribution that is searched, and the values that do neither.
_EXCLUDED: dict[str, tuple[object, ...]] = {
    "temperature": (None, 0),
    "top_p": (None, 1),
    "top_k": (None, 0, -1),
    "min_p": (None, 0),
    "best_of": (None,),
    "structured_output": (None,),
    "repetition_penalty": (None, 1),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "logit_bias": ((),),
    "bad_words": ((),),
    "allowed_token_ids": (None,),
    "min_tokens": (0,),
    "prompt_logprobs": (None,),
}


def beam_params(call: SamplingCall, *, with_tools: bool) -> BeamParams | None:
    """None where none is asked for. Raises InvalidRequest."""
    search = call.beam_search
    if search is None:
        return None
    if with_tools:
        raise InvalidRequest("chat.tools", "tools and beam_search exclude each other")
    for name, neutral in _EXCLUDED.items():
        if getattr(call, name) not in neutral:
            raise InvalidRequest(
                f"sampling_params.{name}", f"{name} and beam_search exclude each other"
            )
    width, penalty = search.beam_width, search.length_penalty
    if not 1 <= width <= MAX_BEAM_WIDTH:
        raise InvalidRequest(
            f"{FIELD}.beam_width", f"beam_width is {width}, must be from 1 to {MAX_BEAM_WIDTH}"
        )
    if not 1 <= call.n <= width:
        raise InvalidRequest(
            "sampling_params.n", f"n is {call.n}, must be from 1 to beam_width, which is {width}"
        )
    # NaN fails the comparison.
    if not abs(penalty) <= MAX_LENGTH_PENALTY:
        raise InvalidRequest(
            f"{FIELD}.length_penalty",
            f"length_penalty is {penalty:g}, must be in [-{MAX_LENGTH_PENALTY:g}, "
            f"{MAX_LENGTH_PENALTY:g}]",
        )
    if call.max_tokens == 0:
        raise InvalidRequest(
            "sampling_params.max_tokens", "max_tokens is 0, a beam search needs at least 1"
        )
    return BeamParams(width, call.n, penalty, search.early_stopping, call.stop)


def check_beam_room(sampling: SamplingParams, num_prompt_tokens: int, served: Ready) -> None:
    """That the engine can run the search alone. Raises InvalidRequest with the figures."""
    fault = find_room_fault(sampling, num_prompt_tokens, served)
    if fault is not None:
        raise fault


def find_room_fault(
    sampling: SamplingParams, num_prompt_tokens: int, served: Ready
) -> InvalidRequest | None:
    """Why the engine cannot run the search, even alone; None if it can, or if it is none."""
    if sampling.beam is None:
        return None
    width = sampling.beam.width
    rows = min(served.max_num_seqs, served.max_num_batched_tokens)
    if width > rows:
        return InvalidRequest(
            f"{FIELD}.beam_width",
            f"beam_width is {width}, and the engine runs {rows} sequences at once",
        )
    # The last token of all is chosen but never computed: it needs no KV.
    num_kv_tokens = min(num_prompt_tokens + sampling.max_tokens, served.max_model_len) - 1
    num_shared = num_prompt_tokens // served.block_size
    num_own = math.ceil(num_kv_tokens / served.block_size) - num_shared
    needed = num_shared + width * num_own
    if needed <= served.num_blocks:
        return None
    return InvalidRequest(
        "sampling_params.max_tokens",
        f"{width} beams of {num_prompt_tokens} prompt tokens with max_tokens "
        f"{sampling.max_tokens} need {needed} KV blocks of {served.block_size}, "
        f"and the engine has {served.num_blocks}",
    )


def take_beams(
    state: RequestState, beams: Sequence[Beam], next_id: Callable[[], int], now: float
) -> tuple[RequestState, ...]:
    """The search of `state` has ended well: makes its sequences, complete but for their
    text; returns all, `state` the first."""
    if len(beams) != state.job.n:
        state.error = InternalError(f"the engine found {len(beams)} beams, not {state.job.n}")
        return (state,)
    sequences = branch_out(state, next_id)
    for sequence, beam in zip(sequences, beams, strict=True):
        sequence.output_ids = unpack_ids(beam.token_ids)
        sequence.beam_score = beam.score
        sequence.text = OutputText(sequence.echo)
        sequence.finish_reason = beam.reason
        sequence.stop_token_id = beam.stop_token_id
        sequence.engine_finished = True
        sequence.first_token_at = sequence.last_token_at = now
        sequence.submitted_at = state.submitted_at
        sequence.num_adds = state.num_adds
        sequence.num_cached_tokens = state.num_cached_tokens
        sequence.queue_s = state.queue_s
        sequence.prefill_s = state.prefill_s
        sequence.decode_s = state.decode_s
        if beam.logprobs:
            sequence.logprobs.add(RequestLogprobs(state.engine_id, beam.logprobs))
    return sequences
