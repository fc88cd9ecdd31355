"""`kvray config fit`: the arithmetic of a node, and the lines that make it fit."""

import json
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.forks import RunKvray

GIB = 2**30


def answer(done: "subprocess.CompletedProcess[str]") -> dict[str, Any]:
    assert done.stderr == ""
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_this_machine_has_room_for_a_small_arena(run_kvray: RunKvray) -> None:
    done = run_kvray("config", "fit", "--json", KVRAY_ARENA__CAPACITY="64MiB")
    found = answer(done)
    assert done.returncode == 0
    assert found["fits"]
    (line,) = found["commands"]
    words = shlex.split(line)
    assert words[:2] == ["ray", "start"]
    assert f"--object-store-memory={found['object_store_bytes']}" in words
    assert f"--memory={found['heap_bytes']}" in words
    assert {share["name"] for share in found["shares"]} >= {"machine", "/dev/shm"}


def test_an_arena_larger_than_dev_shm_gets_the_command_that_enlarges_it(
    run_kvray: RunKvray,
) -> None:
    done = run_kvray("config", "fit", "--total", "512GiB", KVRAY_ARENA__CAPACITY="300GiB")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    said = lines.index("It fits with these commands, as root, and Ray started like this:")
    mount, start = (line.strip() for line in lines[said + 1 :])
    assert mount.startswith("mount -o remount,size=")
    assert mount.endswith("m /dev/shm")
    assert start.startswith("ray start --head --object-store-memory=")


def test_the_table_shows_who_has_how_much(run_kvray: RunKvray) -> None:
    options = (
        "--total",
        "512GiB",
        "--shm",
        "400GiB",
        "--object-store",
        "20GiB",
        "--in-use",
        "4GiB",
    )
    done = run_kvray("config", "fit", *options, KVRAY_ARENA__CAPACITY="256GiB")
    row = next(line.split() for line in done.stdout.splitlines() if "machine" in line)
    assert row[:4] == ["machine", "512GiB", "4GiB", "768MiB"]
    assert row[5] == "20GiB"


def test_what_cannot_fit_names_the_capacity_that_does(run_kvray: RunKvray) -> None:
    asked = ("config", "fit", "--total", "64GiB")
    done = run_kvray(*asked, KVRAY_ARENA__CAPACITY="64GiB")
    assert done.returncode == 1
    assert "It does not fit: " in done.stdout
    assert "ray start" not in done.stdout
    named = done.stdout.split("lower arena.capacity to ")[1].split()[0].rstrip(".")
    assert run_kvray(*asked, KVRAY_ARENA__CAPACITY=named).returncode == 0


def test_the_line_starts_a_node_that_is_meant_to_have_a_shard(
    run_kvray: RunKvray, tmp_path: Path
) -> None:
    (tmp_path / "kvray.yaml").write_text(
        "ray: {address: '10.0.0.5:6379'}\n"
        "shard: {resource: kvray_shard}\n"
        "nodes: [{label: kvray.io/pool=big, arena: {capacity: 64GiB}}]\n"
    )
    big = ("--node-label", "kvray.io/pool=big", "--total", "512GiB", "--json")
    found = answer(run_kvray("config", "fit", "-c", "kvray.yaml", *big))
    assert found["arena_bytes"] > 64 * GIB
    words = shlex.split(found["commands"][-1])
    assert "--address=10.0.0.5:6379" in words
    assert '--resources={"kvray_shard": 1}' in words
    assert "--labels=kvray.io/pool=big" in words


def test_a_threshold_that_ray_was_given_is_kept(run_kvray: RunKvray) -> None:
    done = run_kvray(
        *("config", "fit", "--total", "512GiB", "--json"), RAY_memory_usage_threshold="0.8"
    )
    found = answer(done)
    assert found["threshold"] == 0.8
    assert found["commands"][-1].startswith("RAY_memory_usage_threshold=0.8 ray start")


@pytest.mark.parametrize(
    ("option", "given", "said"),
    [
        ("--total", "64GB", "write 64GiB"),
        ("--heap", "much", "such as 64GiB"),
        ("--object-store", "1MiB", "write at least 75MiB"),
        ("--node-label", "big", "write key=value"),
    ],
)
def test_an_option_that_cannot_be_used_is_refused(
    run_kvray: RunKvray, option: str, given: str, said: str
) -> None:
    done = run_kvray("config", "fit", option, given)
    assert (done.returncode, done.stdout) == (2, "")
    assert option in done.stderr
    assert said in done.stderr
    assert done.stderr.count("\n") == 1


def test_an_arena_s_place_that_is_not_there_is_refused(run_kvray: RunKvray) -> None:
    done = run_kvray("config", "fit", KVRAY_ARENA__DIR="/nowhere/at/all")
    assert done.returncode == 2
    assert "/nowhere/at/all cannot be looked at" in done.stderr
