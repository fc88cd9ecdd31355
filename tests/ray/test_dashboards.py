"""A tier under load as Prometheus, our Grafana dashboard and Ray's own dashboard show it."""

import contextlib
import json
import math
import random
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from playwright.sync_api import Page, expect

from kvray.config import environ_for
from kvray.dashboards import ALERTS, DASHBOARD, package_file
from kvray.reference.replica import Replica
from kvray.store import Arena
from tests.browser import NO_BROWSER, open_browser, open_page
from tests.ray.cluster import CONNECTOR
from tests.ray.command_line import Shell, open_shell
from tests.waiting import HANG_S, wait_for

pytestmark = [
    pytest.mark.ray,
    pytest.mark.skipif(
        shutil.which("prometheus") is None, reason="Prometheus (Debian: prometheus) is not there"
    ),
]

PROMPT_TOKENS = 320
SETTINGS: dict[str, Any] = {
    "arena": {"capacity": "2MiB", "slab": "1MiB", "slot_min": "16KiB", "lock_wait_s": 0.05},
    "connector": {"model_key": "tiny", "stage_wait_s": 2.0},
    "nvme": {
        "capacity": "64MiB",
        "segment": "4MiB",
        "free_reserve": "1MiB",
        "high_watermark": 0.5,
        "admission": "all",
        "write_gib_per_day": 100,
    },
}
ENVIRON = {"RAY_metrics_report_interval_ms": "2000"}
WINDOW = "60s"
DONE = (
    'hit_tokens_total{tier="host"}',
    'hit_tokens_total{tier="nvme"}',
    'miss_tokens_total{reason="not_stored"}',
    'stored_blocks_total{tier="host"}',
    'evicted_blocks_total{tier="host"}',
    "demoted_blocks_total",
    "promoted_blocks_total",
    "nvme_written_bytes_total",
    "nvme_read_bytes_total",
    'moved_bytes_total{transport="nvme",direction="in"}',
    "stage_count_total",
    "lease_count_total",
    "plan_count_total",
    "announcements_total",
    "lookup_keys",
)
"""What a tier has done that was under load."""
LOAD_PAUSE_S = 0.25
BUSY_S = 5.0
PATIENT_MS = 1000 * HANG_S


class Prometheus:
    """A Prometheus that scrapes what Ray's service discovery names."""

    def __init__(self, directory: Path, discovery: Path) -> None:
        directory.mkdir()
        settings = {
            "global": {"scrape_interval": "4s", "evaluation_interval": "4s"},
            "rule_files": [str(package_file(ALERTS))],
            "scrape_configs": [
                {
                    "job_name": "ray",
                    "scrape_timeout": "4s",
                    "file_sd_configs": [{"files": [str(discovery)], "refresh_interval": "1s"}],
                }
            ],
        }
        config = directory / "prometheus.yml"
        config.write_text(yaml.safe_dump(settings))
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{probe.getsockname()[1]}"
        self._url = f"http://{address}/api/v1/"
        command = [
            "prometheus",
            f"--config.file={config}",
            f"--storage.tsdb.path={directory / 'data'}",
            f"--web.listen-address={address}",
        ]
        with (directory / "log").open("wb") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log)

    def query(self, expression: str) -> list[dict[str, Any]]:
        """Return the vector that `expression` is now."""
        asked = urllib.parse.urlencode({"query": expression})
        answer = self._get(f"query?{asked}")
        return list(answer["result"])

    def values(self, expression: str) -> list[float]:
        """Return its values that are numbers."""
        values = (float(one["value"][1]) for one in self.query(expression))
        return [value for value in values if not math.isnan(value)]

    def total(self, metric: str, **labels: str) -> int:
        """Return the sum of a metric's series."""
        chosen = ",".join(f'{name}="{value}"' for name, value in labels.items())
        return round(sum(self.values(f"sum(ray_kvray_{metric}{{{chosen}}})")))

    def rules(self) -> list[dict[str, Any]]:
        """Return the alerts, with how their last evaluation went."""
        return [rule for group in self._get("rules")["groups"] for rule in group["rules"]]

    def close(self) -> None:
        self.process.kill()
        self.process.wait()

    def _get(self, path: str) -> Any:
        try:
            with urllib.request.urlopen(self._url + path, timeout=10) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{path}: {error.read().decode()}") from None
        except OSError:
            return {"result": [], "groups": []}  # it has just been started


class Load:
    """Prompts that miss, hit in memory, and hit on disk, one after the other until it is closed.

    They come no faster than a slow disk takes what leaves memory: of a prompt whose first block
    has left before it was written, nothing can be a hit.
    """

    def __init__(self, replica: Replica) -> None:
        self._replica = replica
        self._stopping = threading.Event()
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def close(self) -> None:
        self._stopping.set()
        self._thread.join()
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        number = 0
        try:
            while not self._stopping.is_set():
                # A new one, one that has left the engine's pool, and one that has left memory.
                for which in (number, number - 2, number - 20):
                    if which >= 0:
                        self._replica.generate([make_prompt(which)], max_tokens=1)
                number += 1
                self._stopping.wait(LOAD_PAUSE_S)
        except Exception as error:  # noqa: BLE001 - the test's thread raises it
            self._error = error


def make_prompt(number: int) -> list[int]:
    random_ = random.Random(number)
    return [random_.randrange(3, 250) for _ in range(PROMPT_TOKENS)]


class Watched:
    """A tier on a local Ray with a dashboard, an engine, and the Prometheus that looks on."""

    def __init__(self, shell: Shell, replica: Replica, prometheus: Prometheus) -> None:
        self.shell = shell
        self.replica = replica
        self.prometheus = prometheus

    def status(self) -> dict[str, Any]:
        done = self.shell.run("status", "--json")
        assert done.returncode == 0, done.stderr
        return dict(json.loads(done.stdout))

    def shard(self) -> dict[str, Any]:
        (shard,) = self.status()["shards"]
        return dict(shard)

    def counters(self) -> list[dict[str, int]]:
        return [rank["counters"] for rank in self.shard().get("replicas", [])]

    def keep_arena_busy(self) -> None:
        """Hold the arena's lock longer than the engine waits, so that it drops blocks."""
        with contextlib.closing(Arena(self.shell.node_dir, lock_wait_s=BUSY_S)) as arena:
            for _ in range(10):
                with arena.section(BUSY_S) as entered:
                    assert entered
                    time.sleep(0.3)
                time.sleep(0.1)

    def agree(self, names: Collection[str] | None = None) -> None:
        """Return once status and Prometheus say the same of all `names`; fail if they never do."""
        deadline = time.monotonic() + HANG_S
        while True:
            pairs = compared(self.status(), self.prometheus)
            left = {
                name: pair
                for name, pair in pairs.items()
                if pair[0] != pair[1] and (names is None or name in names)
            }
            if not left:
                return
            assert time.monotonic() < deadline, left
            time.sleep(0.5)


@contextlib.contextmanager
def counting_router(shell: Shell) -> Iterator[None]:
    """Have a process of the tier's Ray export what a router counts, as one of Serve's would."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.ray.counting_router"],
        stdin=subprocess.PIPE,
        env=shell.environ,
    )
    try:
        yield
    finally:
        process.kill()
        process.communicate()


@pytest.fixture(scope="module")
def watched() -> Iterator[Watched]:
    with open_shell("metrics") as shell, contextlib.ExitStack() as stack:
        config = shell.directory / "kvray.yaml"
        nvme = {**SETTINGS["nvme"], "dir": str(shell.directory / "disk")}
        values = {"cluster_name": shell.cluster_name, **SETTINGS, "nvme": nvme}
        config.write_text(yaml.safe_dump(values))
        del shell.environ["KVRAY_ARENA__CAPACITY"]
        shell.environ |= {"KVRAY_CONFIG": str(config), **ENVIRON}
        up = shell.run("up", "--dashboard")
        assert up.returncode == 0, up.stderr
        stack.callback(shell.run, "down")
        (ray_dir,) = shell.directory.glob("kvray-*/ray")
        discovery = ray_dir / "prom_metrics_service_discovery.json"
        prometheus = Prometheus(shell.directory / "prometheus", discovery)
        stack.callback(prometheus.close)
        replica = Replica.start(
            "engine",
            env=environ_for(config),
            model="tiny:11",
            tokens_per_block=32,
            num_blocks=24,
            connector=CONNECTOR,
            num_threads=1,
        )
        stack.callback(replica.kill)
        stack.enter_context(counting_router(shell))
        yield Watched(shell, replica, prometheus)


def expressions() -> list[str]:
    """Return every expression of the dashboard, its variables filled in as Grafana does."""
    panels = json.loads(package_file(DASHBOARD).read_text())["panels"]
    asked = [target["expr"] for panel in panels for target in panel.get("targets", [])]
    filled = {"$__rate_interval": WINDOW, "$node": ".*", "$replica": ".*"}
    filled |= {"$cluster_name": ".+"}
    for name, value in filled.items():
        asked = [one.replace(name, value) for one in asked]
    return asked


def test_every_expression_of_the_dashboard_returns_data_under_load(watched: Watched) -> None:
    load = Load(watched.replica)
    try:
        left = [f"ray_kvray_{one} >= 1" for one in DONE]
        deadline = time.monotonic() + HANG_S
        while left and time.monotonic() < deadline:
            left = [one for one in left if not watched.prometheus.values(one)]
            time.sleep(0.5)
        assert left == [], f"the load is to do all this: {watched.shard()}"
        watched.keep_arena_busy()
        left = expressions()
        assert len(left) > 30
        deadline = time.monotonic() + HANG_S
        while left and time.monotonic() < deadline:
            left = [one for one in left if not watched.prometheus.values(one)]
            time.sleep(0.5)
        assert left == [], f"no data: {watched.shard()}"
    finally:
        load.close()


def test_the_alerts_are_evaluated_and_none_fires_on_a_healthy_tier(watched: Watched) -> None:
    wait_for(
        lambda: [rule["health"] for rule in watched.prometheus.rules()] == ["ok"] * 5,
        "evaluating the alerts",
    )
    states = {rule["name"]: rule["state"] for rule in watched.prometheus.rules()}
    assert states["KvrayCorruptBlocks"] == states["KvrayPartDown"] == "inactive"


def test_status_agrees_with_prometheus(watched: Watched) -> None:
    # Whether or not the tests before this one have run, there is something to agree on.
    for number in (1000, 1001, 1002, 1000):
        watched.replica.generate([make_prompt(number)], max_tokens=1)

    watched.agree()
    assert sum(one.get("hit_tokens", 0) for one in watched.counters()) > 0


def compared(status: dict[str, Any], prometheus: Prometheus) -> dict[str, tuple[int, int]]:
    """Return name -> (what `kvray status --json` says, what Prometheus says)."""
    (shard,) = status["shards"]
    counters = [rank["counters"] for rank in shard["replicas"]]

    def counted(name: str) -> int:
        return sum(one.get(name, 0) for one in counters)

    arena, nvme, total = shard["arena"], shard["nvme"], prometheus.total
    reasons = {name for one in counters for name in one if name.startswith("miss_tokens_")}
    ways = {"host": "hit_tokens_from_host", "nvme": "hit_tokens_from_nvme"}
    both = {
        "requests": (counted("requests"), total("requests_total")),
        "prompt": (counted("prompt_tokens"), total("prompt_tokens_total")),
        "own": (counted("local_tokens"), total("own_tokens_total")),
        "hits": (counted("hit_tokens"), total("hit_tokens_total")),
        "stages": (counted("stage_calls"), total("stage_count_total")),
        "loaded": (counted("loaded_blocks"), total("engine_blocks_total", action="loaded")),
        "resident": (arena["resident_bytes"], total("resident_bytes", tier="host")),
        "capacity": (arena["capacity_bytes"], total("capacity_bytes", tier="host")),
        "on disk": (
            sum(one["bytes"] for one in nvme["namespaces"]),
            total("resident_bytes", tier="nvme"),
        ),
        "demoted": (nvme["demoted_blocks"], total("demoted_blocks_total")),
        "promoted": (nvme["promoted_blocks"], total("promoted_blocks_total")),
        "written": (nvme["written_bytes"], total("nvme_written_bytes_total")),
        "read": (nvme["read_bytes"], total("nvme_read_bytes_total")),
        "known": (status["lookup"]["keys"], total("lookup_keys")),
    }
    for reason in sorted(reasons):
        label = reason.removeprefix("miss_tokens_")
        both[reason] = counted(reason), total("miss_tokens_total", reason=label)
    for tier, name in ways.items():
        both[name] = counted(name), total("hit_tokens_total", tier=tier)
    for kind in ("stored", "evicted", "dropped", "corrupt"):
        both[f"{kind} in memory"] = arena[kind], total(f"{kind}_blocks_total", tier="host")
        both[f"{kind} on disk"] = nvme[kind], total(f"{kind}_blocks_total", tier="nvme")
    return both


def test_the_dashboard_goes_where_ray_has_told_its_grafana_to_look(watched: Watched) -> None:
    done = watched.shell.run("dashboard", "install")

    assert done.returncode == 0, done.stderr
    (path,) = watched.shell.directory.glob(
        "kvray-*/ray/session_2*/metrics/grafana/dashboards/kvray_*.json"
    )
    assert path.read_text() == package_file(DASHBOARD).read_text()
    assert str(path) in done.stdout
    assert watched.shell.run("dashboard", "install").returncode == 0, "again is fine"
    assert "prom_metrics_service_discovery.json" in watched.shell.run("dashboard", "scrape").stdout


@pytest.mark.long
def test_a_shard_that_is_restarted_counts_nothing_twice(watched: Watched) -> None:
    watched.replica.generate([make_prompt(2000)], max_tokens=1)
    watched.agree(("requests", "hits", "prompt", "stored in memory"))
    pid = watched.shard()["pid"]

    psutil.Process(pid).kill()
    wait_for(lambda: watched.shard().get("pid") not in (None, pid), "restarting")
    wait_for(lambda: watched.shard()["state"] == "serving", "serving again")
    wait_for(lambda: any(watched.counters()), "hearing of the engine")
    for number in (2001, 2002, 2000):
        watched.replica.generate([make_prompt(number)], max_tokens=1)

    watched.agree(("requests", "hits", "prompt", "own", "stored in memory", "evicted in memory"))
    wait_for(lambda: watched.prometheus.total("shard_epoch") == 2, "saying which it is")


# -- Ray's own dashboard ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def actors_page(watched: Watched) -> Iterator[Page]:
    """The page of actors, after the cluster's token was typed in."""
    if NO_BROWSER is not None:
        pytest.skip(NO_BROWSER)
    (state,) = watched.shell.directory.glob("kvray-*/ray.json")
    local = json.loads(state.read_text())
    with open_browser() as browser, open_page(browser) as page:
        page.goto(f"{local['dashboard_url']}/#/actors")
        page.get_by_label("Authentication Token").last.fill(local["token"])
        page.get_by_role("button", name="submit").click()
        expect(page.locator("body")).to_contain_text("kvray-lookup", timeout=PATIENT_MS)
        yield page


def rows_of(page: Page) -> list[str]:
    return [" ".join(row.inner_text().split()) for row in page.locator("tbody tr").all()]


def test_actors_say_what_and_where_they_are(actors_page: Page, watched: Watched) -> None:
    rows = rows_of(actors_page)
    (lookup,) = [row for row in rows if "kvray-lookup" in row]
    (shard,) = [row for row in rows if "kvray-shard-" in row]
    (supervisor,) = [row for row in rows if "kvray-supervisor" in row]
    assert f"LookupActor kvray-lookup Lookup({watched.shell.cluster_name}) ALIVE" in lookup
    assert (
        f"SupervisorActor kvray-supervisor Supervisor({watched.shell.cluster_name}) ALIVE"
        in supervisor
    )
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


# -- at the end ------------------------------------------------------------------------------------


def test_figures_of_an_engine_that_has_gone_do_not_stay(watched: Watched) -> None:
    wait_for(lambda: watched.prometheus.total("rank_connected") == 1, "saying it is there")
    watched.replica.kill()
    wait_for(lambda: watched.prometheus.total("rank_connected") == 0, "noticing its end")
