"""Engine, tier and Ray are torn down and started again: the same prompt hits from disk."""

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvray.reference.replica import Replica
from tests.ray.cluster import CONNECTOR
from tests.ray.command_line import Shell, open_shell
from tests.waiting import wait_for

pytestmark = pytest.mark.ray

TOKENS_PER_BLOCK = 32
PROMPT = [number * 7 % 250 + 1 for number in range(640)]
WHOLE_TOKENS = 608
"""That an engine loads of a prompt of 640 tokens: it computes at least one itself."""
CONFIG = """\
arena: {capacity: 16MiB, slab: 4MiB}
nvme: {dir: DIR, capacity: 1GiB, segment: 16MiB, free_reserve: 1MiB}
connector: {model_key: tiny, verify_on_load: always, stage_wait_s: 5}
"""


@pytest.fixture
def shell() -> Iterator[Shell]:
    with open_shell("restart") as shell:
        del shell.environ["KVRAY_ARENA__CAPACITY"]
        shell.environ["KVRAY_CONFIG"] = str(shell.directory / "kvray.yaml")
        disk = shell.directory / "nvme.yaml"  # a name that the shell does not take for a leftover
        disk.mkdir()
        (shell.directory / "kvray.yaml").write_text(CONFIG.replace("DIR", str(disk)))
        yield shell


def up(shell: Shell) -> dict[str, Any]:
    done = shell.run("up")
    assert done.returncode == 0, done.stderr
    return shard_of(shell)


def shard_of(shell: Shell) -> dict[str, Any]:
    done = shell.run("status", "--json")
    assert done.returncode == 0, done.stderr
    (shard,) = json.loads(done.stdout)["shards"]
    found: dict[str, Any] = shard
    return found


def answer(shell: Shell, prompt: list[int]) -> tuple[tuple[int, ...], int]:
    """Return what a new engine answers, and how many tokens it had from the tier."""
    environ = {name: value for name, value in shell.environ.items() if name.startswith("KVRAY_")}
    replica = Replica.start(
        "one",
        env=environ,
        model="tiny:11",
        tokens_per_block=TOKENS_PER_BLOCK,
        num_blocks=128,
        connector=CONNECTOR,
        num_threads=1,
    )
    try:
        (output,) = replica.generate([prompt], max_tokens=4)
        wait_for(lambda: shard_of(shell)["arena"]["blocks"] >= 20, "saving")
    finally:
        replica.kill()
    return tuple(output.token_ids), output.hit_tokens


@pytest.mark.long
def test_the_same_prompt_hits_from_disk_after_everything_was_torn_down(shell: Shell) -> None:
    up(shell)
    first, hits = answer(shell, PROMPT)
    assert hits == 0
    down = shell.run("down")
    assert down.returncode == 0, down.stderr
    assert shell.leftovers() == []
    assert up(shell)["nvme"]["recovered_blocks"] >= 20
    again, hits = answer(shell, PROMPT)
    assert hits == WHOLE_TOKENS
    assert again == first
    assert shell.run("down", "--no-flush").returncode == 0


@pytest.mark.long
def test_a_shard_that_is_asked_to_end_flushes_and_comes_back(shell: Shell) -> None:
    pid = up(shell)["pid"]
    first, _ = answer(shell, PROMPT)
    os.kill(pid, signal.SIGTERM)
    wait_for(lambda: not Path(f"/proc/{pid}").exists(), "the end")
    wait_for(lambda: _is_serving(shell), "a new shard")
    shard = shard_of(shell)
    assert shard["pid"] != pid
    assert shard["nvme"]["recovered_blocks"] >= 20
    assert answer(shell, PROMPT) == (first, WHOLE_TOKENS), "its arena was adopted"
    assert shell.run("down").returncode == 0


@pytest.mark.long
def test_what_kill_9_leaves_on_disk_is_right(shell: Shell) -> None:
    pid = up(shell)["pid"]
    first, _ = answer(shell, PROMPT)
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: _is_serving(shell), "a new shard")
    shell.run("down", "--no-flush")
    up(shell)
    again, _ = answer(shell, PROMPT)
    assert again == first
    assert shell.run("down").returncode == 0


def _is_serving(shell: Shell) -> bool:
    shard = shard_of(shell)
    return bool(shard["state"] == "serving")
