"""A real browser without a window, for what people see of the tier."""

import contextlib
import shutil
from collections.abc import Iterator

from playwright.sync_api import Page, sync_playwright

CHROMIUM = shutil.which("chromium")
NO_BROWSER = None if CHROMIUM else "there is no chromium (Debian's package chromium)"
_SIZE = {"width": 1600, "height": 720}


@contextlib.contextmanager
def open_page() -> Iterator[Page]:
    """Give an empty page of a browser of its own."""
    with sync_playwright() as playwright:
        # Without its sandbox, which root cannot have; it sees nothing but what runs here.
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        try:
            yield browser.new_page(viewport=_SIZE)
        finally:
            browser.close()
