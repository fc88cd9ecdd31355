"""`kvray sweep` on a directory in which arenas were left in every way."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvray.cli.text.explanation import age_text
from tests.forks import RunKvray
from tests.unit.actors.shard_process import ROOT, shard_process
from tests.unit.actors.small_shard import open_arena
from tests.unit.store.conftest import Child
from tests.unit.store.small_arena import make_arena

Sweep = Callable[..., dict[str, Any]]


@pytest.fixture
def parent() -> Iterator[Path]:
    """A directory as arena.dir names one."""
    path = Path(tempfile.mkdtemp(dir="/dev/shm", prefix="kvray-test-"))
    yield path
    shutil.rmtree(path)


@pytest.fixture
def sweep(run_kvray: RunKvray, parent: Path) -> Sweep:
    """Runs the command; returns arenas by their directories' names."""

    def run(*args: str, status: int = 0) -> dict[str, Any]:
        done = run_kvray("sweep", "--json", "--dir", parent, *args)
        assert (done.returncode, done.stderr) == (status, "")
        found = json.loads(done.stdout)
        assert found["directory"] == str(parent)
        return {Path(arena["path"]).name: arena for arena in found["arenas"]}

    return run


@pytest.fixture
def dead(parent: Path) -> Path:
    """The directory of a shard that was killed."""
    directory = parent / "kvray-dead"
    with shard_process(directory, "a") as process:
        process.kill()
        process.wait()
    return directory


@pytest.fixture
def attached(parent: Path) -> Iterator[Child]:
    """An engine that has outlived its shard."""
    directory = parent / "kvray-attached"
    directory.mkdir()
    make_arena(directory).close()
    engine = Child(directory)
    engine.say("arena.join('engine-1')")
    yield engine
    engine.kill()


def outcomes(found: dict[str, Any]) -> dict[str, str]:
    return {name: arena["outcome"] for name, arena in found.items()}


def test_an_arena_that_nobody_uses_is_shown_and_removed(dead: Path, sweep: Sweep) -> None:
    arena = sweep()["kvray-dead"]
    assert arena["cluster_name"] == "test"
    assert arena["num_bytes"] > 64 * 4096
    assert 0 <= arena["age_s"] < 60
    assert (arena["owner"], arena["holders"], arena["defect"]) == (None, [], None)
    assert arena["outcome"] == "removed"
    assert not dead.exists()
    assert sweep() == {}


def test_an_arena_with_an_owner_is_kept(parent: Path, sweep: Sweep) -> None:
    with shard_process(parent / "kvray-owned", "kvray-shard-0") as process:
        arena = sweep()["kvray-owned"]
        assert arena["outcome"] == "owned"
        assert arena["owner"].pop("since") > 1e9
        assert arena["owner"] == {"shard": "kvray-shard-0", "pid": process.pid}
        assert arena["holders"] == [{"label": "test", "pid": process.pid}]


def test_an_owner_that_is_frozen_keeps_its_arena(parent: Path, sweep: Sweep) -> None:
    with shard_process(parent / "kvray-owned", "a") as process:
        process.send_signal(signal.SIGSTOP)
        assert outcomes(sweep()) == {"kvray-owned": "owned"}


def test_an_arena_with_an_engine_and_no_owner_is_kept_until_the_engine_ends(
    attached: Child, parent: Path, sweep: Sweep
) -> None:
    arena = sweep()["kvray-attached"]
    assert arena["outcome"] == "attached"
    assert arena["holders"] == [{"label": "engine-1", "pid": attached.process.pid}]
    assert attached.say("arena.retired") == "False"
    attached.kill()
    assert outcomes(sweep()) == {"kvray-attached": "removed"}


def test_a_dry_run_removes_and_makes_nothing(dead: Path, parent: Path, sweep: Sweep) -> None:
    (parent / "kvray-half").mkdir()
    before = sorted(parent.rglob("*"))
    assert outcomes(sweep("--dry-run")) == {"kvray-dead": "unused", "kvray-half": "unused"}
    assert sorted(parent.rglob("*")) == before


def test_whoever_maps_an_arena_without_having_joined_sees_it_retired(
    dead: Path, sweep: Sweep
) -> None:
    arena = open_arena(dead)
    with contextlib.closing(arena):
        arena.leave()
        sweep()
        assert arena.retired


@pytest.mark.parametrize(
    ("files", "defect"),
    [
        ({}, "There is no arena"),
        ({"arena.0123.new": b"half", "lock.0123": b"", "owner": b""}, "There is no arena"),
        ({"arena": b"garbage"}, "too short"),
        ({"arena": b"garbage" * 1000}, "is no arena"),
        ({"arena": b"KVRAYARN\x63" + bytes(5000)}, "is an arena of format 99"),
        ({"owner": b"", "owner.json": b"{", "socket": b""}, "There is no arena"),
    ],
    ids=["empty", "half-made", "short", "foreign", "another format", "no arena"],
)
def test_what_is_no_whole_arena_is_removed(
    parent: Path, sweep: Sweep, files: dict[str, bytes], defect: str
) -> None:
    directory = parent / "kvray-broken"
    directory.mkdir()
    for name, content in files.items():
        (directory / name).write_bytes(content)
    arena = sweep()["kvray-broken"]
    assert arena["cluster_name"] == "broken"
    assert defect in arena["defect"]
    assert (arena["outcome"], arena["age_s"]) == ("removed", None)
    assert not directory.exists()


def test_directories_that_are_no_shards_are_left_alone(parent: Path, sweep: Sweep) -> None:
    (parent / "kvray-other").mkdir()
    (parent / "kvray-other" / "precious").touch()
    (parent / "kvray-file").touch()
    (parent / "somebody").mkdir()
    (parent / "somebody" / "arena").touch()
    (parent / "kvray-link").symlink_to(parent / "somebody")
    before = sorted(parent.rglob("*"))
    assert sweep() == {}
    assert sorted(parent.rglob("*")) == before


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a directory away")
def test_another_users_arenas_are_not_touched(dead: Path, sweep: Sweep) -> None:
    os.chown(dead, 12345, 12345)
    assert sweep() == {}
    assert (dead / "arena").exists()


def test_what_cannot_be_removed_is_told_and_exits_with_1(
    dead: Path, run_kvray: RunKvray, sweep: Sweep
) -> None:
    (dead / "lock.d" / "precious").mkdir(parents=True)
    assert outcomes(sweep(status=1)) == {"kvray-dead": "left"}
    assert (dead / "lock.d" / "precious").exists()
    done = run_kvray("sweep", "--dir", dead.parent)
    assert done.returncode == 1
    assert f"{dead} could not be removed: {dead}/lock.d (Is a directory); remove" in done.stdout


def test_files_of_others_beside_an_arena_are_left_and_told(dead: Path, sweep: Sweep) -> None:
    (dead / "precious").touch()
    arena = sweep(status=1)["kvray-dead"]
    assert (arena["outcome"], arena["problem"]) == ("left", "it has files of others.")
    assert [path.name for path in dead.iterdir()] == ["precious"]
    assert sweep() == {}


def test_the_table_tells_who_has_what(
    dead: Path, attached: Child, parent: Path, run_kvray: RunKvray
) -> None:
    with shard_process(parent / "kvray-owned", "kvray-shard-0") as process:
        done = run_kvray("sweep", "--dry-run", "--dir", parent)
    assert done.returncode == 0, done.stderr
    rows = [line.split() for line in done.stdout.splitlines() if line.strip()]
    lines = {row[0]: " ".join(row) for row in rows}
    assert f"engine-1 ({attached.process.pid}) kept: a shard may" in lines["kvray-attached"]
    assert "none none would be removed" in lines["kvray-dead"]
    assert f"kvray-shard-0 ({process.pid}) test ({process.pid}) kept: its" in lines["kvray-owned"]


def test_arena_dir_of_the_configuration_is_looked_at(
    run_kvray: RunKvray, parent: Path, tmp_path: Path
) -> None:
    (tmp_path / "kvray.yaml").write_text(f"arena: {{dir: {parent}}}\n")
    done = run_kvray("sweep", "-c", "kvray.yaml")
    assert done.stdout == f"There are no arenas of this user in {parent}.\n"


def test_a_directory_that_is_none_is_refused(run_kvray: RunKvray) -> None:
    done = run_kvray("sweep", "--dir", "/nowhere")
    assert done.returncode == 2
    assert done.stderr == (
        "kvray: /nowhere is no directory that can be listed; give that of arena.dir.\n"
    )


def test_no_ray_is_imported(parent: Path) -> None:
    code = "from kvray.cli.app import app; import sys; app(sys.argv[1:], standalone_mode=False);"
    code += "sys.exit('ray' in sys.modules or 'torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code, "sweep", "--dir", parent], cwd=ROOT, check=False
    )
    assert done.returncode == 0


@pytest.mark.parametrize(
    ("age_s", "text"),
    [(-1, "0 s"), (0.5, "0 s"), (59, "59 s"), (60, "1 min"), (7300, "2 h"), (86400 * 3, "3 d")],
)
def test_an_age_is_told_in_its_largest_unit(age_s: float, text: str) -> None:
    assert age_text(age_s) == text
