"""The engine's own check of a beam search, and what makes its group."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from engine_core.sched.beam import BeamSearch
from engine_core.sched.beam_group import BeamGroup
from pagewire.types import MAX_BEAM_WIDTH

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from engine_core.kv.manager import KVManager
    from engine_core.request import Request
    from engine_core.sched.limits import SchedulerLimits
    from pagewire.types import BeamParams, SamplingParams

MAX_LENGTH_PENALTY = 10.0
"""In either direction, so that a length to its power is a float."""
_EARLY_STOPPING = ("true", "false", "never")
# Nothing but the likeliest tokens of the model's own distribution is searched.
_PLAIN = {
    "min_tokens": 0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "logit_bias": (),
    "bad_words": (),
    "allowed_token_ids": None,
    "prompt_logprobs": None,
    "structured_output": None,
}


def find_beam_fault(sampling: SamplingParams, limits: SchedulerLimits) -> str | None:
    """What could hurt the engine, as a sentence; None if all is well."""
    beam = sampling.beam
    if beam is None:
        return None
    most = min(
        MAX_BEAM_WIDTH, limits.max_num_seqs, limits.max_num_batched_tokens, limits.vocab_size
    )
    if not 1 <= beam.width <= most:
        return (
            f"the beam width is {beam.width}, must be from 1 to {most}: at most {MAX_BEAM_WIDTH}, "
            f"max_num_seqs {limits.max_num_seqs} and max_num_batched_tokens "
            f"{limits.max_num_batched_tokens}"
        )
    if not 1 <= beam.num_return <= beam.width:
        return f"num_return is {beam.num_return}, must be from 1 to the beam width {beam.width}"
    # NaN fails the comparison.
    if not abs(beam.length_penalty) <= MAX_LENGTH_PENALTY:
        return (
            f"length_penalty is {beam.length_penalty}, must be from {-MAX_LENGTH_PENALTY:g} to "
            f"{MAX_LENGTH_PENALTY:g}"
        )
    if beam.early_stopping not in _EARLY_STOPPING:
        return f"early_stopping is {beam.early_stopping}, must be one of {_EARLY_STOPPING}"
    if not all(beam.stop):
        return "stop holds an empty string"
    for name, plain in _PLAIN.items():
        if getattr(sampling, name) != plain:
            return f"a beam search excludes {name}"
    return None


def num_beam_blocks(num_prompt_tokens: int, num_kv_tokens: int, width: int, block_size: int) -> int:
    """Blocks that a search holds at most: the prompt's full ones once, the rest by beam."""
    num_shared = num_prompt_tokens // block_size
    return num_shared + width * (math.ceil(num_kv_tokens / block_size) - num_shared)


def find_beam_room_fault(
    num_prompt_tokens: int, num_kv_tokens: int, beam: BeamParams, kv_manager: KVManager
) -> str | None:
    """That the search fits the KV cache when it has all of it to itself, as a sentence if not."""
    needed = num_beam_blocks(num_prompt_tokens, num_kv_tokens, beam.width, kv_manager.block_size)
    if needed <= kv_manager.num_usable_blocks:
        return None
    return (
        f"{beam.width} beams of {num_kv_tokens} tokens, the first {num_prompt_tokens} shared, need "
        f"{needed} KV blocks of {kv_manager.block_size}, but the whole KV cache has "
        f"{kv_manager.num_usable_blocks}"
    )


def make_group(
    leader: Request,
    params: BeamParams,
    limits: SchedulerLimits,
    kv_manager: KVManager,
    cache_salt: str,
    token_bytes: Callable[[], Sequence[bytes]],
) -> None:
    """Makes the leader one. Raises what token_bytes raises, which is called where there
    are stop strings."""
    table = leader.table
    sampling = leader.sampling
    search = BeamSearch(
        params,
        max_tokens=leader.max_num_tokens - leader.num_prompt_tokens,
        stop_ids=leader.stop_ids,
        vocab_size=limits.vocab_size,
        logprobs=sampling.logprobs,
        token_bytes=token_bytes() if params.stop else (),
    )
    # What the runner draws does not matter: the likeliest tokens are all that is asked of it.
    leader.sampling = msgspec.structs.replace(
        sampling, temperature=0.0, logprobs=search.num_candidates
    )
    new_table = partial(
        kv_manager.new_table,
        cache_salt=cache_salt,
        adapter=b"" if leader.adapter is None else leader.adapter.digest,
        reads_cache=table.reads_cache,
        writes_cache=table.writes_cache,
    )
    leader.group = BeamGroup(leader, search, new_table)
