"""What rank 0 sends the others: how to start, then one plan for each step.

A worker draws nothing, so of a request's parameters it gets only whether the logits of
prompt tokens are wanted, which all ranks compute together. Frames are msgpack behind their
length (4 bytes, little-endian), through a pipe that nobody else has an end of.
"""

from __future__ import annotations

import struct
from typing import IO

import msgspec

from engine_core.sched.plan import BlockMoves, NewSeq, SeqStep, StepPlan
from pagewire.types import SamplingParams
from pagewire.wire.codec import pack_ids, unpack_ids

_LENGTH = struct.Struct("<I")
_DRAWS_NOTHING = SamplingParams(max_tokens=1, temperature=0.0)
_SHOWS_PROMPT = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)


class Start(msgspec.Struct, frozen=True, array_like=True):
    config: bytes
    """An EngineConfig as JSON."""
    rank: int
    store: int
    """The file descriptor, inherited, of the file by which ranks find each other."""
    parent_pid: int


class _New(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A NewSeq but for what only shapes the draw."""

    row: int
    token_ids: bytes
    num_prompt_tokens: int
    prompt_logprobs_from: int | None
    block_ids: tuple[int, ...]


class _Plan(msgspec.Struct, frozen=True, array_like=True, gc=False):
    step: int
    freed_rows: tuple[int, ...]
    new_seqs: tuple[_New, ...]
    seqs: tuple[SeqStep, ...]
    offload: tuple[tuple[int, int], ...]
    restore: tuple[tuple[int, int], ...]
    copy: tuple[tuple[int, int], ...]
    chosen: tuple[tuple[int, int], ...]
    has_drafts: bool


_encoder = msgspec.msgpack.Encoder()
_start_decoder = msgspec.msgpack.Decoder(Start)
_plan_decoder = msgspec.msgpack.Decoder(_Plan)


def encode_start(start: Start) -> bytes:
    return _encoder.encode(start)


def decode_start(frame: bytes) -> Start:
    """Raises msgspec.DecodeError."""
    return _start_decoder.decode(frame)


def encode_plan(plan: StepPlan) -> bytes:
    return _encoder.encode(
        _Plan(
            plan.step,
            plan.freed_rows,
            tuple(
                _New(
                    new.row,
                    pack_ids(new.token_ids),
                    new.num_prompt_tokens,
                    new.prompt_logprobs_from,
                    new.block_ids,
                )
                for new in plan.new_seqs
            ),
            plan.seqs,
            plan.moves.offload,
            plan.moves.restore,
            plan.moves.copy,
            plan.chosen,
            plan.has_drafts,
        )
    )


def decode_plan(frame: bytes) -> StepPlan:
    """Raises msgspec.DecodeError."""
    plan = _plan_decoder.decode(frame)
    return StepPlan(
        plan.step,
        plan.freed_rows,
        tuple(
            NewSeq(
                new.row,
                tuple(unpack_ids(new.token_ids)),
                new.num_prompt_tokens,
                _DRAWS_NOTHING if new.prompt_logprobs_from is None else _SHOWS_PROMPT,
                prompt_logprobs_from=new.prompt_logprobs_from,
                block_ids=new.block_ids,
            )
            for new in plan.new_seqs
        ),
        plan.seqs,
        BlockMoves(plan.offload, plan.restore, plan.copy),
        plan.chosen,
        plan.has_drafts,
    )


def write_frame(pipe: IO[bytes], frame: bytes) -> None:
    """Raises OSError where the reader is gone."""
    pipe.write(_LENGTH.pack(len(frame)) + frame)
    pipe.flush()


def read_frame(pipe: IO[bytes]) -> bytes | None:
    """None once the writer is gone."""
    head = pipe.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        return None
    (length,) = _LENGTH.unpack(head)
    frame = pipe.read(length)
    return frame if len(frame) == length else None
