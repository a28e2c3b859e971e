"""GET /live: what the server is doing now, for the web page and `pagewire top`.

Made of what the frontend knows anyway, when somebody asks and at no other time. Rates and
percentiles are the reader's: it asks twice, and takes the difference of the totals.
"""

from __future__ import annotations

import secrets
import time
from typing import TYPE_CHECKING

import msgspec

from frontend.metrics import Bucketed, ServedTotals

if TYPE_CHECKING:
    from collections.abc import Sequence

    from frontend.dispatcher import Dispatcher
    from frontend.engine_link import EngineLink
    from frontend.health import HealthBoard
    from frontend.metrics import Metrics


class Blocks(msgspec.Struct):
    """KV blocks: used + cached + free = total."""

    total: int = 0
    used: int = 0
    """Held by requests."""
    cached: int = 0
    """Held by none; a prompt that begins alike finds its KV there."""
    free: int = 0


class LiveEngine(msgspec.Struct):
    address: str
    ready: bool
    draining: bool
    in_flight: int
    """Of this frontend's requests."""
    running: int
    waiting: int
    max_num_seqs: int
    step: int
    blocks: Blocks


class LiveTokenizer(msgspec.Struct):
    up: bool
    calls: int
    """Prompts that are being tokenized."""
    queue: int
    """Detokenize messages without their answer."""


class Live(msgspec.Struct):
    life: str
    """Random, another one for each start of the frontend: totals begin anew with it."""
    at: float
    """Seconds, on a clock of the server's that only goes forward."""
    serving: bool
    draining: bool
    model: str
    """Empty until there was an engine."""
    in_flight: int
    running: int
    waiting: int
    max_num_seqs: int
    """Sequences that a step can hold, of all engines that are ready."""
    block_size: int
    """Tokens in a KV block."""
    blocks: Blocks
    engines: list[LiveEngine]
    tokenizer: LiveTokenizer
    totals: ServedTotals
    ttft: Bucketed
    itl: Bucketed
    e2e: Bucketed


class LiveView:
    def __init__(self, dispatcher: Dispatcher, metrics: Metrics, health: HealthBoard) -> None:
        self._dispatcher = dispatcher
        self._metrics = metrics
        self._health = health
        self._life = secrets.token_hex(8)

    def get(self) -> bytes:
        """As JSON."""
        stats = self._dispatcher.stats()
        model = self._metrics.model
        engines = [_engine(link) for link in stats.engines]
        served = [engine for engine in engines if engine.ready]
        latencies = self._metrics.latencies()
        live = Live(
            life=self._life,
            at=time.monotonic(),
            serving=self._health.serving,
            draining=stats.draining,
            model="" if model is None else model.name,
            in_flight=stats.num_requests_in_flight,
            running=sum(engine.running for engine in served),
            waiting=sum(engine.waiting for engine in served),
            max_num_seqs=sum(engine.max_num_seqs for engine in served),
            block_size=0 if stats.ready is None else stats.ready.block_size,
            blocks=_sum_of([engine.blocks for engine in served]),
            engines=engines,
            tokenizer=LiveTokenizer(
                up=self._dispatcher.text_stream.up,
                calls=self._dispatcher.tokenizer.num_tokenizing,
                queue=self._dispatcher.text_stream.num_waiting,
            ),
            totals=self._metrics.served_totals(),
            ttft=latencies.ttft,
            itl=latencies.itl,
            e2e=latencies.e2e,
        )
        return msgspec.json.encode(live)


def _engine(link: EngineLink) -> LiveEngine:
    stats, ready = link.stats, link.ready
    blocks = Blocks()
    if stats is not None:
        cached = min(stats.num_free_cached_blocks, stats.num_free_blocks)
        blocks = Blocks(
            total=stats.num_blocks,
            used=stats.num_blocks - stats.num_free_blocks,
            cached=cached,
            free=stats.num_free_blocks - cached,
        )
    elif ready is not None:
        blocks = Blocks(total=ready.num_blocks, free=ready.num_blocks)
    return LiveEngine(
        address=link.address,
        ready=ready is not None and not link.refused,
        draining=link.draining or link.withdrawn,
        in_flight=link.num_requests,
        running=0 if stats is None else stats.num_running,
        waiting=0 if stats is None else stats.num_waiting,
        max_num_seqs=0 if ready is None else ready.max_num_seqs,
        step=0 if ready is None else link.client.last_step,
        blocks=blocks,
    )


def _sum_of(all_blocks: Sequence[Blocks]) -> Blocks:
    return Blocks(
        total=sum(blocks.total for blocks in all_blocks),
        used=sum(blocks.used for blocks in all_blocks),
        cached=sum(blocks.cached for blocks in all_blocks),
        free=sum(blocks.free for blocks in all_blocks),
    )
