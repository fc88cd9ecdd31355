"""`kvray bench serve --local`, as a user runs it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from kvray.actors.tier.local_ray import local_dir

pytest.importorskip("ray.serve")
pytestmark = [pytest.mark.ray, pytest.mark.long]

_QUICK = ("--model", "tiny", "--vocabulary", "256", "--replicas", "2", "--workload", "one-prefix")
_LOAD = ("--rate", "2", "--seconds", "5", "--rounds", "1")


def test_local_run_compares_three_applications_and_leaves_nothing() -> None:
    command = [sys.executable, "-m", "kvray", "bench", "serve", "--local", *_QUICK, *_LOAD]
    with subprocess.Popen(
        [*command, "--json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as ran:
        output, errors = ran.communicate(timeout=280)
    assert ran.returncode == 0, errors
    found = json.loads(output)
    for name in ("kvray", "serve", "no-tier"):
        assert found[f"serving_one_prefix_failed_{name}"] == 0
        assert found[f"serving_one_prefix_other_text_{name}"] == 0
        assert found[f"serving_one_prefix_cached_share_{name}"] > 0.5
    assert found["serving_one_prefix_reuse_kvray"] > 0.9
    assert found["serving_one_prefix_first_token_p90_s_ratio_serve"] > 0
    assert not local_dir(f"bench-{ran.pid}").exists()
    assert not list(Path("/dev/shm").glob(f"*bench-{ran.pid}*"))
