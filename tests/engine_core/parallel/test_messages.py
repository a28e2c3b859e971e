"""What crosses the pipe between ranks."""

from __future__ import annotations

import io
from dataclasses import fields

from engine_core.parallel.messages import (
    Start,
    decode_plan,
    decode_start,
    encode_plan,
    encode_start,
    read_frame,
    write_frame,
)
from engine_core.sched.plan import BlockMoves, NewSeq, SeqStep, StepPlan
from pagewire.types import SamplingParams


def test_a_plan_arrives_but_for_what_shapes_the_draw() -> None:
    asking = SamplingParams(
        max_tokens=9,
        temperature=0.7,
        repetition_penalty=1.3,
        bad_words=((5,),),
        logprobs=4,
        prompt_logprobs=3,
    )
    plan = StepPlan(
        step=12,
        freed_rows=(3, 1),
        new_seqs=(
            NewSeq(3, (5, 6, 7), 3, asking, prompt_logprobs_from=1, sample_index=2),
            NewSeq(1, (8,), 1, SamplingParams(max_tokens=2), block_ids=(4, 9)),
        ),
        seqs=(SeqStep(0, 30, 3, (7,), True, (4, 5)), SeqStep(3, 0, 3, (2,), False)),
        moves=BlockMoves(offload=((1, 2),), restore=((3, 4),), copy=((5, 6), (7, 8))),
        chosen=((0, 77),),
        has_drafts=True,
    )
    arrived = decode_plan(encode_plan(plan))
    assert (arrived.step, arrived.freed_rows, arrived.seqs) == (12, (3, 1), plan.seqs)
    assert (arrived.moves, arrived.chosen) == (plan.moves, plan.chosen)
    assert arrived.has_drafts
    first, second = arrived.new_seqs
    assert (first.row, first.token_ids, first.num_prompt_tokens) == (3, (5, 6, 7), 3)
    assert (first.prompt_logprobs_from, first.sampling.prompt_logprobs) == (1, 0)
    assert (second.block_ids, second.prompt_logprobs_from) == ((4, 9), None)
    for new in arrived.new_seqs:
        assert (new.sampling.temperature, new.sampling.logprobs) == (0.0, None)
        assert (new.sampling.repetition_penalty, new.sampling.bad_words) == (1.0, ())


def test_every_field_has_been_thought_of() -> None:
    """Who adds one carries it in messages.py, or it is of no concern to a rank that draws
    nothing; then it is named here."""
    carried = {
        StepPlan: "step freed_rows new_seqs seqs moves chosen has_drafts",
        BlockMoves: "offload restore copy",
        NewSeq: "row token_ids num_prompt_tokens prompt_logprobs_from block_ids",
    }
    # Adapters and draft models are refused with more than one rank.
    left_out = {
        NewSeq: "sampling grammar sample_index adapter_slot",
        StepPlan: "draft_steps",
    }
    for kind, names in carried.items():
        known = {*names.split(), *left_out.get(kind, "").split()}
        assert {field.name for field in fields(kind)} == known


def test_start() -> None:
    start = Start(b'{"model":"m"}', 3, 17, 4711)
    assert decode_start(encode_start(start)) == start


def test_frames_end_with_their_writer() -> None:
    pipe = io.BytesIO()
    for frame in (b"", b"x" * 70_000, b"y"):
        write_frame(pipe, frame)
    whole = pipe.getvalue()
    pipe.seek(0)
    assert [read_frame(pipe) for _ in range(4)] == [b"", b"x" * 70_000, b"y", None]
    for cut in (len(whole) - 1, len(whole) - 3):
        pipe = io.BytesIO(whole[:cut])
        assert [read_frame(pipe) for _ in range(3)] == [b"", b"x" * 70_000, None]
