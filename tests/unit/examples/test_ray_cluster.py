"""The `ray up` examples: what Ray's own schema says of them, and the node script."""

import json
import os
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import psutil
import pytest
import ray.autoscaler
import yaml
from ray.autoscaler._private.util import prepare_config

from kvray.config import load_config
from tests.forks import Done, run
from tests.waiting import wait_for

ROOT = Path(__file__).parents[3]
EXAMPLE = ROOT / "examples" / "ray_cluster"
CLUSTERS = ("cluster.yaml", "cluster-local.yaml")
TIER = EXAMPLE / "etc" / "kvray.yaml"
PORT = re.compile(r"--([a-z-]*port)=(\d+)")
SCHEMA = json.loads((Path(ray.autoscaler.__file__).parent / "ray-schema.json").read_text())
RESOURCE = load_config(TIER, environ={}).shard.resource


def config_of(name: str) -> dict[str, Any]:
    return dict(yaml.safe_load((EXAMPLE / name).read_text()))


def prepared(name: str) -> dict[str, Any]:
    """Return a cluster file as `ray up` completes it."""
    return dict(prepare_config(config_of(name)))


def start_commands(name: str) -> list[str]:
    config = config_of(name)
    return [*config["head_start_ray_commands"], *config["worker_start_ray_commands"]]


def test_rays_own_schema_takes_the_cluster_files_and_no_resources_that_are_no_integers():
    for name in CLUSTERS:
        jsonschema.validate(prepared(name), SCHEMA)
    config = prepared("cluster.yaml")
    config["available_node_types"]["gpu"]["resources"]["kvray_shard"] = 0.5
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(config, SCHEMA)


def test_shards_are_on_the_nodes_with_gpus_and_the_head_starts_the_tier_once_ray_is_up():
    types = prepared("cluster.yaml")["available_node_types"]
    shards = {name: kind["resources"][RESOURCE] for name, kind in types.items()}
    assert shards == {"head": 0, "gpu": 1}
    assert types["gpu"]["resources"]["GPU"] > 0
    for command in start_commands("cluster-local.yaml"):
        if "ray-node start" in command:
            (given,) = (word for word in shlex.split(command) if word.startswith("--resources="))
            assert json.loads(given.partition("=")[2]) == {RESOURCE: 1}
    assert start_commands("cluster.yaml")[2].endswith("kvray up --no-wait")
    config = config_of("cluster-local.yaml")
    assert f"--address {config['provider']['head_ip']}:6379" in config["head_start_ray_commands"][1]


def test_ray_stop_runs_in_containers_only_which_do_not_see_the_processes_of_their_machine():
    """Else the `ray stop` in the start commands would end every Ray of the machine."""
    docker = prepared("cluster.yaml")["docker"]
    assert "ray stop" in start_commands("cluster.yaml")
    options = docker["run_options"] + docker["worker_run_options"]
    assert not any("--pid" in option for option in options)
    assert not any("ray stop" in command for command in start_commands("cluster-local.yaml"))


@pytest.mark.parametrize("name", CLUSTERS)
def test_head_and_workers_use_the_same_fixed_ports_which_the_docs_list(name):
    head, worker = (
        dict(PORT.findall(command)) for command in start_commands(name) if "metrics" in command
    )
    assert worker.items() <= head.items()
    page = (ROOT / "docs" / "launch.md").read_text()
    listed = set(re.findall(r"^\| (\d+(?:-\d+)?) \|", page, re.MULTILINE))
    low, high = head.pop("min-worker-port"), head.pop("max-worker-port")
    assert listed == {*head.values(), f"{low}-{high}"}


FAKE_RAY = """\
#!/usr/bin/env bash
echo "$@"
if [[ -n ${FAKE_RAY_FAILS:-} ]]; then echo "no luck"; exit 1; fi
if [[ -n ${FAKE_RAY_STAYS:-} ]]; then
    trap '' TERM
    sleep 600 &
else
    trap 'exit 0' TERM
fi
echo "Ray runtime started."
while :; do sleep 0.05; done
"""


class RayNode:
    """The script that starts and ends the Ray that is its own, with another program for Ray."""

    def __init__(self, directory: Path) -> None:
        self.home = directory / "home"
        (directory / "ray").write_text(FAKE_RAY)
        (directory / "ray").chmod(0o755)
        paths = {"PATH": f"{directory}:{os.environ['PATH']}", "RAY_NODE_HOME": str(self.home)}
        self._environ = os.environ | paths

    def run(self, *args: str, **environ: str) -> Done:
        return run(EXAMPLE / "ray-node", *args, env=self._environ | environ, timeout=60)

    def process(self) -> psutil.Process:
        return psutil.Process(int((self.home / "pid").read_text()))


@pytest.fixture
def ray_node(tmp_path: Path) -> Iterator[RayNode]:
    node = RayNode(tmp_path)
    yield node
    node.run("stop")


def wait_until_over(*processes: psutil.Process) -> None:
    for one in processes:
        wait_for(
            lambda one=one: not one.is_running() or one.status() == psutil.STATUS_ZOMBIE, "the end"
        )


def test_a_second_start_replaces_the_first_and_stop_ends_it(ray_node):
    assert ray_node.run("start", "--head").returncode == 0
    first = ray_node.process()
    assert f"--temp-dir={ray_node.home}/ray --head" in (ray_node.home / "ray-start.log").read_text()
    assert ray_node.run("start", "--head").returncode == 0
    second = ray_node.process()
    wait_until_over(first)
    assert second.is_running()
    assert ray_node.run("stop").returncode == 0
    wait_until_over(second)
    assert ray_node.run("stop").returncode == 0


def is_raylet(process: psutil.Process) -> bool:
    try:
        return "600" in process.cmdline()
    except psutil.NoSuchProcess:  # it has just ended, as the others do all the time
        return False


def test_a_ray_that_does_not_end_in_time_is_killed_with_what_it_started(ray_node):
    assert ray_node.run("start", "--head", FAKE_RAY_STAYS="yes").returncode == 0
    ray = ray_node.process()
    (raylet,) = filter(is_raylet, ray.children())
    assert ray_node.run("stop", RAY_NODE_STOP_S="1").returncode == 0
    wait_until_over(ray, raylet)


def test_a_process_that_has_got_the_pid_since_is_left_alone(ray_node):
    ray_node.home.mkdir()
    with subprocess.Popen(["sleep", "60"]) as foreign:
        try:
            (ray_node.home / "pid").write_text(str(foreign.pid))
            assert ray_node.run("stop").returncode == 0
            assert foreign.poll() is None
        finally:
            foreign.kill()


def test_a_start_that_fails_is_tried_again_and_then_says_what_ray_said(ray_node):
    done = ray_node.run("start", "--head", FAKE_RAY_FAILS="yes")
    assert done.returncode == 1
    assert "no luck" in done.stderr
    assert "did not start in 3 attempts" in done.stderr
    assert ray_node.run("restart").returncode == 2, "no command of it"
