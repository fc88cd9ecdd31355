"""The page in a real browser, before a page that a test fills."""

import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import uvicorn
from playwright.sync_api import Browser, Page, expect

from kvray.cli.page.server import Gate, make_app
from kvray.cli.page.state import CONTENTS, REQUESTS, STATUS, PageState
from kvray.config import load_config
from tests.browser import NO_BROWSER, PHONE, complaints_of, is_too_wide, open_browser, open_page
from tests.unit.cli.answers import MARKUP, contents, requests, silent, status

pytestmark = pytest.mark.skipif(NO_BROWSER is not None, reason=f"{NO_BROWSER}")

PATIENT_MS = 20_000
SHARES = re.compile("host 60 %.*computed 40 %")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with open_browser() as made:
        yield made


@contextmanager
def served(shown: PageState, token_file: Path | None = None) -> Iterator[str]:
    """Serve the page of a page; give its address."""
    path = None if token_file is None else str(token_file)
    config = load_config(overrides={"security.auth_token_file": path}, environ={})
    app = make_app(shown, Gate(config, names=["localhost"], port=1), lambda: None)
    server = uvicorn.Server(
        uvicorn.Config(app, port=0, loop="asyncio", log_level="error", lifespan="off")
    )
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            time.sleep(0.02)
        port = server.servers[0].sockets[0].getsockname()[1]
        yield f"http://127.0.0.1:{port}/"
    finally:
        server.should_exit = True
        thread.join()


def fill(shown: PageState, *, ago: float = 0.0, seconds: int = 20) -> None:
    """Have a tier answer each two seconds, the last time `ago`."""
    now = time.time() - ago
    for second in range(0, seconds + 1, 2):
        shown.take({"part": STATUS, "answer": status(second)}, now - seconds + second)
    shown.take({"part": CONTENTS, "answer": contents()}, now)
    shown.take({"part": REQUESTS, "answer": requests(now)}, now)


def shows(page: Page, text: str | re.Pattern[str]) -> None:
    expect(page.locator("body")).to_contain_text(text, timeout=PATIENT_MS)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_tier_at_work_is_shown_on_a_phone_as_text_and_nothing_complains(browser, scheme):
    shown = PageState("prod")
    fill(shown)
    with (
        served(shown) as address,
        open_page(browser, viewport=PHONE, color_scheme=scheme) as page,
    ):
        complaints = complaints_of(page)
        page.goto(address)
        shows(page, "Tier prod, last 10 s: 200 prompt tokens/s")
        shows(page, f"on-aa {MARKUP}")
        shows(page, "00ff00ff")
        assert page.locator("img, script:not([src])").count() == 0
        assert page.locator("#shares canvas").is_visible()
        assert page.locator("#curve canvas").is_visible()
        page.locator("#requests summary").first.click()
        shows(page, "160 of 320 tokens were hits")
        page.locator("#replica").select_option(f"on-bb {MARKUP}")
        expect(page.locator("#shares")).to_have_attribute("aria-label", SHARES)
        assert not is_too_wide(page)
        assert complaints == []


def test_request_that_is_open_stays_open_and_keeps_the_focus(browser):
    shown = PageState("prod")
    fill(shown)
    with served(shown) as address, open_page(browser) as page:
        page.goto(address)
        summary = page.locator("#requests summary").last
        summary.focus()
        page.keyboard.press("Enter")
        told = requests(time.time())
        newest = {**told["requests"][0], "request_id": 8}
        earlier = requests(time.time())["requests"]
        shown.take(
            {"part": REQUESTS, "answer": {**told, "requests": [newest, *earlier]}}, time.time()
        )
        shows(page, "160 of 320 tokens were hits")
        expect(page.locator("#requests details")).to_have_count(3, timeout=PATIENT_MS)


def test_old_figures_are_marked_with_their_age_and_what_to_do(browser):
    shown = PageState("prod")
    fill(shown, ago=30)
    shown.take({"part": STATUS, "trouble": "No tier; start it with `kvray up`."}, time.time() - 28)
    with served(shown) as address, open_page(browser) as page:
        page.goto(address)
        shows(
            page, re.compile(r"These figures are 3\d s old\. No tier; start it with `kvray up`\.")
        )
        expect(page.locator("#banner")).to_contain_text("No answer from the tier since")
        assert page.locator("section.old").count() == page.locator("section").count()
        fill(shown)
        expect(page.locator("section.old")).to_have_count(0, timeout=PATIENT_MS)
        expect(page.locator("#banner")).to_be_empty()


def test_silent_shard_is_told_from_the_others(browser):
    shown = PageState("prod")
    fill(shown)
    gone = status(22)
    gone["shards"][1] = silent("bb")
    shown.take({"part": STATUS, "answer": gone}, time.time())
    with served(shown) as address, open_page(browser) as page:
        page.goto(address)
        shows(page, "shard bb: does not answer")
        card = page.locator(".node.bad")
        expect(card).to_contain_text("unreachable: No answer in 2 s.")
        expect(card).to_contain_text("These figures are")
        assert page.locator("section.old").count() == 0


def test_server_that_is_gone_makes_everything_old(browser):
    shown = PageState("prod")
    fill(shown)
    with open_page(browser) as page:
        with served(shown) as address:
            page.goto(address)
            shows(page, "Tier prod")
        shows(page, "this page's own process is gone or cut off")
        assert page.locator("section.old").count() == page.locator("section").count()


def test_page_before_the_first_answer_says_what_to_do_and_nothing_else(browser):
    shown = PageState("prod")
    with served(shown) as address, open_page(browser, viewport=PHONE) as page:
        complaints = complaints_of(page)
        page.goto(address)
        shows(page, "Asking the tier.")
        shown.take({"part": STATUS, "trouble": "No tier; start it with `kvray up`."}, time.time())
        shows(page, "start it with `kvray up`")
        assert page.locator("main").is_hidden()
        assert not is_too_wide(page)
        assert complaints == []


def test_page_of_a_tier_with_a_token_asks_for_it_once(browser, tmp_path):
    path = tmp_path / "token"
    path.write_text("a token of this very test")
    path.chmod(0o600)
    shown = PageState("prod")
    fill(shown)
    with served(shown, path) as address, open_page(browser, viewport=PHONE) as page:
        page.goto(address)
        field = page.get_by_label("The token of the tier")
        field.fill("quite another token")
        page.get_by_role("button").click()
        shows(page, "That is not the token.")
        assert page.locator("main").is_hidden()
        field.fill("a token of this very test")
        field.press("Enter")
        shows(page, "Tier prod")
        page.reload()
        shows(page, "Tier prod")
        assert field.is_hidden()
