"""Every example runs, on the tiny model."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvray.actors.ray_glue.calls import list_actors
from kvray.actors.tier.local_ray import LocalRay
from kvray.config import KVRayConfig
from tests.ray.command_line import ROOT, Shell, open_shell

pytestmark = pytest.mark.ray

EXAMPLES = ROOT / "examples"


@pytest.fixture
def shell() -> Iterator[Shell]:
    with open_shell("examples") as shell:
        yield shell


@pytest.fixture
def config_file(shell: Shell) -> Path:
    path = shell.directory / "kvray.yaml"
    # Two engines and a shard may share two cores here.
    path.write_text("arena: {lock_wait_s: 0.05}\n")
    return path


@pytest.mark.long
def test_prefix_persists_on_a_tier_of_the_example_s_own(shell: Shell, config_file: Path) -> None:
    script = EXAMPLES / "persistent_prefix.py"
    done = shell.run(script, "--model", "tiny", "--config", config_file)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "same answer, token for token" in done.stdout
    assert shell.leftovers() == []


@pytest.mark.long
def test_offloading_on_a_ray_that_is_there(
    shell: Shell, config_file: Path, local: LocalRay, config: KVRayConfig
) -> None:
    script = EXAMPLES / "offloading.py"
    environ = {**local.environ(), "KVRAY_RAY__ADDRESS": local.address}
    done = shell.run(script, "--model", "tiny", "--config", config_file, **environ)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "same, token for token" in done.stdout
    assert list_actors() == []
    assert shell.leftovers() == []


def test_trtllm_example_says_why_it_cannot_run(shell: Shell) -> None:
    pytest.importorskip("torch")
    done = shell.run(EXAMPLES / "trtllm_llm_api.py", "--config", "kvray.yaml")
    assert done.returncode == 0, done.stderr
    if "Skipped" not in done.stdout:
        assert "same answer" in done.stdout
