"""The reference against what others published or compute: it is the truth for all backends."""

from __future__ import annotations

import pytest
import torch
from transformers import (
    LlamaConfig,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.models.llama import modeling_llama

from kernels.inputs import Row, cos_sin_table, sampling_batch
from kernels.reference.ops import ReferenceOps
from kernels.reference.philox import philox4x32, uniform
from kernels.reference.rms_norm import rms_norm
from kernels.reference.rope import rotate
from kernels.reference.sample import kept_weights
from kernels.reference.silu_mul import silu_mul

ONES = 0xFFFFFFFF

# The known-answer vectors of the Random123 library's philox4x32-10.
KNOWN_ANSWERS = [
    ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    ([ONES] * 4, [ONES] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        [0xA4093822, 0x299F31D0],
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ),
]


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN_ANSWERS)
def test_philox_known_answers(counter: list[int], key: list[int], words: list[int]) -> None:
    assert philox4x32(torch.tensor(counter), torch.tensor(key)).tolist() == words


def test_uniform_takes_53_bits_of_the_first_two_words() -> None:
    seed = torch.tensor([0, -1])
    u = uniform(seed, torch.tensor([0, ONES]), torch.tensor([0, -1], dtype=torch.int32))
    assert u[0].item() == ((0x6627E8D5 << 21) | (0xE169C58D >> 11)) * 2.0**-53
    # Counter (ones, ones, 0, 0) is none of the vectors: computed with Python's own integers.
    expected = _philox_in_python([ONES, ONES, 0, 0], [ONES, ONES])
    assert u[1].item() == ((expected[0] << 21) | (expected[1] >> 11)) * 2.0**-53


def _philox_in_python(counter: list[int], key: list[int]) -> list[int]:
    for _ in range(10):
        a, b = 0xD2511F53 * counter[0], 0xCD9E8D57 * counter[2]
        counter = [
            (b >> 32) ^ counter[1] ^ key[0],
            b & ONES,
            (a >> 32) ^ counter[3] ^ key[1],
            a & ONES,
        ]
        key = [(key[0] + 0x9E3779B9) & ONES, (key[1] + 0xBB67AE85) & ONES]
    return counter


def test_uniform_is_in_range_and_flat() -> None:
    n = 20000
    u = uniform(torch.full((n,), 7), torch.arange(n), torch.zeros(n, dtype=torch.int32))
    assert u.min().item() >= 0 and u.max().item() < 1
    # Mean of n uniforms: 1/2 with a standard deviation of sqrt(1 / 12 / n); five of them.
    assert abs(u.mean().item() - 0.5) < 5 * (1 / 12 / n) ** 0.5
    assert u.unique().numel() == n


# Filters, as transformers applies them. Scores are float64 on both sides, so that only the
# rule decides, not the rounding.


def _kept_by_transformers(logits: torch.Tensor, row: Row) -> torch.Tensor:
    # The parameters pass through float32, as SamplingBatch holds them.
    top_p, min_p = torch.tensor([row.top_p, row.min_p]).tolist()
    ids = torch.zeros(1, 0, dtype=torch.long)
    scores = logits.unsqueeze(0)
    scores = TemperatureLogitsWarper(torch.tensor(row.temperature).item())(ids, scores)
    if row.top_k:
        scores = TopKLogitsWarper(row.top_k)(ids, scores)
    if top_p < 1:
        scores = TopPLogitsWarper(top_p)(ids, scores)
    if min_p > 0:
        scores = MinPLogitsWarper(min_p)(ids, scores)
    return scores.softmax(dim=-1).squeeze(0)


FILTERS = [
    Row(),
    Row(temperature=0.7),
    Row(top_k=1),
    Row(top_k=5),
    Row(top_k=10_000),
    Row(top_p=0.9),
    Row(top_p=0.5),
    Row(top_p=1e-6),
    Row(min_p=0.1),
    Row(min_p=1.0),
    Row(temperature=0.6, top_k=40, top_p=0.8),
    Row(temperature=1.7, top_k=20, top_p=0.95, min_p=0.02),
    Row(temperature=2.5, top_p=0.3, min_p=0.3),
]


@pytest.mark.parametrize("ties", [False, True], ids=["distinct", "ties"])
@pytest.mark.parametrize("row", FILTERS, ids=str)
def test_filters_agree_with_transformers(row: Row, ties: bool) -> None:
    generator = torch.Generator().manual_seed(3)
    for vocab_size in (2, 17, 300):
        logits = torch.randn(vocab_size, generator=generator).double() * 3
        if ties:
            logits = logits.round()
        kept = kept_weights(logits.unsqueeze(0), sampling_batch([row])).squeeze(0)
        expected = _kept_by_transformers(logits, row)
        if ties:
            # Which of some equal tokens top-p drops depends there on an unstable sort.
            kept, expected = kept.sort().values, expected.sort().values
        assert torch.equal(kept > 0, expected > 0)
        torch.testing.assert_close(kept / kept.sum(), expected, rtol=1e-12, atol=0)


def test_top_p_drops_the_lowest_ids_of_a_tie_first() -> None:
    logits = torch.tensor([[1.0, 0.0, 1.0, 1.0, 0.0, 1.0]], dtype=torch.float64)
    for top_p, dropped in [
        (0.95, []),
        (0.9, [1]),
        (0.8, [1, 4]),
        (0.6, [0, 1, 4]),
        (0.01, [0, 1, 2, 3, 4]),
    ]:
        kept = kept_weights(logits, sampling_batch([Row(top_p=top_p)]))
        assert (kept[0] == 0).nonzero().flatten().tolist() == dropped


def test_rows_with_different_filters_do_not_touch_each_other() -> None:
    generator = torch.Generator().manual_seed(4)
    logits = torch.randn(len(FILTERS), 50, generator=generator).double()
    together = kept_weights(logits, sampling_batch(FILTERS))
    for i, row in enumerate(FILTERS):
        alone = kept_weights(logits[i : i + 1], sampling_batch([row]))
        assert torch.equal(together[i : i + 1], alone)


def test_copies_are_made_all_at_the_same_time() -> None:
    caches = [torch.arange(5.0).view(5, 1, 1, 1) + 10 * kind for kind in range(2)]
    ReferenceOps().copy_blocks(*caches, torch.tensor([1, 3, 1]), torch.tensor([3, 1, 4]))
    assert [cache.flatten().tolist() for cache in caches] == [[0, 3, 2, 1, 1], [10, 13, 12, 11, 11]]


# The other ops, against the model code of transformers.


def test_rope_agrees_with_transformers() -> None:
    head_dim, tokens = 64, 37
    config = LlamaConfig(hidden_size=2 * head_dim, num_attention_heads=2, head_dim=head_dim)
    positions = torch.arange(100, 100 + tokens)
    q = torch.randn(tokens, 2, head_dim, generator=torch.Generator().manual_seed(5))
    cos, sin = modeling_llama.LlamaRotaryEmbedding(config)(q, positions.unsqueeze(0))
    expected, _ = modeling_llama.apply_rotary_pos_emb(
        q.transpose(0, 1), q.transpose(0, 1), cos, sin
    )
    table = cos_sin_table(200, head_dim)
    actual = rotate(q, positions, table)
    torch.testing.assert_close(actual, expected.squeeze(0).transpose(0, 1), rtol=0, atol=2e-5)


def test_norm_and_activation_agree_with_transformers() -> None:
    generator = torch.Generator().manual_seed(6)
    x = torch.randn(5, 48, generator=generator)
    norm = modeling_llama.LlamaRMSNorm(48, eps=1e-5)
    norm.weight.data = torch.randn(48, generator=generator)
    torch.testing.assert_close(rms_norm(x, norm.weight.data, 1e-5), norm(x).detach())
    gate, up = x.chunk(2, dim=-1)
    torch.testing.assert_close(silu_mul(x), torch.nn.functional.silu(gate) * up)
