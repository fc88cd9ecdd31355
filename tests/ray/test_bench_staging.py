"""`kvray bench staging`, as a user runs it."""

import json
import subprocess
import sys

import pytest

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
