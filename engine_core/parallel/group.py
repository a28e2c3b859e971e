"""The ranks of one engine, and what they tell each other as they compute."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch
import torch.distributed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pagewire.config import EngineConfig

_TIMEOUT = timedelta(minutes=30)
"""Of one collective: ranks wait for each other while weights are read. What ends a hang
in a step is the watchdog of rank 0."""
_INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


class Collectives(Protocol):
    """What is used of a torch process group; every rank makes the same calls in one order."""

    def broadcast(self, tensors: list[torch.Tensor], opts: Any) -> Any: ...
    def allreduce(self, tensors: list[torch.Tensor], opts: Any) -> Any: ...
    def _allgather_base(self, output: torch.Tensor, input: torch.Tensor) -> Any: ...


class RankGroup:
    """This rank and the others.

    is_ordered: sums add the ranks' terms in the order of the ranks, one by one: the same
    to the last bit on all of them, wherever in a batch a token is. Else the backend
    chooses an order, which may follow the batch.
    """

    def __init__(self, collectives: Collectives, rank: int, size: int, *, is_ordered: bool) -> None:
        self.rank = rank
        self.size = size
        self._collectives: Collectives | None = collectives
        self._is_ordered = is_ordered

    def close(self) -> None:
        """Ends the threads of the collectives, none of which may be under way: a process that
        ends with them is aborted."""
        self._collectives = None
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()

    @property
    def _all(self) -> Collectives:
        assert self._collectives is not None, "closed"
        return self._collectives

    def sum(self, term: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' terms, of one shape; may be made in place."""
        term = term.contiguous()
        if not self._is_ordered:
            self._all.allreduce([term], torch.distributed.AllreduceOptions()).wait()
            return term
        terms = self.gather(term)
        total = terms[0].float()
        for other in terms[1:]:
            total += other
        return total.to(term.dtype)

    def gather(self, mine: torch.Tensor) -> torch.Tensor:
        """What each rank has, all of one shape, stacked: [size, *shape]."""
        out = mine.new_empty((self.size * mine.shape[0], *mine.shape[1:]))
        self._all._allgather_base(out, mine.contiguous()).wait()
        return out.view(self.size, *mine.shape)

    def from_first(self, values: torch.Tensor) -> torch.Tensor:
        """values become what rank 0 has, in place."""
        options = torch.distributed.BroadcastOptions()
        options.rootRank = 0
        self._all.broadcast([values], options).wait()
        return values

    def total(self, number: int, device: torch.device) -> int:
        """The sum of what each rank gives."""
        return int(self.gather(torch.tensor([number], device=device)).sum())

    def least(self, numbers: Sequence[int], device: torch.device) -> list[int]:
        """Of each of the numbers the smallest that a rank has."""
        mine = torch.tensor(numbers, dtype=torch.int64, device=device)
        smallest: list[int] = self.gather(mine).amin(0).tolist()
        return smallest


def connect(store_file: int, rank: int, config: EngineConfig, device: torch.device) -> RankGroup:
    """Waits for all ranks. store_file: the descriptor of a file that they have in common."""
    size = config.tensor_parallel_size
    path = f"/proc/self/fd/{store_file}"
    store = torch.distributed.FileStore(path, size)  # type: ignore[attr-defined]
    is_ordered = device.type == "cpu" or config.batch_invariant
    return RankGroup(open_collectives(store, rank, size, device), rank, size, is_ordered=is_ordered)


def open_collectives(store: Any, rank: int, size: int, device: torch.device) -> Collectives:
    """store: a torch.distributed.Store.

    Gloo on a CPU, NCCL on CUDA; sockets are those of loopback, unless the environment names
    an interface.
    """
    for variable in _INTERFACES:
        os.environ.setdefault(variable, "lo")
    if device.type == "cpu":
        gloo = torch.distributed.ProcessGroupGloo(store, rank, size, _TIMEOUT)
        return cast("Collectives", gloo)
    torch.distributed.init_process_group(
        "nccl", store=store, rank=rank, world_size=size, timeout=_TIMEOUT, device_id=device
    )
    return cast("Collectives", torch.distributed.group.WORLD)
