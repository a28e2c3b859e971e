"""Embedding rows read out of the weight of a product, which is the table's only memory."""

from __future__ import annotations

import pytest
import torch

from kernels.inputs import Maker
from kernels.reference.ops import ReferenceOps
from kernels.shapes import ShapeError
from tests.support.cpu_kernels import BACKENDS, VARIANTS, best_cpu_ops, cpu_ops

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_BITS = {2: torch.int16, 4: torch.int32}
_VOCAB_SIZES = (1, 31, 64, 131)  # less than a panel of any width, whole ones, and a rest
_HIDDEN_SIZES = (1, 7, 64, 577)  # bfloat16 lies in pairs


@pytest.mark.parametrize("backend", VARIANTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_are_the_table_s_bit_for_bit(dtype: torch.dtype, backend: str) -> None:
    ops = cpu_ops(backend)
    for seed, (vocab_size, hidden) in enumerate(zip(_VOCAB_SIZES, _HIDDEN_SIZES, strict=True)):
        # Any bits: signed zeros, infinities, NaN and its payloads.
        size = (vocab_size, hidden * dtype.itemsize)
        generator = torch.Generator().manual_seed(seed)
        table = torch.randint(0, 256, size, dtype=torch.uint8, generator=generator).view(dtype)
        packed = ops.prepare_linear(table.clone())
        some = torch.randint(0, vocab_size, (40,), generator=generator)
        for ids in (torch.arange(vocab_size), some, some[:1], some[:0]):
            rows = ops.packed_embedding(ids, packed, dtype)
            bits = _BITS[dtype.itemsize]
            assert torch.equal(rows.view(bits), table[ids].view(bits))


@pytest.mark.parametrize("backend", ["reference", *BACKENDS])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_weight_is_embedding_and_head(dtype: torch.dtype, backend: str) -> None:
    ops = ReferenceOps() if backend == "reference" else cpu_ops(backend)
    table = Maker(dtype).normal(50, 33)
    both = ops.prepare_linear(table.clone())
    ids = torch.tensor([49, 0, 16, 16])
    x = ops.packed_embedding(ids, both, dtype)
    assert x.dtype == dtype and torch.equal(x, table[ids])
    logits = ops.linear(x, both)
    torch.testing.assert_close(logits.double(), x.double() @ table.double().T, rtol=2e-2, atol=1e-2)
    for stray in (-1, 50):
        with pytest.raises(IndexError):
            ops.packed_embedding(torch.tensor([3, stray]), both, dtype)


def test_ids_that_are_no_ids_are_refused() -> None:
    ops = best_cpu_ops()
    both = ops.prepare_linear(torch.ones(5, 4))
    with pytest.raises(IndexError, match="packed_embedding: id 7 of a table of 5"):
        ops.packed_embedding(torch.tensor([0, 7]), both, torch.float32)
    with pytest.raises(ShapeError, match="packed_embedding: input_ids"):
        ops.packed_embedding(torch.zeros(2, dtype=torch.int32), both, torch.float32)
