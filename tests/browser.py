"""A real browser without a window, for what people see of the tier."""

import contextlib
import shutil
from collections.abc import Iterator
from typing import Any

from playwright.sync_api import Browser, Page, sync_playwright

CHROMIUM = shutil.which("chromium")
NO_BROWSER = None if CHROMIUM else "there is no chromium (Debian's package chromium)"
_SIZE = {"width": 1600, "height": 720}
PHONE = {"width": 375, "height": 800}


@contextlib.contextmanager
def open_browser() -> Iterator[Browser]:
    """Give a browser of its own."""
    with sync_playwright() as playwright:
        # Without its sandbox, which root cannot have; it sees nothing but what runs here.
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        try:
            yield browser
        finally:
            browser.close()


@contextlib.contextmanager
def open_page(browser: Browser, **options: Any) -> Iterator[Page]:
    """Give an empty page for a while; `options` are those of Playwright's contexts."""
    context = browser.new_context(**{"viewport": _SIZE, **options})
    try:
        yield context.new_page()
    finally:
        context.close()


def complaints_of(page: Page) -> list[str]:
    """Return a list that grows by what the page writes to its console, and by its errors."""
    found: list[str] = []
    page.on("console", lambda message: found.append(message.text))
    page.on("pageerror", lambda error: found.append(str(error)))
    return found


def is_too_wide(page: Page) -> bool:
    """Return whether a reader would have to scroll sideways."""
    return bool(page.evaluate("document.documentElement.scrollWidth > innerWidth"))
