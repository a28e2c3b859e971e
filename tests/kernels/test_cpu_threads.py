"""The thread pool and the packed products of the C++ ops."""

from __future__ import annotations

import gc
import os
import threading

import pytest
import torch

from kernels.cpu.memory import WeightMemory
from kernels.inputs import Maker, linear_args
from kernels.reference.ops import ReferenceOps
from kernels.tolerances import assert_within_budget
from tests.support.cpu_kernels import VARIANTS, best_cpu_ops, cpu_ops

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("backend", VARIANTS)
def test_products_of_any_shape(backend: str, dtype: torch.dtype) -> None:
    """Drawn sizes: every height of a tile, panels that are not full, odd inputs, strided rows."""
    drawn = torch.Generator().manual_seed(5)
    ops, reference, exact = cpu_ops(backend), ReferenceOps(), ReferenceOps(torch.float64)
    for tokens in (*range(1, 15), 24, 25, 47, 49, 96, 97):
        into, out = torch.randint(1, 150, (2,), generator=drawn).tolist()
        args = linear_args(Maker(dtype, seed=tokens), tokens, into, out, bias=tokens % 2 == 0)
        wide = torch.full((tokens, into + 3), float("nan"), dtype=dtype)
        wide[:, 2 : into + 2] = args["x"]
        actual = ops.linear(wide[:, 2 : into + 2], ops.prepare_linear(args["weight"], args["bias"]))
        doubles = {k: None if v is None else v.double() for k, v in args.items()}
        assert_within_budget(
            actual,
            exact.linear(doubles["x"], exact.prepare_linear(doubles["weight"], doubles["bias"])),
            reference.linear(args["x"], reference.prepare_linear(args["weight"], args["bias"])),
            f"{tokens} x {into} x {out}",
        )


def test_any_number_of_threads_computes_the_same() -> None:
    ops, before = best_cpu_ops(), torch.get_num_threads()
    args = linear_args(Maker(torch.float32), 40, 300, 500)
    weight = ops.prepare_linear(args["weight"])
    results = []
    try:
        for count in (1, 2, 3, 7, 2, 1):
            torch.set_num_threads(count)
            results += [ops.linear(args["x"], weight) for _ in range(20)]
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(result, results[0]) for result in results)


def test_callers_in_several_threads_do_not_disturb_each_other() -> None:
    """One of them has the pool, the others work alone."""
    ops = best_cpu_ops()
    args = linear_args(Maker(torch.float32), 40, 300, 500)
    weight = ops.prepare_linear(args["weight"])
    expected = ops.linear(args["x"], weight)
    wrong: list[int] = []

    def compute(index: int) -> None:
        if not all(torch.equal(ops.linear(args["x"], weight), expected) for _ in range(50)):
            wrong.append(index)

    callers = [threading.Thread(target=compute, args=(i,)) for i in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert not wrong


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_forked_child_has_a_pool_of_its_own() -> None:
    ops, before = best_cpu_ops(), torch.get_num_threads()
    args = linear_args(Maker(torch.float32), 40, 300, 500)
    weight = ops.prepare_linear(args["weight"])
    try:
        torch.set_num_threads(2)
        expected = ops.linear(args["x"], weight)
        pid = os.fork()
        if pid == 0:
            os._exit(0 if torch.equal(ops.linear(args["x"], weight), expected) else 1)
        assert os.waitpid(pid, 0)[1] == 0
    finally:
        torch.set_num_threads(before)


def test_weight_memory_is_aligned_and_lives_as_long_as_a_tensor() -> None:
    memory = WeightMemory()
    tensors = [memory.empty(count, torch.bfloat16).fill_(count) for count in (1, 33, 1000, 5)]
    big = memory.empty(40 << 20, torch.bfloat16)
    assert big.numel() == 40 << 20
    assert all(tensor.data_ptr() % 64 == 0 for tensor in (*tensors, big))
    del memory, big
    gc.collect()
    for tensor, count in zip(tensors, (1, 33, 1000, 5), strict=True):
        assert tensor.shape == (count,) and (tensor == count).all()
