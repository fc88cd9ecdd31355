"""The page of `kvray dashboard serve` in a real browser: a tier that fills, goes and comes."""

import contextlib
import random
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect

from kvray.lab.chaos.machine import Machine
from tests.browser import NO_BROWSER, PHONE, complaints_of, is_too_wide, open_browser, open_page
from tests.kit.ray.cluster import (
    SETTINGS,
    TwoNodes,
    again_and_again,
    open_tier,
    prompts_that_begin_alike,
)

pytestmark = [
    pytest.mark.ray,
    pytest.mark.long,
    pytest.mark.skipif(NO_BROWSER is not None, reason=f"{NO_BROWSER}"),
]

PATIENT_MS = 600_000
WITH_DISK = {
    **SETTINGS,
    "arena": {**SETTINGS["arena"], "capacity": "24MiB", "slab": "4MiB"},
    "connector": {**SETTINGS["connector"], "stage_wait_s": 2.0},
    "nvme": {"capacity": "256MiB", "segment": "16MiB", "free_reserve": "1MiB"},
}


@pytest.fixture
def browser() -> Iterator[Browser]:
    with open_browser() as made:
        yield made


@contextlib.contextmanager
def served(machine: Machine, config_path: Path) -> Iterator[str]:
    """Give the address of a page, as somebody on the head has started it."""
    command = [sys.executable, "-m", "kvray", "dashboard", "serve", "--port", "0"]
    with subprocess.Popen(
        [*command, "-c", str(config_path)], env=machine.environ(), stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline().split()[4]
            process.send_signal(signal.SIGINT)
            assert process.wait(timeout=30) == 0
        finally:
            process.kill()


@contextlib.contextmanager
def load(tier: TwoNodes) -> Iterator[None]:
    """Have a replica on each node answer prompts of which some begin alike, more than fit."""
    prompts, replicas = prompts_that_begin_alike(), [tier.spawn(n, num_blocks=64) for n in range(2)]

    def ask(_: int) -> None:
        random.choice(replicas).generate([next(prompts)], max_tokens=2)

    try:
        for replica in replicas:
            replica.wait_ready()
        with again_and_again(ask, pause_s=0.05):
            yield
    finally:
        for replica in replicas:
            replica.kill()


def shows(page: Page, place: str, text: str | re.Pattern[str]) -> None:
    expect(page.locator(place).first).to_contain_text(text, timeout=PATIENT_MS)


def has_two_nodes(page: Page) -> None:
    expect(page.locator(".node:not(.bad)")).to_have_count(2, timeout=PATIENT_MS)


def test_tier_under_load_is_shown_also_on_a_phone_and_in_the_dark(
    machine, browser, request, tmp_path
):
    has_pictures = request.config.getoption("screenshots")
    directory = Path(has_pictures or tmp_path)
    with (
        open_tier(machine, "prod", WITH_DISK) as tier,
        served(machine, tier.config_path) as address,
        open_page(browser, viewport={"width": 1280, "height": 800}) as page,
        open_page(browser, viewport=PHONE, color_scheme="dark") as phone,
    ):
        complaints = [complaints_of(page), complaints_of(phone)]
        page.goto(address)
        has_two_nodes(page)
        shows(page, "#links", re.compile("nixl|object_ref"))
        with load(tier):
            shows(page, "#replicas", "on-node-0")
            shows(page, "#prefixes", "Most used of")
            expect(page.locator("#requests details")).to_have_count(10, timeout=PATIENT_MS)
            expect(page.locator("#shares")).to_have_attribute(
                "aria-label", re.compile(r"host [1-9]\d* %"), timeout=PATIENT_MS
            )
            if has_pictures:  # on which the curve is to be
                drawn = re.compile("of prompt tokens would hit")
                expect(page.locator("#curve-says")).to_contain_text(drawn, timeout=400_000)
            page.locator("#requests summary").first.click()
            shows(page, "#requests details[open]", "tokens were hits")
            page.screenshot(path=directory / "page.png", full_page=True)
            phone.goto(page.url)
            expect(phone.locator("main")).to_be_visible(timeout=PATIENT_MS)
            phone.wait_for_timeout(3000)
            phone.screenshot(path=directory / "page_phone.png")
            assert not is_too_wide(phone)
            assert not is_too_wide(page)
            assert complaints == [[], []]
