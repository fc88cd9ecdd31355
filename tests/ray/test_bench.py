"""`kvray bench staging` and `kvray bench tier`, as a user runs them."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from kvray.actors.tier.local_ray import local_dir

pytestmark = pytest.mark.ray


@pytest.mark.long
def test_quick_run_gives_every_figure() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "kvray", "bench", "staging", "--quick", "--repeat", "1", "--json"],
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    for name in (
        "staging_nixl_ratio",
        "staging_nixl_gb_per_s",
        "raw_nixl_gb_per_s",
        "raw_socket_gb_per_s",
        "staging_object_ref_ratio",
        "staging_cpu_s_per_gb",
    ):
        assert found[name] > 0
    assert (found["blocks"], found["pairs"]) == (32, 1)


_QUICK = ("--capacity", "512MiB", "--processes", "1", "--seconds", "2", "--json")


@pytest.mark.long
def test_quick_run_gives_every_figure_and_leaves_nothing() -> None:
    command = [sys.executable, "-m", "kvray", "bench", "tier", *_QUICK]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as ran:
        output, errors = ran.communicate(timeout=240)
    assert ran.returncode == 0, errors
    found = json.loads(output)
    assert {"store_ratio_4mib", "retrieve_ratio_128kib", "tier_hit_rate_1p"} <= found.keys()
    assert {"tier_idle_cpu_share", "tier_cpu_share_1p", "tier_busy_1p"} <= found.keys()
    assert found["tier_small_into_large_ratio"] > 0
    for size in ("4mib", "1mib", "128kib"):
        assert found[f"tier_store_ratio_{size}_1p"] > 0
        for call in ("lease", "reserve", "commit"):
            assert found[f"tier_{call}_{size}_1p_ms"] <= found[f"tier_{call}_{size}_1p_ms_max"]
    assert not local_dir(f"bench-{ran.pid}").exists()
    assert not list(Path("/dev/shm").glob(f"*bench-{ran.pid}*"))
