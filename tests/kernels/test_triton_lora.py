"""Adapters' kernels, interpreted on the CPU.

As test_triton_parity.py, this needs a process of its own.
"""

from __future__ import annotations

import os

import pytest
import torch

from kernels.inputs import Maker
from kernels.reference.ops import ReferenceOps
from kernels.shapes import ShapeError
from kernels.tolerances import assert_within_budget
from tests.kernels.test_lora import CPU, TOKENS, add, batch_of, parts_of

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1; run by test_triton_runs.py", allow_module_level=True)

from kernels.cuda.ops import CudaOps

pytestmark = pytest.mark.interpreter

DTYPES = [torch.float32, torch.float16]
# rows of the fused matrices, inputs: of one tile, of many in parts, and not a whole tile.
SIZES = {"one": ((37,), 33), "qkv": ((70, 7, 7), 700), "gate-up": ((64, 65), 256)}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("size", SIZES)
def test_matches_the_exact_result(size: str, tokens: str, dtype: torch.dtype) -> None:
    rows, in_features = SIZES[size]
    case = (dtype, rows, TOKENS[tokens])
    exact = add(ReferenceOps(torch.float64), *case, in_features=in_features, widen=True)
    reference = add(ReferenceOps(), *case, in_features=in_features)
    actual = add(CudaOps(num_sms=1), *case, in_features=in_features)
    assert_within_budget(actual, exact, reference, f"{size} {tokens}")


def test_ranks_beyond_one_tile() -> None:
    results = []
    for one in (CudaOps(num_sms=1), ReferenceOps()):
        slots = one.lora_slots(1, 150, 40, (30, 30), torch.float32, CPU)
        drawn = Maker(torch.float32, seed=4)
        slots.fill(0, parts_of(drawn, 40, (30, 30), ranks=(150, 70)))
        y = torch.zeros(3, 60)
        x = Maker(torch.float32, seed=5).normal(3, 40)
        one.add_lora(y, x, slots, batch_of([0, 0, 0]))
        results.append(y)
    assert torch.allclose(results[0], results[1], rtol=1e-4, atol=1e-4)


def test_a_token_does_not_depend_on_the_others() -> None:
    maker, ops = Maker(torch.float32, seed=2), CudaOps(num_sms=1)
    slots = ops.lora_slots(2, 5, 300, (40, 20), torch.float32, CPU)
    slots.fill(1, parts_of(maker, 300, (40, 20)))
    x, y = maker.normal(20, 300), maker.normal(20, 60)
    together = y.clone()
    ops.add_lora(together, x, slots, batch_of([1] * 20))
    for at in (0, 17):
        one = y[at : at + 1].clone()
        ops.add_lora(one, x[at : at + 1], slots, batch_of([1]))
        assert torch.equal(one[0], together[at])


def test_shapes_that_do_not_fit_are_refused() -> None:
    ops = CudaOps(num_sms=1)
    slots = ops.lora_slots(1, 4, 16, (8,), torch.float32, CPU)
    batch = batch_of([0, 0])
    with pytest.raises(ShapeError, match="add_lora: x is"):
        ops.add_lora(torch.zeros(2, 8), torch.zeros(3, 16), slots, batch)
    with pytest.raises(ShapeError, match="add_lora: a is"):
        ops.add_lora(torch.zeros(2, 8), torch.zeros(2, 15), slots, batch)
    with pytest.raises(ShapeError, match="add_lora: b is"):
        ops.add_lora(torch.zeros(2, 9), torch.zeros(2, 16), slots, batch)
