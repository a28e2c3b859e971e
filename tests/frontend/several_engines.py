"""A frontend over several fake engines."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tests.frontend.conftest import Stack
from tests.support.fake_engine import FakeEngine

if TYPE_CHECKING:
    from frontend.engine_link import EngineLink
    from tests.support.fake_engine import FakeRequest
    from tests.support.fake_tokenizer import FakeTokenizer


class SeveralEngines(Stack):
    def __init__(self, engines: list[FakeEngine], tokenizer: FakeTokenizer, **config: Any) -> None:
        super().__init__(engines[0], tokenizer, **config)
        self.engines = engines

    async def start_engines(self) -> str:
        for engine in self.engines:
            await engine.start()
        return ",".join(engine.address for engine in self.engines)

    async def start(self, *, serving: bool = True) -> None:
        await super().start(serving=serving)
        if serving:
            await self.until(lambda: all(link.ready or link.refused for link in self.links))

    async def close(self) -> None:
        await super().close()
        for engine in self.engines:
            await engine.kill()

    @property
    def links(self) -> list[EngineLink]:
        return self.frontend.dispatcher.engine_side.pool.links

    def requests(self) -> list[list[FakeRequest]]:
        """What each engine has."""
        return [[*e.running.values(), *e.waiting.values()] for e in self.engines]

    async def wait_requests(self, count: int) -> list[list[FakeRequest]]:
        """The same, once they have `count` together."""
        await self.until(lambda: sum(map(len, self.requests())) == count)
        return self.requests()

    def step(self) -> None:
        for engine in self.engines:
            if engine.running or engine.waiting:
                engine.step()

    async def lose(self, index: int) -> None:
        """The end of a process, with its last word."""
        link = self.links[index]
        self.engines[index].die()
        await self.until(lambda: link.ready is None)
        await self.engines[index].kill()
        self.engines[index].running.clear()
        self.engines[index].waiting.clear()

    async def restart(self, index: int, **options: Any) -> None:
        """Another process at the same address."""
        await self.engines[index].kill()
        engine = FakeEngine(bind=self.engines[index].address, **options)
        self.engines[index] = engine
        await engine.start()
        await self.until(lambda: self.links[index].client.epoch == engine.epoch)
