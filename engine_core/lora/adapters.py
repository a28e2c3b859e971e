"""The adapters that are resident, by name, and how many requests each has.

    load --> listed: requests may name it --unload--> leaving: those it has go on
                                                        |
    slot free  <-------------- none left ---------------+

A name may be loaded again while one that had it is leaving: they are two adapters.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

from pagewire.adapter_list import find_name_fault
from pagewire.wire.messages import AdapterInfo

if TYPE_CHECKING:
    from collections.abc import Iterable


class AdapterFacts(NamedTuple):
    rank: int
    digest: bytes
    """Of its content: what tells the KV that it made from that of others."""


class AdapterBackend(Protocol):
    """Where the matrices are; slots are numbers from 0."""

    def fill(self, slot: int, directory: Path) -> AdapterFacts:
        """Raises ModelLoadError, and then the slot is empty."""
        ...

    def clear(self, slot: int) -> None: ...


@dataclass(slots=True, eq=False)
class Adapter:
    """One that is resident."""

    name: str
    path: str
    slot: int
    rank: int
    digest: bytes
    num_requests: int = 0
    is_leaving: bool = False

    @property
    def info(self) -> AdapterInfo:
        return AdapterInfo(self.name, self.path, self.rank, self.digest)


class AdapterRefused(Exception):
    """`code` is that of a class in pagewire/errors.py; field is of the call."""

    def __init__(self, code: str, message: str, field: str = "") -> None:
        super().__init__(message)
        self.code = code
        self.field = field


class Adapters:
    """max_loras slots; none where the engine has no adapters."""

    def __init__(
        self,
        backend: AdapterBackend | None = None,
        num_slots: int = 0,
        *,
        base_name: str = "",
    ) -> None:
        """base_name: of the model, which no adapter may have."""
        self._backend = backend
        self.num_slots = num_slots
        self._base_name = base_name
        self._listed: dict[str, Adapter] = {}
        self._leaving: list[Adapter] = []
        self._free = list(range(num_slots - 1, -1, -1))

    def find(self, name: str) -> Adapter | None:
        """One that new requests may name."""
        return self._listed.get(name)

    def infos(self) -> tuple[AdapterInfo, ...]:
        """Of those that new requests may name."""
        return tuple(adapter.info for adapter in self._listed.values())

    def load(self, name: str, path: str) -> Adapter:
        """Of the operator's own. Raises AdapterRefused; ModelLoadError naming the file."""
        if self._backend is None:
            raise AdapterRefused("feature_disabled", "adapters are off: set --enable-lora")
        fault = find_name_fault(name)
        if fault is not None:
            raise AdapterRefused("invalid_request", f"name: {fault}", "name")
        if name in self._listed or name == self._base_name:
            raise AdapterRefused("already_exists", f"model {name!r} is loaded", "name")
        if not self._free:
            raise AdapterRefused(
                "no_room", f"all {self.num_slots} slots for adapters (--max-loras) are taken"
            )
        slot = self._free[-1]
        facts = self._backend.fill(slot, Path(path))
        self._free.pop()
        adapter = self._listed[name] = Adapter(name, path, slot, facts.rank, facts.digest)
        return adapter

    def unload(self, name: str) -> None:
        """Requests may not name it any more; those that it has go on. Raises AdapterRefused."""
        adapter = self._listed.pop(name, None)
        if adapter is None:
            raise AdapterRefused("not_found", f"adapter {name!r} is not loaded", "name")
        adapter.is_leaving = True
        if adapter.num_requests:
            self._leaving.append(adapter)
        else:
            self._release(adapter)

    def enter(self, adapter: Adapter) -> None:
        """A request begins that has it."""
        adapter.num_requests += 1

    def leave(self, adapter: Adapter) -> None:
        """A request ends that had it."""
        adapter.num_requests -= 1
        if adapter.is_leaving and not adapter.num_requests:
            self._leaving.remove(adapter)
            self._release(adapter)

    def _release(self, adapter: Adapter) -> None:
        assert self._backend is not None
        self._backend.clear(adapter.slot)
        self._free.append(adapter.slot)

    def check_integrity(self, used: Iterable[Adapter]) -> None:
        """used: one of each unfinished request that has one. Raises AssertionError."""
        counts: dict[Adapter, int] = {}
        for adapter in used:
            counts[adapter] = counts.get(adapter, 0) + 1
        resident = [*self._listed.values(), *self._leaving]
        assert sorted([*self._free, *(it.slot for it in resident)]) == list(range(self.num_slots))
        assert all(counts.pop(it, 0) == it.num_requests for it in resident), resident
        assert not counts, counts
