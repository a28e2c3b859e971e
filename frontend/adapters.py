"""What an operator does to adapters: loaded and unloaded on all engines, or on none."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from frontend.instruments import WatchedInfo
from pagewire.errors import (
    AlreadyExists,
    FailedPrecondition,
    FeatureDisabled,
    InternalError,
    InvalidRequest,
    NoRoom,
    NotFound,
    PagewireError,
)
from pagewire.wire.messages import AdapterReply, LoadAdapter, UnloadAdapter

if TYPE_CHECKING:
    from collections.abc import Callable

    from frontend.engine_link import EngineLink
    from frontend.engine_side import EngineSide
    from pagewire.wire.messages import AdapterInfo, Command

logger = logging.getLogger(__name__)

MAX_PATH_CHARS = 4096


@dataclass(frozen=True, slots=True)
class AdapterStatus:
    info: AdapterInfo
    num_requests: int
    """Of this frontend, in flight."""


@dataclass(frozen=True, slots=True)
class AdapterSurvey:
    adapters: tuple[AdapterStatus, ...]
    max_loras: int
    """Of the engine that can have the fewest; 0: adapters are off."""


def survey(side: EngineSide) -> AdapterSurvey:
    """Raises Unavailable."""
    used = Counter(
        state.job.adapter.name
        for state in (*side.live.values(), *side.replay.waiting.values())
        if state.job.adapter is not None and not state.index
    )
    found = side.adapters().values()
    return AdapterSurvey(
        tuple(AdapterStatus(info, used[info.name]) for info in found),
        min(link.ready.max_loras for link in _usable(side) if link.ready is not None),
    )


def adapters_info(side: EngineSide) -> WatchedInfo:
    """vLLM's, which its gateways read to find an adapter's server."""

    def read() -> tuple[str, str, str] | None:
        ready = None if side.first is None else side.first.ready
        if ready is None or not ready.max_loras:
            return None
        running: set[str] = set()
        waiting: set[str] = set()
        for state in (*side.live.values(), *side.replay.waiting.values()):
            if state.job.adapter is not None and not state.engine_finished:
                (running if state.started else waiting).add(state.job.adapter.name)
        return str(ready.max_loras), ",".join(sorted(running)), ",".join(sorted(waiting))

    return WatchedInfo(
        "vllm:lora_requests_info",
        "Adapters of this frontend's requests; the value is the time.",
        ("max_lora", "running_lora_adapters", "waiting_lora_adapters"),
        read,
    )


async def load_adapter(side: EngineSide, name: str, path: str) -> None:
    """Raises InvalidRequest, AlreadyExists, NoRoom, FeatureDisabled, FailedPrecondition or
    Unavailable; then no engine has it that had not."""
    if not name:
        raise InvalidRequest("name", "name is empty")
    if not 1 <= len(path) <= MAX_PATH_CHARS:
        raise InvalidRequest(
            "path", f"path has {len(path)} characters, must have 1 to {MAX_PATH_CHARS}"
        )
    links = _usable(side)
    replies = await _ask(links, lambda call_id: LoadAdapter(call_id, name, path))
    loaded = [link for link, error in zip(links, replies, strict=True) if error is None]
    error = next((error for error in replies if error is not None), None)
    if error is None and len({_digest(link, name) for link in loaded}) > 1:
        error = FailedPrecondition(f"the engines find different adapters at {path}")
    if error is not None:
        await _ask(loaded, lambda call_id: UnloadAdapter(call_id, name))
        raise error
    logger.info("adapter %r loaded from %s", name, path)


async def unload_adapter(side: EngineSide, name: str) -> None:
    """Requests that have it go on. Raises NotFound or Unavailable."""
    if not name:
        raise InvalidRequest("name", "name is empty")
    links = _usable(side)
    replies = await _ask(links, lambda call_id: UnloadAdapter(call_id, name))
    for error in replies:
        if error is not None and not isinstance(error, NotFound):
            raise error
    if all(replies):
        raise NotFound("adapter", name[:256], field="name")
    logger.info("adapter %r unloaded", name)


def _usable(side: EngineSide) -> list[EngineLink]:
    links = side.pool.usable()
    if not links:
        raise side.unavailable()
    return links


async def _ask(
    links: list[EngineLink], make: Callable[[int], Command]
) -> list[PagewireError | None]:
    """What each engine has against it."""
    return await asyncio.gather(*[_ask_one(link, make) for link in links])


async def _ask_one(link: EngineLink, make: Callable[[int], Command]) -> PagewireError | None:
    if link.ready is not None and not link.ready.max_loras:
        return FeatureDisabled("adapters are off: see --enable-lora")
    try:
        reply = await link.client.call(make)
    except PagewireError as error:
        return error
    assert isinstance(reply, AdapterReply)
    return _error_of(reply) if reply.code else None


def _digest(link: EngineLink, name: str) -> bytes:
    info = link.adapters.get(name)
    return b"" if info is None else info.digest


def _error_of(reply: AdapterReply) -> PagewireError:
    message = reply.error
    match reply.code:
        case "invalid_request":
            return InvalidRequest(reply.field, message)
        case "not_found":
            return NotFound("adapter", "", field=reply.field)
        case "already_exists":
            return AlreadyExists(message, field=reply.field)
        case "no_room":
            return NoRoom(message)
        case "feature_disabled":
            return FeatureDisabled(message, field=reply.field)
        case "failed_precondition":
            return FailedPrecondition(message)
        case _:
            return InternalError(message)
