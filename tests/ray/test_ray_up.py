"""`ray up` with the example for machines of one's own: the head is launched over ssh, for real."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NAMESPACES = ["unshare", "--net", "--pid", "--fork", "--kill-child", "--mount", "--mount-proc"]


def missing() -> str | None:
    """Return what this machine lacks for it."""
    if os.geteuid() != 0:
        return "needs root, to make namespaces"
    for program in ("unshare", "ip", "ssh", "ssh-keygen", "rsync", "/usr/sbin/sshd"):
        if shutil.which(program) is None:
            return f"needs {program}"
    if subprocess.run([*NAMESPACES, "true"], check=False, capture_output=True).returncode:
        return "this machine lets nobody make namespaces"
    return None


@pytest.mark.ray
@pytest.mark.long
@pytest.mark.root
def test_ray_up_launches_a_head_whose_tier_outlives_a_second_ray_up() -> None:
    if (reason := missing()) is not None:
        pytest.skip(reason)
    done = subprocess.run(
        [*NAMESPACES, sys.executable, "-m", "tests.ray.on_premise"],
        check=False,
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=850,
    )
    assert done.returncode == 0, done.stderr[-6000:]
    found = json.loads(done.stdout)
    first, second = found["first"], found["second"]
    assert (first["state"], first["capacity_bytes"]) == ("serving", 64 * 2**20)
    # Ray was restarted, and the shard took the arena over.
    assert second["arena_id"] == first["arena_id"]
    assert (first["shard_epoch"], second["shard_epoch"]) == (1, 2)
    assert found["arenas"] == [], "`kvray down` has freed the memory"
    assert found["rays"] == [], "`ray-node stop` has ended every process"
