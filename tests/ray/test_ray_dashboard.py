"""What an operator sees of the tier in Ray's dashboard, in a real browser."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from tests.browser import NO_BROWSER, open_browser, open_page
from tests.ray.command_line import Shell, open_shell

pytestmark = [
    pytest.mark.ray,
    pytest.mark.skipif(NO_BROWSER is not None, reason=f"{NO_BROWSER}"),
]

PATIENT_MS = 60_000


@pytest.fixture(scope="module")
def shell() -> Iterator[Shell]:
    """A user whose tier is up on a local Ray with its dashboard."""
    with open_shell("dash") as shell:
        done = shell.run("up", "--dashboard")
        assert done.returncode == 0, done.stderr
        yield shell
        done = shell.run("down")
        assert done.returncode == 0, done.stderr
        # Ray's dashboard itself leaves an empty directory of Python's multiprocessing.
        assert [path for path in shell.leftovers() if "/pymp-" not in path] == []


@pytest.fixture(scope="module")
def actors_page(shell: Shell, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    """The page of actors, after the cluster's token was typed in."""
    (state,) = shell.directory.glob("kvray-*/ray.json")
    local = json.loads(state.read_text())
    with open_browser() as browser, open_page(browser) as page:
        page.goto(f"{local['dashboard_url']}/#/actors")
        page.get_by_label("Authentication Token").last.fill(local["token"])
        page.get_by_role("button", name="submit").click()
        expect(page.locator("body")).to_contain_text("kvray-lookup", timeout=PATIENT_MS)
        yield page


def rows_of(page: Page) -> list[str]:
    return [" ".join(row.inner_text().split()) for row in page.locator("tbody tr").all()]


def test_actors_say_what_and_where_they_are(actors_page: Page, shell: Shell) -> None:
    rows = rows_of(actors_page)
    (lookup,) = [row for row in rows if "kvray-lookup" in row]
    (shard,) = [row for row in rows if "kvray-shard-" in row]
    (supervisor,) = [row for row in rows if "kvray-supervisor" in row]
    assert f"LookupActor kvray-lookup Lookup({shell.cluster_name}) ALIVE" in lookup
    assert f"SupervisorActor kvray-supervisor Supervisor({shell.cluster_name}) ALIVE" in supervisor
    found = re.search(r"ShardActor kvray-shard-(\w+) Shard\((\w+)\) ALIVE", shard)
    assert found is not None, shard
    assert found[1] == found[2]


def test_an_actor_can_be_found_by_its_name(actors_page: Page) -> None:
    actors_page.get_by_label("Name", exact=True).fill("kvray-shard-")
    expect(actors_page.locator("tbody tr")).to_have_count(1, timeout=PATIENT_MS)
    assert "ShardActor" in rows_of(actors_page)[0]
    actors_page.get_by_label("Name", exact=True).fill("")


def test_screenshot_is_taken(
    actors_page: Page, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    directory = Path(request.config.getoption("screenshots") or tmp_path)
    actors_page.screenshot(path=directory / "ray_dashboard_actors.png")
    assert (directory / "ray_dashboard_actors.png").stat().st_size > 10_000
