"""The page of `kvray dashboard serve` in a real browser: a tier that fills, freezes and goes."""

import contextlib
import random
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect

from kvray.lab.chaos.machine import Machine
from kvray.reference.replica import Replica
from tests.browser import NO_BROWSER, PHONE, complaints_of, is_too_wide, open_browser, open_page
from tests.ray.cluster import CONNECTOR, SETTINGS, TwoNodes, open_tier

pytestmark = [
    pytest.mark.ray,
    pytest.mark.skipif(NO_BROWSER is not None, reason=f"{NO_BROWSER}"),
]

PATIENT_MS = 600_000
TOKENS_PER_BLOCK = 32
WITH_DISK = {
    **SETTINGS,
    "arena": {**SETTINGS["arena"], "capacity": "24MiB", "slab": "4MiB"},
    "connector": {**SETTINGS["connector"], "stage_wait_s": 2.0},
    "nvme": {"capacity": "256MiB", "segment": "16MiB", "free_reserve": "1MiB"},
}


@pytest.fixture(scope="module")
def tier(machine: Machine) -> Iterator[TwoNodes]:
    with open_tier(machine, "page", WITH_DISK) as nodes:
        yield nodes


@pytest.fixture(scope="module")
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


@pytest.fixture(scope="module")
def page(tier: TwoNodes, browser: Browser) -> Iterator[Page]:
    with served(tier.machine, tier.config_path) as address, open_page(browser) as made:
        made.complaints = complaints_of(made)  # type: ignore[attr-defined]
        made.goto(address)
        yield made


@contextlib.contextmanager
def load(tier: TwoNodes) -> Iterator[None]:
    """Have a replica on each node answer prompts of which some begin alike, more than fit."""
    replicas: list[Replica] = []
    stopping = threading.Event()
    options: dict[str, Any] = {"tokens_per_block": TOKENS_PER_BLOCK, "num_blocks": 64}
    for number, node in enumerate(tier.nodes):
        environ = {**tier.engine_environ(node), "KVRAY_CONNECTOR__REPLICA": f"replica-{number}"}
        options |= {"model": "tiny:11", "connector": CONNECTOR, "num_threads": 1}
        replicas.append(Replica.spawn(f"on-node-{number}", env=environ, **options))

    def drive() -> None:
        chance = random.Random(7)
        heads = [[chance.randrange(3, 250) for _ in range(480)] for _ in range(96)]
        while not stopping.wait(0.05):
            head = heads[int(len(heads) * chance.random() ** 2)]
            tail = [chance.randrange(3, 250) for _ in range(64)]
            chance.choice(replicas).generate([[*head, *tail]], max_tokens=2)

    thread = threading.Thread(target=drive)
    try:
        for replica in replicas:
            replica.wait_ready()
        thread.start()
        yield
    finally:
        stopping.set()
        if thread.ident is not None:
            thread.join()
        for replica in replicas:
            replica.kill()


def shows(page: Page, place: str, text: str | re.Pattern[str]) -> None:
    expect(page.locator(place).first).to_contain_text(text, timeout=PATIENT_MS)


def is_fit_for_people(page: Page, browser: Browser, picture: Path | None = None) -> None:
    """Check that nothing complains, nor is too wide, also on a phone and in the dark."""
    with open_page(browser, viewport=PHONE, color_scheme="dark") as phone:
        complaints = complaints_of(phone)
        phone.goto(page.url)
        expect(phone.locator("main")).to_be_visible(timeout=PATIENT_MS)
        phone.wait_for_timeout(3000)
        assert not is_too_wide(phone)
        assert complaints == []
        if picture is not None:
            phone.screenshot(path=picture)
    assert not is_too_wide(page)
    assert page.complaints == []  # type: ignore[attr-defined]


@pytest.mark.long
def test_empty_tier_says_what_to_do_next(page: Page, browser: Browser) -> None:
    expect(page.locator(".node:not(.bad)")).to_have_count(2, timeout=PATIENT_MS)
    shows(page, "#replicas", "No replica has registered yet. Give each engine the connector")
    shows(page, "#prefixes", "Nothing is stored yet")
    shows(page, "#requests-says", "No request is known")
    shows(page, "#links", re.compile("nixl|object_ref"))
    is_fit_for_people(page, browser)


@pytest.mark.long
def test_tier_under_load_is_shown_and_faults_are_told_from_it(
    tier: TwoNodes, page: Page, browser: Browser, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    directory = Path(request.config.getoption("screenshots") or tmp_path)
    with load(tier):
        shows(page, "#replicas", "replica-0")
        shows(page, "#prefixes", "Most used of namespace")
        expect(page.locator("#requests details")).to_have_count(10, timeout=PATIENT_MS)
        expect(page.locator("#shares")).to_have_attribute(
            "aria-label", re.compile(r"host [1-9]\d* %"), timeout=PATIENT_MS
        )
        if request.config.getoption("screenshots"):  # on which the curve is to be
            drawn = re.compile("of prompt tokens would hit")
            expect(page.locator("#curve-says")).to_contain_text(drawn, timeout=400_000)
        page.locator("#requests summary").first.click()
        shows(page, "#requests details[open]", "tokens were hits")
        page.screenshot(path=directory / "page.png", full_page=True)
        is_fit_for_people(page, browser, directory / "page_phone.png")

        # Of a frozen lookup the page says so, and goes on with the shards.
        with frozen(tier.machine, "Lookup"):
            shows(page, "#faults", re.compile("kvray-lookup: does not answer.*Seen since"))
            shows(page, "#lookup", "The lookup does not answer")
            assert page.locator(".node.bad, section.old").count() == 0
            is_fit_for_people(page, browser)
        shows(page, "#faults", "No fault is known")

        # The last figures of a frozen shard are told from those of the present.
        with frozen(tier.machine, "Shard"):
            shows(page, ".node.bad", "unreachable")
            shows(page, ".node.bad", re.compile(r"These figures are \d+ s old"))
        shows(page, "#faults", "No fault is known")


@contextlib.contextmanager
def frozen(machine: Machine, kind: str) -> Iterator[None]:
    """Have an actor of that kind stand still; its supervisor may replace it."""
    process = machine.actors(kind)[0]
    process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        with contextlib.suppress(Exception):
            process.send_signal(signal.SIGCONT)


@pytest.mark.long
def test_page_of_a_tier_that_goes_and_comes_says_so(machine: Machine, browser: Browser) -> None:
    config_path = machine.write_config(SETTINGS, cluster_name="away")
    with served(machine, config_path) as address, open_page(browser, viewport=PHONE) as page:
        complaints = complaints_of(page)
        page.goto(address)
        shows(page, "#banner", "start the tier with `kvray up`")
        assert page.locator("main").is_hidden()
        with open_tier(machine, "away"):
            expect(page.locator(".node:not(.bad)")).to_have_count(2, timeout=PATIENT_MS)
        shows(page, "#banner", "start the tier with `kvray up`")
        shows(page, ".age", re.compile(r"These figures are \d+ s old"))
        assert not is_too_wide(page)
        assert complaints == []
