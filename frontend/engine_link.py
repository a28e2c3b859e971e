"""One engine: the session with it, the sequences that are with it, and its standing."""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from typing import TYPE_CHECKING, Protocol

import msgspec

from frontend.engine_addresses import outputs_endpoint
from frontend.engine_client import EngineClient
from frontend.engine_stats import kv_cache_usage
from frontend.placement import Candidate
from pagewire.errors import Unavailable
from pagewire.wire.messages import AdapterReply, LoadAdapter

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from frontend.engine_client import Reply
    from frontend.request import RequestState
    from pagewire.config import FrontendConfig
    from pagewire.wire.messages import AdapterInfo, Ready, StepOutput, StepStats

logger = logging.getLogger(__name__)

AVOIDED_S = 5.0
"""How long an engine that gave requests back is not asked again, if there is another:
it shuts down, or had lost the session."""


class LinkEvents(Protocol):
    """EngineEvents, with the engine that they are of."""

    def engine_ready(self, link: EngineLink, ready: Ready) -> None: ...

    def engine_step(self, link: EngineLink, output: StepOutput) -> None: ...

    def engine_stats(self, link: EngineLink, stats: StepStats) -> None: ...

    def engine_adapters(self, link: EngineLink) -> None: ...

    def engine_gone(self, link: EngineLink, reason: str) -> None: ...

    def engine_reconnected(self, link: EngineLink) -> None: ...

    def engine_stalled(self, link: EngineLink) -> None: ...


def _with_call_id(message: LoadAdapter, call_id: int) -> LoadAdapter:
    return msgspec.structs.replace(message, call_id=call_id)


class EngineLink:
    def __init__(
        self,
        address: str,
        slot: int,
        config: FrontendConfig,
        events: LinkEvents,
        *,
        clock: Callable[[], float],
    ) -> None:
        advertised = config.outputs_advertise
        self.address = address
        self.slot = slot
        self.client = EngineClient(
            commands=address,
            outputs_bind=outputs_endpoint(config.outputs_bind, slot),
            outputs_advertise=advertised and outputs_endpoint(advertised, slot),
            engine_timeout=config.engine_timeout,
            stall_timeout=config.stall_timeout,
            events=self,
            clock=clock,
        )
        self._events = events
        self._clock = clock
        self.last: Ready | None = None
        """What it last said of itself, also while it is gone."""
        self.adapters: dict[str, AdapterInfo] = {}
        """By name: those that it has, or had last, or will have when it reads what was sent."""
        self._restoring: dict[str, AdapterInfo] = {}
        """Those that it was told to load, as other engines have them, and has not answered."""
        self.stats: StepStats | None = None
        """Its last, None while it is gone."""
        self.live: dict[int, RequestState] = {}
        """By engine id: those that it works on or whose text is still to come."""
        self.aborted: dict[int, float] = {}
        """Engine id -> when its Abort was sent, until it answers."""
        self.left_behind: set[int] = set()
        """What it may still work on, if it lives while it counts as gone."""
        self.draining = False
        """It gets nothing new in this epoch."""
        self.refused = False
        """It does not serve what the others serve."""
        self.withdrawn = False
        """Its name does not resolve to it any more."""
        self.stalled = False
        self._num_sent = 0
        """Since its last report."""
        self._avoided_until = 0.0
        self._empty = asyncio.Event()

    @property
    def ready(self) -> Ready | None:
        """None while it is gone."""
        return self.client.ready

    @property
    def usable(self) -> bool:
        return self.ready is not None and not self.shut_out

    @property
    def shut_out(self) -> bool:
        """Whether it may not be given requests, dead or alive."""
        return self.draining or self.refused or self.withdrawn

    @property
    def avoided(self) -> bool:
        """Whether another engine is better, whatever its load."""
        return self.stalled or self.client.lost or self._clock() < self._avoided_until

    @property
    def num_requests(self) -> int:
        """That have a sequence here."""
        return len({id(state.job) for state in self.live.values()})

    def avoid(self) -> None:
        self._avoided_until = self._clock() + AVOIDED_S

    def candidate(self) -> Candidate:
        """Of a usable engine."""
        assert self.ready is not None
        stats = self.stats
        busy = 0 if stats is None else stats.num_running + stats.num_waiting
        return Candidate(
            epoch=self.ready.epoch,
            # What this frontend knows at first hand may be ahead of the report.
            num_seqs=max(busy + self._num_sent, len(self.live)),
            max_num_seqs=self.ready.max_num_seqs,
            kv_usage=0.0 if stats is None else kv_cache_usage(stats),
        )

    def room(self) -> int:
        """Tokens that one sequence can have, of a usable engine."""
        assert self.ready is not None
        # The last token of all is drawn but never computed: it needs no KV.
        return min(self.ready.max_model_len, self.ready.num_blocks * self.ready.block_size + 1)

    def has(self, adapter: AdapterInfo) -> bool:
        """Another of the name has other weights."""
        known = self.adapters.get(adapter.name)
        return known is not None and known.digest == adapter.digest

    def _set_adapters(self, adapters: Iterable[AdapterInfo]) -> None:
        self.adapters = {it.name: it for it in adapters} | self._restoring

    def restore(self, adapters: Iterable[AdapterInfo]) -> None:
        """Has the engine load what it has not, before it reads what is sent from here on; but
        for what it loads by itself when it is started."""
        if self.ready is None or not self.ready.max_loras:
            return
        for adapter in adapters:
            if adapter.is_static or adapter.name in self.adapters:
                continue
            message = LoadAdapter(0, adapter.name, adapter.path, adapter.digest)
            try:
                reply = self.client.call(partial(_with_call_id, message))
            except Unavailable:
                return  # it is asked again when it is back
            self._restoring[adapter.name] = self.adapters[adapter.name] = adapter
            reply.add_done_callback(partial(self._restored, adapter))

    def _restored(self, adapter: AdapterInfo, call: asyncio.Future[Reply]) -> None:
        refused = call.exception()
        if refused is None:
            reply = call.result()
            assert isinstance(reply, AdapterReply)
            if self._restoring.get(adapter.name) is adapter:
                del self._restoring[adapter.name]
            if not reply.code:
                return
            if self.has(adapter):
                del self.adapters[adapter.name]
            logger.error(
                "the engine at %s has no adapter %r: %s", self.address, adapter.name, reply.error
            )
            self._events.engine_adapters(self)

    def sent(self) -> None:
        self._num_sent += 1

    def note_stats(self, stats: StepStats) -> None:
        self.stats = stats
        self._num_sent = 0

    def abort(self, *engine_ids: int) -> None:
        """Sends an Abort, to be answered."""
        self.aborted.update(dict.fromkeys(engine_ids, self._clock()))
        self.client.abort(engine_ids)

    def note_empty(self) -> None:
        """To be called when `live` or `aborted` may have become empty."""
        if not self.live and not self.aborted:
            self._empty.set()

    async def wait_empty(self) -> None:
        """Until nothing of this frontend is with the engine, and it has said so."""
        self._empty.clear()
        self.note_empty()
        await self._empty.wait()

    # EngineEvents.

    def engine_ready(self, ready: Ready) -> None:
        before = self.adapters
        self._restoring.clear()
        self._set_adapters(ready.adapters)
        if self.last is None or self.last.epoch != ready.epoch:
            self.draining = False
            self.restore(before.values())
        self._avoided_until = 0.0
        self._events.engine_ready(self, ready)
        self.last = ready

    def engine_step(self, output: StepOutput) -> None:
        self._events.engine_step(self, output)
        self.note_empty()

    def engine_stats(self, stats: StepStats) -> None:
        self._events.engine_stats(self, stats)

    def engine_adapters(self, adapters: tuple[AdapterInfo, ...]) -> None:
        self._set_adapters(adapters)
        self._events.engine_adapters(self)

    def engine_gone(self, reason: str) -> None:
        self.stats = None
        self.left_behind = {*self.live, *self.aborted}
        self.aborted.clear()
        self._events.engine_gone(self, reason)
        self.note_empty()

    def engine_reconnected(self) -> None:
        if self.aborted:
            self.client.abort(self.aborted)
        self._events.engine_reconnected(self)

    def engine_stalled(self, stalled: bool) -> None:
        self.stalled = stalled
        self._events.engine_stalled(self)
