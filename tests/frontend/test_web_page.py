"""The web page in a real browser, and what it is made of."""

from __future__ import annotations

import asyncio
import itertools
import math
import re
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from playwright.async_api import expect

from frontend.web.routes import page_routes
from pagewire.api_keys import new_key
from pagewire.cli.top_figures import quantile
from pagewire.v1 import common_pb2
from tests.support.browser import needs_chromium, open_chromium
from tests.support.fake_engine import EOS, NUM_BLOCKS, TEXT

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path

    from playwright.async_api import Browser, Page

    from tests.frontend.conftest import Stack
    from tests.support.fake_engine import FakeRequest

EVIL = "<img src=x onerror=document.title='owned'> & <b>bold</b>"


class Visit:
    """A page of a server, and all that its console said."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.said: list[str] = []
        page.on("console", lambda message: self.said.append(message.text))
        page.on("pageerror", lambda error: self.said.append(str(error)))

    async def send(self, text: str) -> None:
        await self.page.get_by_label("Message", exact=True).click()
        await self.page.keyboard.type(text)
        await self.page.keyboard.press("Enter")

    @property
    def answer(self) -> Any:
        return self.page.locator("article.assistant").last


@pytest.fixture
async def browser() -> AsyncIterator[Browser]:
    async with open_chromium() as browser:
        yield browser


async def visit(browser: Browser, stack: Stack, *, width: int = 1280, **options: Any) -> Visit:
    viewport: Any = {"width": width, "height": 720}
    page = await browser.new_page(viewport=viewport, **options)
    visit = Visit(page)
    await page.goto(f"http://{stack.frontend.http_address}/")
    return visit


async def get(stack: Stack, path: str, **headers: str) -> httpx.Response:
    async with httpx.AsyncClient(base_url=f"http://{stack.frontend.http_address}") as client:
        return await client.get(path, headers=headers)


@needs_chromium
async def test_tokens_appear_while_they_come_and_stop_stops(
    browser: Browser, manual: Stack
) -> None:
    it = await visit(browser, manual)
    await it.send("What does the fox do?")
    (request,) = await manual.engine.wait_running()
    assert request.add.sampling.max_tokens == 512
    await expect(it.page.get_by_role("button", name="Send")).to_be_hidden()
    for begin, end in ((0, 1), (1, 5)):
        manual.engine.emit({request.id: [ord(c) for c in TEXT[begin:end]]})
        await expect(it.answer.locator(".text")).to_have_text(TEXT[:end])
    await expect(it.answer.locator(".meta")).to_have_text(
        re.compile(r"first token after .* · [\d.]+ tokens/s · 5 tokens")
    )
    await it.page.get_by_role("button", name="Stop").click()
    await manual.engine.wait_for(lambda: manual.engine.aborted == [request.id])
    await expect(it.answer.locator(".meta")).to_have_text(re.compile("stopped$"))
    await expect(it.page.get_by_role("button", name="Send")).to_be_visible()
    await expect(it.page.locator("#announce")).to_have_text("Stopped.")

    # The next turn has what was said before; Esc stops as well.
    await it.page.get_by_text("Settings").click()
    await it.page.get_by_label("System message").fill("Be brief.")
    await it.page.get_by_label("Max tokens").fill("7")
    await it.page.get_by_label("Seed").fill("5")
    await it.send("And then?")
    (second,) = await manual.engine.wait_running()
    sampling = second.add.sampling
    assert (sampling.max_tokens, sampling.seed, round(sampling.temperature, 3)) == (7, 5, 0.7)
    prompt = bytes(second.prompt_ids).decode()
    parts = ("Be brief.", "What does", TEXT[:5], "And then")
    assert sorted(parts, key=prompt.index) == [*parts]
    await it.page.keyboard.press("Escape")
    await manual.engine.wait_for(lambda: len(manual.engine.aborted) == 2)
    await it.page.get_by_role("button", name="New chat").click()
    await expect(it.page.locator("article")).to_have_count(0)
    assert it.said == []


@needs_chromium
async def test_model_text_is_text(browser: Browser, make_stack: Callable[..., Any]) -> None:
    def evil(request: FakeRequest) -> int:
        return [*EVIL.encode(), EOS][len(request.output)]

    stack = await make_stack(next_token=evil)
    it = await visit(browser, stack)
    await it.send(EVIL)
    await expect(it.answer.locator(".text")).to_have_text(EVIL)
    await expect(it.page.locator(".user .text")).to_have_text(EVIL)
    await expect(it.page.locator("#announce")).to_have_text(
        f"Answer complete, {len(EVIL) + 1} tokens."
    )
    assert await it.page.locator("article img, article b").count() == 0
    assert await it.page.title() == "Pagewire"
    assert it.said == []
    # The policy would have held, too.
    for attempt in (
        "document.body.innerHTML = '<p>x</p>'",
        "document.body.append(Object.assign(document.createElement('script'), {text: 'x = 1'}))",
    ):
        with pytest.raises(Exception, match=r"TrustedHTML|TrustedScript"):
            await it.page.evaluate(attempt)
    blocked = await it.page.evaluate(
        """async () => {
            const seen = [];
            const both = new Promise((resolve) => {
                document.addEventListener("securitypolicyviolation", (event) => {
                    if (seen.push(event.effectiveDirective) === 2) resolve();
                });
            });
            const style = document.createElement("style");
            style.textContent = "body { display: none }";
            document.head.append(style);
            await fetch("http://localhost:1/").catch(() => {});
            await both;
            return [seen, getComputedStyle(document.body).display];
        }"""
    )
    assert blocked == [["style-src-elem", "connect-src"], "grid"]


@needs_chromium
async def test_an_engine_that_is_gone_is_told(browser: Browser, impatient: Stack) -> None:
    it = await visit(browser, impatient)
    await expect(it.page.locator("#status")).to_have_text("serving")
    await it.send("Hi")
    (request,) = await impatient.engine.wait_running()
    impatient.engine.emit({request.id: [ord("a")]})
    await expect(it.answer.locator(".text")).to_have_text("a")
    impatient.engine.die()
    await impatient.engine.kill()
    await expect(it.answer.get_by_role("alert")).to_contain_text("the request was lost")
    await expect(it.page.locator("#status")).to_have_text("not serving")
    # What was typed is there to be sent again, and refused in words.
    await expect(it.page.get_by_label("Message", exact=True)).to_have_value("Hi")
    await it.page.get_by_role("button", name="Send").click()
    await expect(it.answer.get_by_role("alert")).to_contain_text("engine")
    # Chromium itself notes the 503.
    assert [line for line in it.said if "503" not in line] == []


@needs_chromium
async def test_the_live_view_shows_what_the_engine_says(
    browser: Browser, make_stack: Callable[..., Any]
) -> None:
    # One whose only heartbeat is the test's.
    stack = await make_stack(auto=False, heartbeat_s=600, config={"engine_timeout": 600})
    it = await visit(browser, stack)
    await expect(it.page.locator("#status")).to_have_text("serving")
    stack.engine.heartbeat(
        num_running=3,
        num_waiting=2,
        num_free_blocks=NUM_BLOCKS - 600,
        num_free_cached_blocks=150,
    )
    for name, value in {
        "running": "3",
        "waiting": "2",
        "blocks-used": "600",
        "blocks-cached": "150",
        "blocks-free": "250",
    }.items():
        await expect(it.page.locator(f"#{name}")).to_have_text(value)
    # The page's percentiles are those of `pagewire top`.
    bounds, counts = (0.1, 0.2, 0.5, 1.0), (0, 3, 40, 5, 2)
    told = await it.page.evaluate(
        """async ([bounds, counts]) => {
            const { quantile } = await import("/web/histogram.js");
            return [0.01, 0.5, 0.9, 0.99].map((q) => quantile({ bounds, counts }, q));
        }""",
        [bounds, counts],
    )
    buckets = list(zip((*bounds, math.inf), itertools.accumulate(counts), strict=True))
    assert told == pytest.approx([quantile(buckets, q) for q in (0.01, 0.5, 0.9, 0.99)])
    assert told[-1] == math.inf
    label = f"Of {NUM_BLOCKS} KV blocks 600 are used, 150 cached, 250 free"
    await expect(it.page.get_by_role("img", name=label)).to_be_visible()
    # 192 cells
    assert await it.page.locator("#blocks .used").count() == 116
    assert await it.page.locator("#blocks .cached").count() == 29
    await expect(
        it.page.get_by_role("img", name="3 of 256 sequences running, 2 waiting")
    ).to_be_visible()
    assert it.said == []


@needs_chromium
async def test_a_small_screen_and_a_keyboard(
    browser: Browser, make_stack: Callable[..., Any], tmp_path: Path
) -> None:
    key, entry = new_key("someone", "acme", ("inference", "metrics"))
    (tmp_path / "keys").write_text(entry.line())
    stack = await make_stack(step_s=0.002, config={"api_keys": str(tmp_path / "keys")})
    it = await visit(browser, stack, width=360, color_scheme="dark")
    await expect(it.page.locator("#status")).to_have_text("needs an API key")
    await expect(it.page.locator("#key-note")).to_have_text("This server asks for an API key.")
    field = it.page.get_by_label("API key")
    await field.fill("pw-wrong")
    await field.press("Tab")
    await expect(it.page.locator("#key-note")).to_have_text("The server does not know this key.")
    await field.fill(key)
    await field.press("Tab")
    await expect(it.page.locator("#status")).to_have_text("serving")
    await it.page.get_by_label("Max tokens").fill("8")
    await it.send("Hi")
    await expect(it.answer.locator(".text")).to_have_text(TEXT[:8].strip())
    for view in ("Live", "Chat"):
        button = it.page.get_by_role("button", name=view, exact=True)
        await button.press("Enter")
        await expect(button).to_have_attribute("aria-pressed", "true")
        width = await it.page.evaluate("document.scrollingElement.scrollWidth")
        assert width == 360
    # Whatever can be used has a name.
    unnamed = await it.page.evaluate(
        """() => [...document.querySelectorAll("button, input, textarea")].filter((it) =>
            !it.labels?.length && !it.textContent.trim()).map((it) => it.outerHTML)"""
    )
    assert unnamed == []
    # Chromium itself notes each 401.
    assert [line for line in it.said if "401" not in line] == []
    await it.page.reload()
    await expect(it.page.locator("#status")).to_have_text("serving")


async def test_files_come_with_their_policy(stack: Stack) -> None:
    assert {route.path for route in page_routes()} >= {"/", "/web/app.js", "/web/style.css"}
    for route in page_routes():
        got = await get(stack, route.path)
        assert got.status_code == 200
        policy = got.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert got.headers["x-content-type-options"] == "nosniff"
        assert not re.search(r"(?:src|href)=[\"']?https?:|style=|innerHTML|\son\w+=", got.text)
    assert (await get(stack, "/web/routes.py")).status_code == 404
    assert (await get(stack, "/web/../live.py")).status_code == 404


async def test_the_page_can_be_switched_off(make_stack: Callable[..., Any], tmp_path: Path) -> None:
    stack = await make_stack(config={"web_page": False})
    for route in page_routes():
        assert (await get(stack, route.path)).status_code == 404
    assert (await get(stack, "/live")).status_code == 200
    _, entry = new_key("someone", "acme")
    (tmp_path / "keys").write_text(entry.line())
    config = {"web_page": False, "api_keys": str(tmp_path / "keys")}
    locked = await make_stack(config=config)
    assert (await get(locked, "/")).status_code == 401


async def test_live_tells_what_there_was(stack: Stack) -> None:
    before = (await get(stack, "/live")).json()
    assert (before["serving"], before["model"], before["totals"]["output_tokens"]) == (
        True,
        "fake",
        0,
    )
    sampling = common_pb2.SamplingParams(max_tokens=5)
    await asyncio.gather(*(stack.stream(prompt="abc", sampling_params=sampling) for _ in range(3)))
    after = (await get(stack, "/live")).json()
    assert after["at"] > before["at"]
    assert after["totals"] == {
        "prompt_tokens": 9,
        "output_tokens": 15,
        "prefix_cache_queries": 9,
        "prefix_cache_hits": 4,
        "preemptions": 0,
    }
    for name, count in (("ttft", 3), ("itl", 12), ("e2e", 3)):
        assert sum(after[name]["counts"]) == count
        assert len(after[name]["counts"]) == len(after[name]["bounds"]) + 1
    (engine,) = after["engines"]
    assert engine["address"] == stack.engine.address
    assert (engine["ready"], engine["max_num_seqs"]) == (True, 256)
    assert sum(after["blocks"][name] for name in ("used", "cached", "free")) == NUM_BLOCKS
    assert after["tokenizer"] == {"up": True, "calls": 0, "queue": 0}
