"""A step with no sequences behind it: to warm up, and to measure the largest step's memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from engine_core.model.inputs import ModelInput
from engine_core.runner.logprobs import sliced_report
from engine_core.runner.per_row import token_lists
from kernels.ops import AttentionBatch, PenaltyBatch, SamplingBatch
from pagewire.types import MAX_LOGPROBS

if TYPE_CHECKING:
    from engine_core.model.decoder import DecoderModel
    from engine_core.model.inputs import KVCaches
    from kernels.ops import Ops


@torch.inference_mode()
def run_dummy_step(
    model: DecoderModel,
    ops: Ops,
    kv_caches: KVCaches,
    num_tokens: int,
    num_seqs: int,
    max_model_len: int,
) -> None:
    """Computes num_tokens spread over num_seqs sequences, or over more where none can be so
    long, and samples for each.

    Every block is the null block and nothing is written to the cache, so one
    block of cache is enough.
    """
    device = kv_caches[0].k.device
    block_size = kv_caches[0].k.shape[1]
    num_seqs = min(max(num_seqs, -(-num_tokens // max_model_len)), num_tokens)
    share, longer = divmod(num_tokens, num_seqs)
    # Decodes come first in a batch, so the longer sequences come last.
    lens = torch.tensor([share] * (num_seqs - longer) + [share + 1] * longer, dtype=torch.int32)
    starts = torch.zeros(num_seqs + 1, dtype=torch.int32)
    starts[1:] = lens.cumsum(0)
    max_len = int(lens[-1])
    positions = torch.cat([torch.arange(length) for length in lens.tolist()])
    attention = AttentionBatch(
        query_start_loc=starts.to(device),
        seq_lens=lens.to(device),
        block_table=torch.zeros(
            num_seqs, -(-max_len // block_size), dtype=torch.int32, device=device
        ),
        num_decodes=num_seqs - longer if share == 1 else 0,
        max_query_len=max_len,
        max_seq_len=max_len,
        query_start_loc_host=starts,
        seq_lens_host=lens,
    )
    inputs = ModelInput(
        input_ids=torch.zeros(num_tokens, dtype=torch.int64, device=device),
        positions=positions.to(device),
        slot_mapping=torch.full((num_tokens,), -1, dtype=torch.int64, device=device),
        attention=attention,
        sampling_tokens=(starts[1:].long() - 1).to(device),
    )
    logits = model.forward(inputs, kv_caches)
    assert logits is not None
    raw = logits.clone()  # as if every row wanted logprobs
    sampled = ops.sample(logits, _sampling_batch(num_seqs, device))
    # Penalties and masks work on a float32 copy.
    processed = logits.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
    known = token_lists([(at, np.zeros(1, np.int64)) for at in range(num_seqs)], device)
    ones = torch.ones(num_seqs, device=device)
    ops.add_logit_bias(processed, known, ones)
    ops.apply_penalties(processed, PenaltyBatch(known, ones, ones, ones, ones))
    ops.sample(processed, _sampling_batch(num_seqs, device))
    for top in (0, min(MAX_LOGPROBS, raw.shape[1])):
        sliced_report(ops, raw, sampled, top)


@torch.inference_mode()
def run_verifying_step(model: DecoderModel, ops: Ops, kv_caches: KVCaches, num_tokens: int) -> None:
    """Computes num_tokens of one sequence and draws after each, as verifying draft tokens
    does."""
    device = kv_caches[0].k.device
    block_size = kv_caches[0].k.shape[1]
    starts = torch.tensor([0, num_tokens], dtype=torch.int32)
    lens = torch.tensor([num_tokens], dtype=torch.int32)
    attention = AttentionBatch(
        query_start_loc=starts.to(device),
        seq_lens=lens.to(device),
        block_table=torch.zeros(1, -(-num_tokens // block_size), dtype=torch.int32, device=device),
        num_decodes=int(num_tokens == 1),
        max_query_len=num_tokens,
        max_seq_len=num_tokens,
        query_start_loc_host=starts,
        seq_lens_host=lens,
    )
    inputs = ModelInput(
        input_ids=torch.zeros(num_tokens, dtype=torch.int64, device=device),
        positions=torch.arange(num_tokens, device=device),
        slot_mapping=torch.full((num_tokens,), -1, dtype=torch.int64, device=device),
        attention=attention,
        sampling_tokens=None,
    )
    logits = model.forward(inputs, kv_caches)
    assert logits is not None
    ops.sample(logits, _sampling_batch(num_tokens, device))


def _sampling_batch(num: int, device: torch.device) -> SamplingBatch:
    """Every filter on, which is what takes most memory."""
    zeros = torch.zeros(num, dtype=torch.int64, device=device)
    return SamplingBatch(
        temperature=torch.ones(num, device=device),
        top_k=torch.full((num,), 50, dtype=torch.int32, device=device),
        top_p=torch.full((num,), 0.9, device=device),
        min_p=torch.full((num,), 0.01, device=device),
        seed=zeros,
        position=zeros,
        sample_index=zeros.int(),
        all_greedy=False,
        any_filter=True,
    )
