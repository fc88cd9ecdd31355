"""`kvray bench router`, as a user runs it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from kvray.actors.tier.local_ray import local_dir

pytestmark = [pytest.mark.ray, pytest.mark.long]


def test_quick_run_with_a_disk_gives_every_figure_and_leaves_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "kvray", "bench", "router", "--quick", "--json"]
    command += ["--disk", str(tmp_path)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as ran:
        output, errors = ran.communicate(timeout=240)
    assert ran.returncode == 0, errors
    found = json.loads(output)
    assert (found["replicas"], found["tokens"], found["choices"]) == (50, 8192, 20)
    for name in ("router_ms", "router_bare_ms"):
        assert 0 < found[f"{name}_p50"] <= found[f"{name}_p99"] <= found[f"{name}_max"]
    assert 0 < found["router_survey_ms"] < found["router_ms_p50"]
    assert found["router_decide_ms"] > 0
    assert found["has_disk"] is True
    assert not list(tmp_path.iterdir())
    assert not local_dir(f"bench-{ran.pid}").exists()
    assert not list(Path("/dev/shm").glob(f"*bench-{ran.pid}*"))
