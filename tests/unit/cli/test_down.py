import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.forks import RunKvray
from tests.unit.actors.shard_process import shard_process


@pytest.fixture
def arena_dir() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(dir="/dev/shm", prefix="kvray-test-"))
    yield path
    shutil.rmtree(path)


def test_an_arena_that_a_shard_of_another_ray_owns_is_left_and_named(
    run_kvray: RunKvray, arena_dir: Path
) -> None:
    environ = {"KVRAY_CLUSTER_NAME": "prod", "KVRAY_ARENA__DIR": str(arena_dir)}
    with shard_process(arena_dir / "kvray-prod", "kvray-shard-0") as process:
        done = run_kvray("down", **environ)
        assert process.poll() is None
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"kvray: Shard kvray-shard-0 (process {process.pid}, since 20")
    assert "with the --address that it was started with" in done.stderr
    assert run_kvray("down", **environ).stdout == "The tier prod is down.\n"
    assert list(arena_dir.iterdir()) == []
