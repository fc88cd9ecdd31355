"""What this machine gives a process, and where an engine cannot use its node's arena: for real."""

import contextlib
import os
import resource
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from kvray.actors.owner.ownership import sweep
from kvray.cli.doctor import node
from kvray.cli.doctor.node import arena_findings, why_not_here
from kvray.config import KVRayConfig, load_config
from kvray.store import Arena
from kvray.store.arena.file import ARENA_FILE
from kvray.store.machine.capacity import read_mount
from kvray.wire import SOCKET_FILE
from tests.far import Far
from tests.unit.actors.shard_process import shard_process

DEFAULTS = load_config(environ={})


@contextlib.contextmanager
def limited(what: int, most: int) -> Iterator[None]:
    before = resource.getrlimit(what)
    resource.setrlimit(what, (most, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(what, before)


def test_this_machine_has_no_fault_and_nixl_is_not_tried_where_it_is_not_configured():
    found = {one.check: one for one in node.machine_findings(DEFAULTS)}
    assert not [one for one in found.values() if one.verdict == "fault"]
    assert found["software"].says.startswith("kvray ")
    assert found["connector"].says.endswith("without Ray")
    assert all(one.fix for one in found.values() if one.verdict == "hint")
    overrides = {"staging.transports": ["object_ref"], "connector.stage_wait_s": 0}
    config = load_config(overrides=overrides, environ={})
    assert node._nixl(config).verdict == "skipped"
    assert (found["waiting"].verdict, node._waiting(config).verdict) == ("ok", "hint")


@pytest.mark.parametrize(
    ("module", "words"),
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "ended by SIGSEGV"),
        ("raise ImportError('libcore.so is broken')", "does not load (libcore.so is broken)"),
        ("import a_library_of_it", "does not load (No module named 'a_library_of_it')"),
    ],
)
def test_nixl_that_is_broken_is_not_said_to_be_missing_and_a_broken_connector_is_a_fault(
    tmp_path, monkeypatch, module, words
):
    (tmp_path / "nixl").mkdir()
    (tmp_path / "nixl" / "__init__.py").write_text("")
    (tmp_path / "nixl" / "_bindings.py").write_text(module)
    (tmp_path / "torch.py").write_text("raise ImportError('torch is broken here')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    one = node._nixl(DEFAULTS)
    assert words in one.says
    assert "pip install" not in one.says + one.fix
    one = node._connector()
    assert (one.verdict, "torch is broken here" in one.says) == ("fault", True)


def test_few_open_files_are_a_hint_and_locked_memory_matters_to_rdma_only(monkeypatch):
    with limited(resource.RLIMIT_NOFILE, 1024):  # as some containers have it
        one = node._open_files()
    assert one.verdict == "hint"
    assert "ulimit -n" in one.fix
    with limited(resource.RLIMIT_MEMLOCK, 2**16):
        assert node._locked_memory(DEFAULTS).verdict == "ok"
        monkeypatch.setattr(node, "has_rdma", lambda: True)
        assert "memlock" in node._locked_memory(DEFAULTS).fix


def test_a_secret_that_cannot_be_used_is_a_fault(tmp_path):
    token = tmp_path / "token"
    token.write_text("0123456789abcdef")
    config = load_config(overrides={"security.auth_token_file": str(token)}, environ={})
    for mode, verdict, fix in ((0o644, "fault", "chmod 600"), (0o600, "ok", "")):
        token.chmod(mode)
        (one,) = node._secrets(config)
        assert (one.verdict, fix in one.fix) == (verdict, True)
    token.unlink()
    (one,) = node._secrets(config)
    assert "cannot be read" in one.says


NOBODY = 65534
needs_root = pytest.mark.skipif(os.getuid() != 0, reason="needs root, to be another user")


def config_of(parent: Path, **overrides: str) -> KVRayConfig:
    values = {"arena.dir": str(parent), "cluster_name": "test"}
    dotted = {key.replace("__", "."): value for key, value in overrides.items()}
    return load_config(overrides=values | dotted, environ={})


@pytest.fixture
def config(parent: Path) -> KVRayConfig:
    return config_of(parent)


@pytest.fixture
def shard(config: KVRayConfig) -> Iterator[Far]:
    """The process of a shard that serves in the configuration's directory."""
    with shard_process(config.node_dir, "a") as process:
        yield process
    sweep(config.node_dir, 5.0)


def only_fault(config: KVRayConfig, check: str = "", *, says: str = "", fix: str = "") -> None:
    """Fail unless there is one fault, of this check if one is named, with these words."""
    (found,) = (one for one in arena_findings(config) if one.verdict == "fault")
    assert check in ("", found.check)
    assert says in found.says
    assert not found.says.endswith(".")
    assert found.fix
    assert fix in found.fix


def test_environment_in_which_everything_works_has_no_fault_and_is_left_as_it_was(shard, config):
    checks = ("mount", "user", "arena", "lock", "socket", "versions", "clock", "copy rate")
    with contextlib.closing(Arena(config.node_dir, lock_wait_s=1)) as arena:
        states = arena.tables.slot_state.tobytes()
        found = {one.check: one.verdict for one in arena_findings(config)}
        assert found == dict.fromkeys(checks, "ok")
        assert arena.tables.slot_state.tobytes() == states


def test_mount_that_is_missing_too_small_or_a_disk_is_named_with_the_remedy(parent, tmp_path):
    only_fault(config_of(parent / "missing"), "mount", fix="mount the memory volume")
    only_fault(config_of(parent, arena__capacity="1024TiB"), fix="remount,size=")
    (mount, *_) = arena_findings(config_of(tmp_path))
    assert (mount.check, mount.verdict) == ("mount", "hint")
    assert "no memory" in mount.says


def test_tier_of_another_name_is_named_also_where_its_arena_fills_the_mount(
    shard, parent, monkeypatch
):
    config = config_of(parent, cluster_name="tset")
    only_fault(config, says="'test'", fix="cluster_name")
    room = read_mount(parent)
    assert room is not None
    monkeypatch.setattr(node, "read_mount", lambda _: replace(room, free=0))
    only_fault(config, says="'test'")


def test_node_without_a_tier_is_told_to_start_one_and_to_wait_for_one_that_starts(config):
    only_fault(config, fix="kvray up")
    config.node_dir.mkdir(mode=0o700)
    only_fault(config, says="prepares")


@needs_root
def test_tier_of_another_user_is_a_matter_of_users(shard, config):
    config.arena.dir.chmod(0o755)
    with another_user():
        only_fault(config, "user", says=f"({NOBODY})")


@needs_root
def test_arena_that_another_user_has_laid_is_not_trusted_even_by_root(shard, config):
    os.chown(config.node_dir, NOBODY, NOBODY)
    try:
        only_fault(config, "user", fix="arena.group")
    finally:
        os.chown(config.node_dir, 0, 0)


@contextlib.contextmanager
def another_user() -> Iterator[None]:
    """Have what this process may do be what a user may who owns nothing."""
    groups = os.getgroups()
    os.setgroups([])
    os.setegid(NOBODY)
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(0)
        os.setgroups(groups)


def test_arena_of_another_format_is_a_matter_of_versions(shard, config):
    with (config.node_dir / ARENA_FILE).open("r+b") as file:
        file.seek(8)  # format_version
        file.write((999).to_bytes(4, "little"))
    only_fault(config, fix="same version of kvray")


def test_arena_that_stays_locked_names_what_to_look_for(shard, config, child_in):
    child = child_in(config.node_dir)
    assert child.say("small.acquire(arena._lock, 1)") == "True"
    only_fault(config, "lock", says=f"process {child.pid} (", fix="lslocks")


def test_arena_whose_places_are_all_taken_names_the_setting(shard, config, child_in):
    for _ in range(7):  # of 8; the shard process has one
        child_in(config.node_dir).say("arena.join('engine')")
    only_fault(config, "holders", fix="arena.holders_max")


def test_frozen_or_dead_shard_is_a_matter_of_the_socket(shard, config, monkeypatch):
    monkeypatch.setattr(node, "_ANSWER_S", 0.5)
    shard.freeze()
    os.waitid(os.P_PID, shard.process.pid, os.WSTOPPED)
    only_fault(config, "socket", says="did not answer")
    shard.kill()
    only_fault(config, "socket")


def test_a_shard_that_comes_last_on_busy_cores_is_a_hint(shard, config):
    own = os.getpriority(os.PRIO_PROCESS, 0)
    for thread in os.listdir(f"/proc/{shard.process.pid}/task"):
        os.setpriority(os.PRIO_PROCESS, int(thread), own + 4)
    (found,) = (one for one in arena_findings(config) if one.check == "priority")
    assert (found.verdict, f"niceness {own + 4}" in found.says) == ("hint", True)
    assert "RAY_worker_niceness=0" in found.fix


def test_socket_and_file_of_two_arenas_are_told_apart(shard, config, parent):
    other, mixed = config_of(parent, cluster_name="other"), parent / "kvray-mixed"
    with shard_process(other.node_dir, "b"):
        shutil.copytree(config.node_dir, mixed, ignore=shutil.ignore_patterns(SOCKET_FILE))
        (mixed / SOCKET_FILE).symlink_to(other.node_dir / SOCKET_FILE)
        config = config_of(parent, cluster_name="mixed")
        only_fault(config, says="owns arena", fix="one directory for both")
    sweep(other.node_dir, 5.0)


def test_where_nothing_can_be_looked_at():
    here, there = Path("/mnt/kvray-test"), Path("/dev/shm/kvray-test")
    shards = [{"shard": "kvray-shard-0123456789ab", "directory": str(here)}]
    without_shard = why_not_here(shards, "bb" * 28, here)
    elsewhere = why_not_here(shards, "0123456789abcdef", there)
    assert without_shard is not None
    assert elsewhere is not None
    assert without_shard.verdict == "skipped"
    assert (elsewhere.verdict, "arena.dir" in elsewhere.fix) == ("hint", True)
    assert why_not_here(shards, "0123456789abcdef", here) is None
