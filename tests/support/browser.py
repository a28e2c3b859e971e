"""Chromium without a window, driven over its own protocol; skipped loudly where there is none."""

from __future__ import annotations

import os
import shutil
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest
from playwright.async_api import async_playwright, expect

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from playwright.async_api import Browser

WAIT_S = 60.0
_NAMES = ("chromium", "chromium-browser", "google-chrome")
_FLAGS = (
    "--no-sandbox",  # root has none
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


def find_chromium() -> str | None:
    return next(filter(None, map(shutil.which, _NAMES)), None)


needs_chromium = pytest.mark.skipif(
    find_chromium() is None, reason="needs Chromium (on Debian: apt-get install chromium)"
)


@asynccontextmanager
async def open_chromium() -> AsyncIterator[Browser]:
    expect.set_options(timeout=WAIT_S * 1000)
    path = find_chromium()
    assert path is not None
    environment = {name: value for name, value in os.environ.items() if "proxy" not in name.lower()}
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(
            executable_path=path, args=list(_FLAGS), env=environment
        )
        try:
            yield browser
        finally:
            await browser.close()
