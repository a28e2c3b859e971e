"""The adapters that are resident, by name, and how many requests each has.

    load --> listed: requests may name it --unload--> leaving: those it has go on
                                                        |
    slot free  <-------------- none left ---------------+

A name may be loaded again while one that had it is leaving: they are two adapters.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

from pagewire.adapter_list import find_name_fault
from pagewire.errors import ModelLoadError
from pagewire.wire.messages import AdapterInfo, AdapterReply, LoadAdapter

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pagewire.wire.messages import UnloadAdapter


_log = logging.getLogger(__name__)


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
    is_static: bool
    num_requests: int = 0
    is_leaving: bool = False

    @property
    def info(self) -> AdapterInfo:
        return AdapterInfo(self.name, self.path, self.rank, self.digest, self.is_static)


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
        directory: Path | None = None,
    ) -> None:
        """base_name: of the model, which no adapter may have. directory: those below it may
        be loaded at run time; None: none may."""
        self._backend = backend
        self.num_slots = num_slots
        self._base_name = base_name
        self._directory = directory
        self._listed: dict[str, Adapter] = {}
        self._leaving: list[Adapter] = []
        self._free = list(range(num_slots - 1, -1, -1))

    def find(self, name: str) -> Adapter | None:
        """One that new requests may name."""
        return self._listed.get(name)

    def infos(self) -> tuple[AdapterInfo, ...]:
        """Of those that new requests may name."""
        return tuple(adapter.info for adapter in self._listed.values())

    def apply(self, command: LoadAdapter | UnloadAdapter) -> AdapterReply:
        """What a frontend asks for. Never raises."""
        try:
            if isinstance(command, LoadAdapter):
                self.load(command.name, command.path, command.digest)
            else:
                self.unload(command.name)
        except AdapterRefused as error:
            return AdapterReply(command.call_id, error.code, str(error), error.field)
        except ModelLoadError as error:
            return AdapterReply(command.call_id, "invalid_request", str(error), "path")
        except Exception as error:
            _log.exception("the adapter %r could not be loaded", command.name)
            return AdapterReply(
                command.call_id, "internal", f"{type(error).__name__} in the engine, see its log"
            )
        return AdapterReply(command.call_id)

    def load_static(self, name: str, path: str) -> None:
        """One of the configuration's. Raises AdapterRefused; ModelLoadError naming the file."""
        self._load(name, path, Path(path), is_static=True)

    def load(self, name: str, path: str, digest: bytes = b"") -> None:
        """At run time; path is below the directory. digest: the content that it must have;
        one that is loaded already, with it, is as good. Raises like load_static()."""
        known = self._listed.get(name)
        if known is not None and digest and known.digest == digest:
            return
        adapter = self._load(name, path, self._find(path), is_static=False)
        if digest and adapter.digest != digest:
            self.unload(name)
            raise AdapterRefused("failed_precondition", f"{path} is another adapter than it was")

    def _find(self, path: str) -> Path:
        if self._directory is None:
            raise AdapterRefused(
                "feature_disabled", "adapters are loaded at run time from below --lora-dir only"
            )
        try:
            found = (self._directory / path).resolve()
        except (OSError, ValueError) as error:
            raise AdapterRefused("invalid_request", f"path: {error}", "path") from error
        if not found.is_relative_to(self._directory.resolve()):
            raise AdapterRefused("invalid_request", "path leads out of --lora-dir", "path")
        return found

    def _load(self, name: str, path: str, directory: Path, *, is_static: bool) -> Adapter:
        if not self.num_slots:
            raise AdapterRefused("feature_disabled", "adapters are off: see --enable-lora")
        fault = find_name_fault(name)
        if fault is not None:
            raise AdapterRefused("invalid_request", f"name: {fault}", "name")
        if name in self._listed or name == self._base_name:
            raise AdapterRefused("already_exists", f"model {name!r} is loaded", "name")
        if not self._free:
            raise AdapterRefused(
                "no_room", f"all {self.num_slots} slots for adapters (--max-loras) are taken"
            )
        assert self._backend is not None
        slot = self._free[-1]
        facts = self._backend.fill(slot, directory)
        self._free.pop()
        adapter = Adapter(name, path, slot, facts.rank, facts.digest, is_static)
        self._listed[name] = adapter
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
