import errno
import fcntl
import hashlib
import json
import shutil
import stat
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from kvray.errors import ConfigError
from kvray.identity import fingerprint
from kvray.identity.fingerprint import Progress
from tests.unit.identity.conftest import (
    CONFIG,
    GOLDEN,
    TENSORS,
    change_byte,
    of,
    read_sizes,
    safetensors,
    write_checkpoint,
)
from tests.waiting import HANG_S

# Several processes, and those that stop.


def test_of_processes_that_want_one_checkpoint_one_reads_it(checkpoint, cache, monkeypatch):
    may_read, waiting = threading.Event(), threading.Event()
    sizes = read_sizes(monkeypatch, before=lambda: may_read.wait(HANG_S))
    monkeypatch.setattr(fingerprint, "_POLL_S", 0.001)

    def find(_: int) -> str:
        return of(checkpoint, cache, progress=Progress(on_step=waiting.set))

    with ThreadPoolExecutor(3) as pool:
        found = pool.map(find, range(3))
        assert waiting.wait(HANG_S)
        may_read.set()
        assert list(found) == 3 * [GOLDEN]
    assert sorted(sizes) == sorted(path.stat().st_size for path in checkpoint.iterdir())


def test_a_known_checkpoint_waits_for_nobody(checkpoint, cache):
    of(checkpoint, cache)
    (lock,) = cache.glob("*.lock")
    waits = Progress(on_step=Mock(side_effect=AssertionError("it waits")))
    with lock.open("r+b") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert of(checkpoint, cache, progress=waits) == GOLDEN


@pytest.mark.parametrize(("every_s", "is_said"), [(0.0, True), (60.0, False)])
def test_what_is_known_is_kept_now_and_then(checkpoint, cache, monkeypatch, every_s, is_said):
    kept, keep = list[int](), fingerprint.DigestCache.keep

    def note(memory: fingerprint.DigestCache, digests: Any) -> None:
        kept.append(len(digests))
        keep(memory, digests)

    monkeypatch.setattr(fingerprint.DigestCache, "keep", note)
    monkeypatch.setattr(fingerprint, "_KEEP_S", every_s)
    of(checkpoint, cache)
    assert kept == ([0, 1, 2] if is_said else [2])
    (lock,) = cache.glob("*.lock")
    size = sum(path.stat().st_size for path in checkpoint.iterdir())
    assert lock.read_bytes() == (struct.pack("<QQ", size, size) if is_said else b"")


TURN = """
import fcntl, os, struct, sys, time
fd = os.open(sys.argv[1], os.O_RDWR)
fcntl.flock(fd, fcntl.LOCK_EX)
os.pwrite(fd, struct.pack('<QQ', 7, 9), 0)
print(flush=True)
time.sleep(60)
"""


@pytest.fixture
def held(entry: Path) -> Iterator[Any]:
    """A process that has its turn to read the checkpoint and does not get on."""
    entry.unlink()
    command = [sys.executable, "-c", TURN, str(entry.with_suffix(".lock"))]
    process: Any
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        yield process
        process.kill()


def test_the_turn_of_a_process_that_died_is_over(checkpoint, cache, held):
    progress = Progress(on_step=lambda: held.kill() or held.wait(10))
    assert of(checkpoint, cache, progress=progress) == GOLDEN
    assert held.poll() is not None, "it was waited for"


def test_who_stands_still_is_not_waited_for(checkpoint, cache, held, monkeypatch):
    monkeypatch.setattr(fingerprint, "_STALL_S", 0.05)
    monkeypatch.setattr(fingerprint, "_POLL_S", 0.01)
    assert of(checkpoint, cache) == GOLDEN
    assert held.poll() is None


def stop(checkpoint: Path, cache: Path, *, beyond_bytes: int) -> Progress:
    """End a reading when more bytes are done; return how far it is."""

    def end() -> None:
        if progress.done_bytes > beyond_bytes:
            raise ConfigError("stopped")

    progress = Progress(on_step=end)
    with pytest.raises(ConfigError, match="stopped"):
        of(checkpoint, cache, progress=progress)
    return progress


@pytest.mark.usefixtures("held")
def test_who_waits_knows_how_far_the_other_is_and_may_stop(checkpoint, cache):
    progress = stop(checkpoint, cache, beyond_bytes=6)
    assert (progress.done_bytes, progress.total_bytes) == (7, 9)


def test_a_reading_that_was_ended_goes_on_where_it_was(tmp_path, cache, monkeypatch):
    checkpoint = write_checkpoint(tmp_path / "model", a__bin=b"1" * 1000, b__bin=b"2" * 10)
    monkeypatch.setattr(fingerprint, "_KEEP_S", 0.0)
    stop(checkpoint, cache, beyond_bytes=1000)
    sizes = read_sizes(monkeypatch)
    assert of(checkpoint, cache) == of(checkpoint)
    assert sum(sizes) < 2 * sum(path.stat().st_size for path in checkpoint.iterdir())


def test_a_cache_without_locks_is_used(checkpoint, cache, monkeypatch):
    monkeypatch.setattr(fcntl, "flock", Mock(side_effect=OSError(errno.ENOLCK, "no locks")))
    assert of(checkpoint, cache) == GOLDEN


# The cache.


@pytest.fixture
def entry(checkpoint: Path, cache: Path) -> Path:
    of(checkpoint, cache)
    (found,) = cache.glob("*.json")
    return found


def test_known_checkpoints_stay_unread_and_their_file_private(
    checkpoint, cache, entry, monkeypatch
):
    sizes = read_sizes(monkeypatch)
    assert (of(checkpoint, cache), sizes) == (GOLDEN, [])
    assert list(cache.glob("*.json")) == [entry]
    assert {stat.S_IMODE(path.stat().st_mode) for path in cache.iterdir()} == {0o600}


CHANGES: dict[str, Callable[[Path, Path], object]] = {
    "a byte, at once": lambda path, other: change_byte(path / "model.safetensors", 1000),
    "another checkpoint is mounted there": lambda path, other: (
        path.resolve().rename(path.with_name("away")),
        other.rename(path.resolve()),
    ),
    "a file more": lambda path, other: (path / "more.bin").write_bytes(b"more"),
    "a link leads elsewhere": lambda path, other: (path.unlink(), path.symlink_to(other)),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_seen_through_the_cache(checkpoint, cache, tmp_path, name):
    link = tmp_path / "link"
    link.symlink_to(checkpoint)
    other = write_checkpoint(tmp_path / "other", config__json=CONFIG.replace("2", "3"))
    before = of(link, cache)
    CHANGES[name](link, other)
    assert of(link, cache) != before


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"null", b"\xff", b"[" * 100_000, b'{"sha256": 2}'],
    ids=lambda content: repr(content[:20]),
)
def test_damaged_caches_are_written_again(checkpoint, cache, entry, content):
    valid = entry.read_bytes()
    entry.write_bytes(content)
    assert of(checkpoint, cache) == GOLDEN
    assert entry.read_bytes() == valid


def test_made_up_digests_miss_and_changed_files_are_read(checkpoint, cache, entry, monkeypatch):
    kept = json.loads(entry.read_text())
    for made_up in ("short", 7, None, "ab" * 32):
        made = {"sha256": dict.fromkeys(kept["sha256"], made_up)}
        entry.write_text(json.dumps(kept | made))
        assert of(checkpoint, cache) == GOLDEN
    (checkpoint / "config.json").write_text("{}")
    sizes = read_sizes(monkeypatch)
    of(checkpoint, cache)
    assert sizes == [2]


def test_a_cache_that_cannot_be_written_is_a_miss_and_leaves_no_file(checkpoint, cache, entry):
    entry.unlink()
    entry.mkdir()
    assert of(checkpoint, cache) == of(checkpoint, checkpoint / "config.json" / "cache") == GOLDEN
    before = sorted(checkpoint.parent.rglob("*"))
    assert sorted(cache.iterdir()) == [entry, entry.with_suffix(".lock")]
    of(checkpoint)
    assert sorted(checkpoint.parent.rglob("*")) == before, "nobody asked for a cache"


# What a hub's cache names.


def write_snapshot(cache: Path, revision: str, checkpoint: Path) -> Path:
    """Write a checkpoint as a hub's cache has it: large files by sha256, small ones by another."""
    blobs, snapshot = cache / "blobs", cache / "snapshots" / revision
    blobs.mkdir(parents=True, exist_ok=True)
    snapshot.mkdir(parents=True)
    for path in sorted(checkpoint.iterdir()):
        is_large = path.suffix == ".safetensors"
        data = path.read_bytes()
        name = (hashlib.sha256 if is_large else hashlib.sha1)(data).hexdigest()
        if not (blobs / name).exists():
            (blobs / name).write_bytes(data)
        (snapshot / path.name).symlink_to(Path("../../blobs") / name)
    return snapshot


@pytest.fixture
def snapshot(checkpoint: Path, tmp_path: Path) -> Path:
    made = write_snapshot(tmp_path / "hub", "abc", checkpoint)
    time.sleep(fingerprint._TICK_NS / 1e9)  # a change from here on has a later time than the links
    return made


def test_blobs_named_by_digest_stay_unread(snapshot, tmp_path, monkeypatch):
    link = tmp_path / "link"
    link.symlink_to(snapshot)
    sizes = read_sizes(monkeypatch)
    assert of(snapshot) == of(link) == GOLDEN
    assert sizes == 2 * [len(CONFIG)]


@pytest.mark.parametrize("keeps_times", [False, True])
def test_blobs_edited_in_place_are_read_everywhere(checkpoint, snapshot, tmp_path, keeps_times):
    weights = snapshot / "model.safetensors"
    if keeps_times:
        change_byte(weights, 1000)
    else:
        weights.write_bytes(safetensors(TENSORS | {"embed": bytes(1024)}))
    edited = of(Path(shutil.copytree(snapshot, tmp_path / "flat")))
    assert edited == of(snapshot) != GOLDEN
    time.sleep(fingerprint._TICK_NS / 1e9)
    assert of(write_snapshot(tmp_path / "hub", "def", checkpoint)) == edited
    if not keeps_times:  # which a copy keeps, too
        for name in ("blobs", "snapshots"):  # links later than the files, as after a download
            shutil.copytree(tmp_path / "hub" / name, tmp_path / "copy" / name, symlinks=True)
        assert of(tmp_path / "copy" / "snapshots" / "abc") == edited


@pytest.mark.parametrize("layout", ["store/{0}", "blobs/{0}", "hub/blobs/{0}.old"])
def test_names_that_no_hub_gave_are_no_proof(checkpoint, tmp_path, layout):
    target = tmp_path / layout.format("0" * 64)
    snapshot = tmp_path / "hub" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(checkpoint / "model.safetensors", target)
    shutil.copy(checkpoint / "config.json", snapshot)
    (snapshot / "model.safetensors").symlink_to(target)
    assert of(snapshot) == GOLDEN
