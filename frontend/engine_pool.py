"""The engines that there are: those named by the settings, and those that names resolve to.

An engine whose address a name no longer has gets nothing new, and is left once nothing
of ours is with it or it is gone.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from frontend.engine_addresses import EngineAddresses
from frontend.engine_link import EngineLink
from pagewire.errors import ConfigError
from pagewire.wire.sockets import BindError, require_local

if TYPE_CHECKING:
    from collections.abc import Callable

    from frontend.engine_addresses import Resolve
    from frontend.engine_link import LinkEvents
    from pagewire.config import FrontendConfig

logger = logging.getLogger(__name__)

RESOLVE_EVERY_S = 5.0


class EnginePool:
    """Raises ConfigError for addresses that can never work."""

    def __init__(
        self,
        config: FrontendConfig,
        events: LinkEvents,
        *,
        clock: Callable[[], float],
        resolve: Resolve | None = None,
    ) -> None:
        self._config = config
        self._events = events
        self._clock = clock
        require_local(
            config.outputs_bind, "--outputs-bind", allow_remote=config.allow_remote_engine
        )
        self._addresses = EngineAddresses(config.engine_address, resolve)
        self._resolver: asyncio.Task[None] | None = None
        self.links: list[EngineLink] = []
        for address in self._addresses.fixed:
            self.links.append(self._link(address))

    def _link(self, address: str) -> EngineLink:
        taken = {link.slot for link in self.links}
        slot = next(slot for slot in range(len(taken) + 1) if slot not in taken)
        return EngineLink(address, slot, self._config, self._events, clock=self._clock)

    async def start(self) -> None:
        """Raises ConfigError or BindError; needs no engine and no name server yet."""
        for link in self.links:
            await link.client.start()
        if self._addresses.names:
            loop = asyncio.get_running_loop()
            self._resolver = loop.create_task(self._resolve_forever(), name="resolver")

    async def close(self) -> None:
        if self._resolver is not None:
            self._resolver.cancel()
            await asyncio.gather(self._resolver, return_exceptions=True)
        await asyncio.gather(*[link.client.close() for link in self.links])

    def usable(self) -> list[EngineLink]:
        return [link for link in self.links if link.usable]

    def find(self, address: str) -> EngineLink | None:
        return next((link for link in self.links if link.address == address), None)

    async def _resolve_forever(self) -> None:
        while True:
            try:
                await self.update()
            except Exception:
                logger.exception("the engines' addresses could not be updated")
            await asyncio.sleep(RESOLVE_EVERY_S)

    async def update(self) -> None:
        """Looks the names up, and follows what they say."""
        addresses = await self._addresses.lookup()
        for link in list(self.links):
            link.withdrawn = link.address not in addresses
            if link.withdrawn and (link.ready is None or not (link.live or link.aborted)):
                await self._leave(link)
        for address in addresses:
            if self.find(address) is None:
                await self._join(address)

    async def _join(self, address: str) -> None:
        try:
            link = self._link(address)
            await link.client.start()
        except (ConfigError, BindError) as error:
            logger.error("the engine at %s cannot be used: %s", address, error)
            return
        logger.info("a new engine: %s", address)
        self.links.append(link)

    async def _leave(self, link: EngineLink) -> None:
        logger.info("the engine at %s is not in the list any more", link.address)
        self.links.remove(link)
        if link.ready is not None:
            link.client.leave("it is not in the list any more")
        await link.client.close()
