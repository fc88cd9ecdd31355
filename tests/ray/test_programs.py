"""Demo, benchmarks and examples, as a user runs them."""

import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import kvray
from kvray.actors.ray_glue.calls import list_actors
from kvray.lab.demo.play import shareable_tokens
from tests.forks import run
from tests.kit.ray.command_line import ROOT, SHM, Shell

pytestmark = pytest.mark.ray

EXAMPLES = ROOT / "examples"


def left_of(shell: Shell, program: str) -> list[str]:
    """Return what is left of the program that ran last."""
    memory = [path.name for path in SHM.glob(f"*{program}-{shell.pid}*")]
    return shell.leftovers() + memory


@pytest.fixture
def demo_shell(shell: Shell) -> Shell:
    """Neither a setting of the user's nor a tier of his name gets into the demo."""
    shell.environ["KVRAY_ARENA__LOCK_WAIT_S"] = "nonsense"
    return shell


@pytest.mark.long
def test_demo_shares_prefixes_and_changes_no_token(demo_shell):
    found = json.loads(demo_shell.say("demo", "--model", "tiny", "--json", "--plot", "demo.png"))
    picture = demo_shell.directory / "demo.png"
    assert picture.read_bytes().startswith(b"\x89PNG")
    picture.unlink()
    assert found["identical_text"] is True
    assert found["wrong_tokens"] == 0
    assert found["ttft_ratio"] > 0
    assert found["phase_c"]["without_kvray_reused_tokens"] == 0
    assert found["phase_c"]["with_kvray_reused_tokens"] > 0
    fields = {"phase", "replica", "prompt_tokens", "hit_tokens", "ttft_s", "text"}
    assert all(fields <= request.keys() for request in found["requests"])
    shared = [one for one in found["requests"] if one["phase"] in "ad" and one["hit_tokens"]]
    assert [one["phase"] for one in shared] == ["a", "a", "d", "d"]
    for one in shared:
        assert one["hit_tokens"] == shareable_tokens(one["prompt_tokens"])
    assert {one["prompt_tokens"] % 32 == 0 for one in shared} == {True, False}
    assert left_of(demo_shell, "demo") == []


@pytest.mark.long
def test_interrupted_demo_leaves_nothing(demo_shell):
    command = ("demo", "--model", "tiny", "--json")
    done = demo_shell.interrupt(*command, when=demo_shell.has_engines, signum=signal.SIGINT)
    assert (done.returncode, done.stdout) == (130, ""), done.stderr
    assert left_of(demo_shell, "demo") == []


@pytest.mark.long
def test_a_quick_run_of_staging_gives_every_figure(shell):
    found = json.loads(shell.say("bench", "staging", "--quick", "--repeat", "1", "--json"))
    nixl = ("staging_nixl_ratio", "staging_nixl_gb_per_s", "raw_nixl_gb_per_s")
    for name in (*nixl, "staging_object_ref_ratio", "staging_cpu_s_per_gb"):
        assert found[name] > 0
    assert (found["blocks"], found["pairs"]) == (32, 1)


@pytest.mark.long
def test_a_quick_run_of_a_tier_gives_every_figure_and_leaves_nothing(shell):
    quick = ("--capacity", "512MiB", "--processes", "1", "--seconds", "2", "--json")
    found = json.loads(shell.say("bench", "tier", *quick))
    shares = {"tier_idle_cpu_share", "tier_cpu_share_1p", "tier_busy_1p", "tier_hit_rate_1p"}
    assert shares <= found.keys()
    assert found["tier_small_into_large_ratio"] > 0
    for size in ("4mib", "1mib", "128kib"):
        assert found[f"tier_store_ratio_{size}_1p"] > 0
        for call in ("lease", "reserve", "commit"):
            assert found[f"tier_{call}_{size}_1p_ms"] <= found[f"tier_{call}_{size}_1p_ms_max"]
    assert left_of(shell, "bench") == []


@pytest.mark.long
@pytest.mark.skipif(importlib.util.find_spec("fastapi") is None, reason="needs Ray Serve")
def test_a_local_run_compares_three_applications_and_leaves_nothing(shell):
    model = ("--model", "tiny", "--vocabulary", "256", "--replicas", "2")
    load = ("--workload", "one-prefix", "--rate", "2", "--seconds", "5", "--rounds", "1")
    found = json.loads(shell.say("bench", "serve", "--local", *model, *load, "--json"))
    for name in ("kvray", "serve", "no-tier"):
        assert found[f"serving_one_prefix_failed_{name}"] == 0
        assert found[f"serving_one_prefix_other_text_{name}"] == 0
        assert found[f"serving_one_prefix_cached_share_{name}"] > 0.5
    assert found["serving_one_prefix_reuse_kvray"] > 0.9
    assert found["serving_one_prefix_first_token_p90_s_ratio_serve"] > 0
    assert left_of(shell, "bench") == []


# -- examples -------------------------------------------------------------------------------------


@pytest.fixture
def config_file(shell: Shell) -> Path:
    path = shell.directory / "kvray.yaml"
    # Two engines and a shard may share two cores here.
    path.write_text("arena: {lock_wait_s: 0.05}\n")
    return path


@pytest.mark.long
def test_prefix_persists_on_a_tier_of_the_example_s_own(shell, config_file):
    script = EXAMPLES / "persistent_prefix.py"
    done = shell.say(script, "--model", "tiny", "--config", config_file)
    assert "same answer, token for token" in done
    assert shell.leftovers() == []


@pytest.mark.long
def test_offloading_on_a_ray_that_is_there(shell, config_file, local, config):
    script = EXAMPLES / "offloading.py"
    environ = {**local.environ(), "KVRAY_RAY__ADDRESS": local.address}
    done = shell.say(script, "--model", "tiny", "--config", config_file, **environ)
    assert "same, token for token" in done
    assert list_actors() == []
    assert shell.leftovers() == []


@pytest.mark.long
def test_the_tensor_cache_example_says_the_same_from_the_tier(shell):
    config = shell.directory / "kvray.yaml"
    config.write_text("arena: {slab: 16MiB}\n")
    done = shell.say(
        EXAMPLES / "tensor_cache.py", "--config", config, KVRAY_ARENA__CAPACITY="128MiB"
    )
    first, second, verdict = done.splitlines()
    assert first.startswith("first process: 0 of 1440 tokens")
    assert second.startswith("second process: 1408 of 1440 tokens")
    assert verdict == "Both said the same."


def test_trtllm_example_says_why_it_cannot_run(shell):
    pytest.importorskip("torch")
    done = shell.say(EXAMPLES / "trtllm_llm_api.py", "--config", "kvray.yaml")
    if "Skipped" not in done:
        assert "same answer" in done


def test_the_examples_of_the_client_on_the_python_apis_page_run(running, monkeypatch):
    monkeypatch.setitem(vars(kvray), "load_config", lambda: running)
    page = (ROOT / "docs" / "python_api.md").read_text()
    examples = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (example,) = (one for one in examples if "Client" in one)
    names: dict[str, Any] = {}
    exec(example, names)
    assert len(names["status"]["shards"]) == 1
    assert names["contents"]


# -- `ray up` with the example for machines of one's own: launched over ssh, for real -----------

NAMESPACES = ["unshare", "--net", "--pid", "--fork", "--kill-child", "--mount", "--mount-proc"]


def missing() -> str | None:
    """Return what this machine lacks for it."""
    if os.geteuid() != 0:
        return "needs root, to make namespaces"
    for program in ("unshare", "ip", "ssh", "ssh-keygen", "rsync", "/usr/sbin/sshd"):
        if shutil.which(program) is None:
            return f"needs {program}"
    if run(*NAMESPACES, "true").returncode:
        return "this machine lets nobody make namespaces"
    return None


@pytest.mark.long
@pytest.mark.root
def test_ray_up_launches_a_head_whose_tier_outlives_a_second_ray_up():
    if (reason := missing()) is not None:
        pytest.skip(reason)
    command = (*NAMESPACES, sys.executable, "-m", "tests.kit.ray.on_premise")
    done = run(*command, cwd=ROOT, stdin=subprocess.DEVNULL, timeout=850)
    assert done.returncode == 0, done.stderr[-6000:]
    found = json.loads(done.stdout)
    first, second = found["first"], found["second"]
    assert (first["state"], first["capacity_bytes"]) == ("serving", 64 * 2**20)
    # Ray was restarted, and the shard took the arena over.
    assert second["arena_id"] == first["arena_id"]
    assert (first["shard_epoch"], second["shard_epoch"]) == (1, 2)
    assert found["arenas"] == [], "`kvray down` has freed the memory"
    assert found["rays"] == [], "`ray-node stop` has ended every process"
