"""What an operator does to single engines: emptying one for an upgrade, and the caches of all."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from pagewire.errors import FailedPrecondition, NotFound

if TYPE_CHECKING:
    from frontend.engine_side import EngineSide

logger = logging.getLogger(__name__)


async def drain_engine(side: EngineSide, address: str, limit_s: float) -> int:
    """Moves all requests off one engine, which gets nothing new until it is restarted.

    Returns how many requests are still with it: 0 once it is empty and has freed their
    blocks, more after `limit_s` where no other engine has room for them. Raises NotFound,
    or FailedPrecondition for the only engine that serves.
    """
    link = side.pool.find(address)
    if link is None:
        raise NotFound("engine", address[:256], field="engine")
    if link.usable and len(side.pool.usable()) == 1:
        raise FailedPrecondition("it is the only engine that serves: nowhere to move requests to")
    logger.info("draining the engine at %s", address)
    link.draining = True
    side.update_health()
    side.move_off(link)
    try:
        async with asyncio.timeout(limit_s):
            await link.wait_empty()
    except TimeoutError:
        pass
    return link.num_requests


async def reset_prefix_caches(side: EngineSide) -> int:
    """Of all engines; the number of blocks freed. Raises Unavailable."""
    links = side.pool.usable()
    if not links:
        raise side.unavailable()
    return sum(await asyncio.gather(*[link.client.reset_prefix_cache() for link in links]))
