"""A tier under load as Prometheus, our Grafana dashboard and Ray's own dashboard show it."""

import contextlib
import json
import math
import re
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from playwright.sync_api import expect

from kvray.config import environ_for
from kvray.dashboards import ALERTS, DASHBOARD, package_file
from kvray.reference.replica import Replica
from kvray.store import Arena
from tests.browser import NO_BROWSER, open_browser, open_page
from tests.kit.ray.cluster import REPLICA, again_and_again, prompt_of
from tests.kit.ray.command_line import Shell, free_port, open_shell
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
LOAD_PAUSE_S = 0.5
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
        address = f"127.0.0.1:{free_port()}"
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


@dataclass(frozen=True, slots=True)
class Watched:
    """A tier on a local Ray with a dashboard, an engine, and the Prometheus that looks on."""

    shell: Shell
    replica: Replica
    prometheus: Prometheus

    def ask(self, number: int) -> None:
        """Ask for prompts that miss, hit in memory, and hit on disk.

        They come no faster than a slow disk takes what leaves memory: of a prompt whose first
        block has left before it was written, nothing can be a hit.
        """
        # A new one, one that has left the engine's pool, and one that has left memory.
        for which in (number, number - 2, number - 20):
            if which >= 0:
                self.replica.generate([prompt_of(which, PROMPT_TOKENS)], max_tokens=1)

    def wait_for_values(self, expressions: Iterable[str]) -> None:
        """Return once each of them has had a value."""
        left = [*expressions]

        def are_all() -> bool:
            left[:] = [one for one in left if not self.prometheus.values(one)]
            return not left

        wait_for(are_all, left)

    def keep_arena_busy(self) -> None:
        """Hold the arena's lock longer than the engine waits, so that it drops blocks."""
        with contextlib.closing(Arena(self.shell.node_dir, lock_wait_s=BUSY_S)) as arena:
            for _ in range(10):
                with arena.section(BUSY_S) as entered:
                    assert entered
                    time.sleep(0.3)
                time.sleep(0.1)


@contextlib.contextmanager
def counting_router(shell: Shell) -> Iterator[None]:
    """Have a process of the tier's Ray export what a router counts, as one of Serve's would."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.kit.ray.counting_router"],
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
        shell.say("up", "--dashboard")
        stack.callback(shell.run, "down")
        (ray_dir,) = shell.directory.glob("kvray-*/ray")
        discovery = ray_dir / "prom_metrics_service_discovery.json"
        prometheus = Prometheus(shell.directory / "prometheus", discovery)
        stack.callback(prometheus.close)
        options = {**REPLICA, "num_blocks": 24}
        replica = Replica.start("engine", env=environ_for(config), **options)
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


def test_every_expression_of_the_dashboard_returns_data_under_load(watched):
    asked = expressions()
    assert len(asked) > 30
    with again_and_again(watched.ask, pause_s=LOAD_PAUSE_S):
        watched.wait_for_values(f"ray_kvray_{one} >= 1" for one in DONE)
        # A curve is shown where it says what was counted: blocks that a busy arena drops put that
        # off for minutes.
        watched.wait_for_values(one for one in asked if "expected_hit" in one)
        watched.keep_arena_busy()
        watched.wait_for_values(asked)


def test_the_alerts_are_evaluated_and_none_fires_on_a_healthy_tier(watched):
    wait_for(
        lambda: [rule["health"] for rule in watched.prometheus.rules()] == ["ok"] * 5,
        "evaluating the alerts",
    )
    states = {rule["name"]: rule["state"] for rule in watched.prometheus.rules()}
    assert states["KvrayCorruptBlocks"] == states["KvrayPartDown"] == "inactive"


def test_the_dashboard_goes_where_ray_has_told_its_grafana_to_look(watched):
    done = watched.shell.say("dashboard", "install")
    (path,) = watched.shell.directory.glob(
        "kvray-*/ray/session_2*/metrics/grafana/dashboards/kvray_*.json"
    )
    assert path.read_text() == package_file(DASHBOARD).read_text()
    assert str(path) in done


# -- Ray's own dashboard ---------------------------------------------------------------------------


@pytest.mark.skipif(NO_BROWSER is not None, reason=f"{NO_BROWSER}")
def test_actors_are_listed_by_class_and_name_and_found_by_their_names(watched):
    (state,) = watched.shell.directory.glob("kvray-*/ray.json")
    local = json.loads(state.read_text())
    with open_browser() as browser, open_page(browser) as page:
        page.goto(f"{local['dashboard_url']}/#/actors")
        page.get_by_label("Authentication Token").last.fill(local["token"])
        page.get_by_role("button", name="submit").click()
        expect(page.locator("body")).to_contain_text("kvray-lookup", timeout=PATIENT_MS)
        shown = page.locator("tbody tr")
        rows = "\n".join(" ".join(row.inner_text().split()) for row in shown.all())
        page.get_by_label("Name", exact=True).fill("kvray-shard-")
        expect(shown).to_have_count(1, timeout=PATIENT_MS)
        assert "ShardActor" in shown.first.inner_text()
    # The dash is Ray's column for an actor's repr, which these have none of (`ray_glue/calls.py`).
    assert "LookupActor kvray-lookup - ALIVE" in rows
    assert "SupervisorActor kvray-supervisor - ALIVE" in rows
    assert re.search(r"ShardActor kvray-shard-\w+ - ALIVE", rows), rows


# -- at the end ------------------------------------------------------------------------------------


def test_figures_of_an_engine_that_has_gone_do_not_stay(watched):
    def num_connected() -> float:
        return sum(watched.prometheus.values("ray_kvray_rank_connected"))

    wait_for(lambda: num_connected() == 1, "saying it is there")
    watched.replica.kill()
    wait_for(lambda: num_connected() == 0, "noticing its end")
