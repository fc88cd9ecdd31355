"""The page in a real browser, before a page that a test fills."""

import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI
from playwright.sync_api import Browser, Page, expect

from kvray.cli.page.server import Gate, make_app
from kvray.cli.page.state import CONTENTS, REQUESTS, STATUS, PageState
from kvray.config import load_config
from tests.browser import NO_BROWSER, PHONE, complaints_of, is_too_wide, open_browser, open_page
from tests.kit.web import app_served
from tests.unit.cli.answers import MARKUP, contents, requests, silent, status

pytestmark = pytest.mark.skipif(NO_BROWSER is not None, reason=f"{NO_BROWSER}")

PATIENT_MS = 20_000
SHARES = re.compile("host 60 %.*computed 40 %")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with open_browser() as made:
        yield made


def app_of(
    shown: PageState,
    token_file: Path | None = None,
    look: Callable[[int | None], None] = lambda number: None,
) -> FastAPI:
    path = None if token_file is None else str(token_file)
    config = load_config(overrides={"security.auth_token_file": path}, environ={})
    return make_app(shown, Gate(config, names=["localhost"], port=1), look)


@contextmanager
def opened(
    browser: Browser, app: FastAPI, *, may_complain: bool = False, **options: Any
) -> Iterator[Page]:
    """Have a browser open a page, which complains of nothing unless it may."""
    with app_served(app) as address, open_page(browser, **options) as page:
        complaints = complaints_of(page)
        page.goto(address)
        yield page
        assert may_complain or complaints == []


def fill(shown: PageState, *, ago: float = 0.0) -> PageState:
    """Have a tier answer each two seconds for 20, the last time `ago`."""
    now = time.time() - ago
    for second in range(0, 21, 2):
        shown.take({"part": STATUS, "answer": status(second)}, now - 20 + second)
    shown.take({"part": CONTENTS, "answer": contents()}, now)
    shown.take({"part": REQUESTS, "answer": requests(now)}, now)
    return shown


def shows(page: Page, text: str | re.Pattern[str]) -> None:
    expect(page.locator("body")).to_contain_text(text, timeout=PATIENT_MS)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_tier_at_work_is_shown_on_a_phone_as_text(browser, scheme):
    app = app_of(fill(PageState("prod")))
    with opened(browser, app, viewport=PHONE, color_scheme=scheme) as page:
        shows(page, "Tier prod: 2 nodes; the lookup knows 1,234 keys.")
        expect(page.locator("#figures")).to_contain_text("60%of prompt tokens")
        expect(page.locator("#figures")).to_contain_text("faults0")
        assert page.locator("#wrong").is_hidden(), "nothing is"
        assert "`" not in page.locator("body").inner_text()
        shows(page, f"on-aa {MARKUP}")
        shows(page, "00ff00ff")
        assert page.locator("img, script:not([src])").count() == 0
        share = page.locator("#requests .share i").nth(3)
        shade, _, colour = share.evaluate(
            "e => [getComputedStyle(e).backgroundColor, e.style.color = 'var(--s3)',"
            " getComputedStyle(e).color]"
        )
        assert shade == colour, "one colour means one source, here and in the charts"
        assert page.locator("#shares canvas").is_visible()
        assert page.locator("#curve canvas").is_visible()
        page.locator("#requests summary").first.click()
        shows(page, "160 of 320 tokens were hits")
        page.locator("#replica").select_option(f"on-bb {MARKUP}")
        expect(page.locator("#shares")).to_have_attribute("aria-label", SHARES)
        assert not is_too_wide(page)


def test_request_that_is_open_stays_open_and_keeps_the_focus(browser):
    shown = fill(PageState("prod"))
    with opened(browser, app_of(shown)) as page:
        summary = page.locator("#requests summary").last
        summary.focus()
        page.keyboard.press("Enter")
        told = requests(time.time())
        newest = {**told["requests"][0], "request_id": 8}
        shown.take({"part": REQUESTS, "answer": {**told, "requests": [newest]}}, time.time())
        shows(page, "160 of 320 tokens were hits")
        expect(page.locator("#requests details")).to_have_count(2, timeout=PATIENT_MS)
        expect(page.locator("#requests details[open] summary")).to_be_focused()
        page.locator("#requests details[open] summary").press("Enter")
        expect(page.locator("#requests details")).to_have_count(1, timeout=PATIENT_MS)


def test_request_is_found_by_its_number(browser):
    shown, looked = fill(PageState("prod")), list[int | None]()

    def look(number: int | None) -> None:
        looked.append(number)
        told = requests(time.time())
        found = {"id": str(number), "requests": told["requests"][:1], "says": ""}
        if number != 7:
            found |= {"requests": [], "says": f"No request {number} is known."}
        if number is not None:
            shown.take({"part": REQUESTS, "answer": {**told, "found": found}}, 0.0)

    with opened(browser, app_of(shown, look=look)) as page:
        shows(page, "Tier prod")
        field = page.get_by_label("Find a request by its number")
        field.fill("7")
        field.press("Enter")
        expect(page.locator("#found details")).to_have_count(1, timeout=PATIENT_MS)
        field.fill("099")
        field.press("Enter")
        shows(page, "No request 99 is known.")
        expect(page.locator("#found details")).to_have_count(0)
    assert {None, 7, 99} <= set(looked)


def test_what_is_old_or_silent_is_marked_with_its_age_and_what_to_do(browser):
    shown = fill(PageState("prod"), ago=30)
    shown.take({"part": STATUS, "trouble": "No tier; start it with `kvray up`."}, time.time() - 28)
    said = re.compile(
        r"The tier has not answered for \d+ (s|min): No tier; start it with kvray up\."
    )
    with opened(browser, app_of(shown)) as page:
        shows(page, re.compile(r"These figures are \d+ (s|min) old\."))
        expect(page.locator("#banner")).to_contain_text(said)
        expect(page.locator("body.gone")).to_have_count(1)
        assert page.title() == "GONE: prod kvray"
        assert page.locator("section.old").count() == page.locator("section").count()
        fill(shown)
        expect(page.locator("section.old")).to_have_count(0, timeout=PATIENT_MS)
        expect(page.locator("#banner")).to_be_empty()
        assert page.title() == "prod kvray"
        gone = status(22)
        gone["shards"][1] = silent("bb")
        shown.take({"part": STATUS, "answer": gone}, time.time())
        shows(page, "shard bb: does not answer")
        assert page.locator("#wrong").is_visible()
        expect(page.locator(".figure.bad")).to_contain_text("faults1at present")
        card = page.locator(".node.bad")
        expect(card).to_contain_text("unreachable: No answer in 2 s.")
        expect(card).to_contain_text("These figures are")
        assert page.locator("section.old").count() == 0


def test_server_that_is_gone_makes_everything_old(browser):
    with open_page(browser) as page:
        with app_served(app_of(fill(PageState("prod")))) as address:
            page.goto(address)
            shows(page, "Tier prod")
        shows(page, "this page's own process is gone or cut off")
        assert page.locator("section.old").count() == page.locator("section").count()


def test_page_before_the_first_answer_says_what_to_do_and_nothing_else(browser):
    shown = PageState("prod")
    with opened(browser, app_of(shown), viewport=PHONE) as page:
        shows(page, "Asking the tier.")
        shown.take({"part": STATUS, "trouble": "No tier; start it with `kvray up`."}, time.time())
        shows(page, "start it with kvray up")
        assert page.locator("main").is_hidden()
        assert not is_too_wide(page)


def test_page_of_a_tier_with_a_token_asks_for_it_once(browser, tmp_path):
    path = tmp_path / "token"
    path.write_text("a token of this very test")
    path.chmod(0o600)
    app = app_of(fill(PageState("prod")), path)
    with opened(browser, app, may_complain=True, viewport=PHONE) as page:
        field = page.get_by_label("The token of the tier")
        field.fill("quite another token")
        page.get_by_role("button", name="Show the page").click()
        shows(page, "That is not the token.")
        assert page.locator("main").is_hidden()
        field.fill("a token of this very test")
        field.press("Enter")
        shows(page, "Tier prod")
        page.reload()
        shows(page, "Tier prod")
        assert field.is_hidden()
