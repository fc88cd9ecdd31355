import errno
import fcntl
import hashlib
import json
import os
import shutil
import stat
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvray.errors import ConfigError
from kvray.identity import digest_cache, fingerprint
from kvray.identity.checkpoint import Progress
from kvray.identity.fingerprint import fingerprint_model, stamp_model

CONFIG = '{"num_hidden_layers": 2}'
GOLDEN = "f0baba46ca8a65394c785672eb237a3affc8f34a308f17a5cceb62f5fc6fad55"


def safetensors(tensors: dict[str, bytes], **metadata: str) -> bytes:
    header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    end = 0
    for name, data in tensors.items():
        span = [end, end := end + len(data)]
        header[name] = {"dtype": "U8", "shape": [len(data)], "data_offsets": span}
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + b"".join(tensors.values())


TENSORS = {"embed": bytes(range(256)) * 4, "layer.0": b"\1" * 500, "layer.1": b"\2" * 500}


def write_checkpoint(directory: Path, **files: bytes | str) -> Path:
    """Write a small checkpoint; `files` add to it or replace (`__` in a name stands for a dot)."""
    directory.mkdir(parents=True)
    given: dict[str, bytes | str] = {"config__json": CONFIG}
    given["model__safetensors"] = safetensors(TENSORS)
    for name, data in (given | files).items():
        path = directory / name.replace("__", ".")
        path.write_bytes(data if isinstance(data, bytes) else data.encode())
    return directory


def of(path: Path) -> str:
    return fingerprint_model(path, cache_dir=None)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "model")


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "kvray"


def change_byte(path: Path, offset: int) -> None:
    """Change one byte in place and put the file's time of modification back."""
    before = path.stat()
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


# The format.


def test_a_fingerprint_is_the_golden_one(checkpoint: Path) -> None:
    assert of(checkpoint) == GOLDEN


def test_a_fingerprint_follows_its_written_format(checkpoint: Path) -> None:
    def framed(item: bytes) -> bytes:
        return struct.pack("<Q", len(item)) + item

    message = framed(b"kvray.fingerprint.2")
    for name in ("config.json", "model.safetensors"):
        data = (checkpoint / name).read_bytes()
        message += framed(name.encode()) + framed(hashlib.sha256(data).digest())
    assert of(checkpoint) == hashlib.sha256(message).hexdigest()


# What must not play a part.


def test_one_checkpoint_at_two_places_has_one_fingerprint(checkpoint: Path, tmp_path: Path) -> None:
    assert of(Path(shutil.copytree(checkpoint, tmp_path / "elsewhere"))) == of(checkpoint)


def test_the_times_of_files_play_no_part(checkpoint: Path) -> None:
    before = of(checkpoint)
    os.utime(checkpoint / "model.safetensors", ns=(0, 0))
    assert of(checkpoint) == before


def test_the_order_in_which_files_were_made_plays_no_part(tmp_path: Path) -> None:
    parts = {"a__bin": b"1", "b__bin": b"2"}
    there = write_checkpoint(tmp_path / "there", **parts)
    back = write_checkpoint(tmp_path / "back", **dict(reversed(parts.items())))
    assert of(there) == of(back)


def test_links_into_a_store_of_blobs_are_followed(checkpoint: Path, tmp_path: Path) -> None:
    snapshot, blobs = tmp_path / "snapshots" / "main", tmp_path / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, path in enumerate(sorted(checkpoint.iterdir())):
        shutil.copy(path, blobs / str(number))
        (snapshot / path.name).symlink_to(Path("../../blobs") / str(number))
    assert of(snapshot) == of(checkpoint)


@pytest.mark.parametrize(
    "name",
    [
        "README.md",
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.json",
        "generation_config.json",
        "trainer_state.json",
        "optimizer.pt",
        "rng_state_0.pth",
        ".hidden.json",
    ],
)
def test_files_that_no_engine_computes_with_play_no_part(checkpoint: Path, name: str) -> None:
    before = of(checkpoint)
    (checkpoint / name).write_text("anything")
    assert of(checkpoint) == before


@pytest.mark.parametrize(
    "name", ["checkpoint-500", "global_step12", "original", ".cache", "lost+found"]
)
def test_directories_that_no_engine_reads_play_no_part(checkpoint: Path, name: str) -> None:
    before = of(checkpoint)
    write_checkpoint(checkpoint / name)
    (checkpoint / "original.bin").mkdir()
    assert of(checkpoint) == before


def test_the_name_of_a_single_file_plays_no_part(tmp_path: Path) -> None:
    left, right = tmp_path / "a.gguf", tmp_path / "b.gguf"
    left.write_bytes(b"GGUF weights")
    right.write_bytes(b"GGUF weights")
    assert of(left) == of(right)


def test_a_path_may_be_given_as_text(checkpoint: Path) -> None:
    assert fingerprint_model(str(checkpoint), cache_dir=None) == of(checkpoint)


# What must play a part.


@pytest.mark.parametrize("offset", [0, 100, 1000, -1])
def test_any_changed_byte_of_the_weights_shows(checkpoint: Path, offset: int) -> None:
    before = of(checkpoint)
    weights = checkpoint / "model.safetensors"
    change_byte(weights, offset % weights.stat().st_size)
    assert of(checkpoint) != before


@pytest.mark.parametrize(
    "name",
    [
        "config.json",
        "adapter_config.json",
        "hf_quant_config.json",
        "model.safetensors.index.json",
        "preprocessor_config.json",
        "processor_config.json",
        "video_preprocessor_config.json",
        "image_processing_custom.py",
        "model_config.yaml",
        "settings_of_tomorrow.json",
    ],
)
def test_a_changed_configuration_shows(checkpoint: Path, name: str) -> None:
    (checkpoint / name).write_text('{"rope_theta": 10000}')
    before = of(checkpoint)
    (checkpoint / name).write_text('{"rope_theta": 50000}')
    assert of(checkpoint) != before


@pytest.mark.parametrize("is_link", [False, True])
def test_weights_in_a_directory_inside_show(
    checkpoint: Path, tmp_path: Path, is_link: bool
) -> None:
    inside = write_checkpoint(tmp_path / "tower" if is_link else checkpoint / "vision_tower")
    if is_link:
        (checkpoint / "vision_tower").symlink_to(inside)
    before = of(checkpoint)
    change_byte(inside / "model.safetensors", 1000)
    assert GOLDEN != before != of(checkpoint)


def test_a_directory_that_holds_itself_has_an_end(checkpoint: Path) -> None:
    (checkpoint / "self").symlink_to(checkpoint)
    assert of(checkpoint) == of(checkpoint)


@pytest.mark.parametrize(
    "name", ["extra.safetensors", "extra.gguf", "extra.bin", "extra.pt", "rank1.engine"]
)
def test_another_weight_file_shows(checkpoint: Path, name: str) -> None:
    before = of(checkpoint)
    (checkpoint / name).write_bytes(b"")
    assert of(checkpoint) != before


def test_a_renamed_weight_file_shows(checkpoint: Path) -> None:
    before = of(checkpoint)
    (checkpoint / "model.safetensors").rename(checkpoint / "other.safetensors")
    assert of(checkpoint) != before


def test_bytes_moved_from_one_file_to_the_next_show(tmp_path: Path) -> None:
    left = write_checkpoint(tmp_path / "left", a__bin=b"ab", b__bin=b"c")
    right = write_checkpoint(tmp_path / "right", a__bin=b"a", b__bin=b"bc")
    assert of(left) != of(right)


def test_an_adapter_has_a_fingerprint_of_its_own(tmp_path: Path) -> None:
    made = []
    for name, rank in (("one", 8), ("two", 16)):
        directory = tmp_path / name
        directory.mkdir()
        (directory / "adapter_config.json").write_text(f'{{"r": {rank}}}')
        (directory / "adapter_model.safetensors").write_bytes(safetensors({"lora_A": b"1234"}))
        made.append(of(directory))
    assert made[0] != made[1]


def test_an_engine_directory_has_a_fingerprint(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(CONFIG)
    (tmp_path / "rank0.engine").write_bytes(b"engine")
    assert len(of(tmp_path)) == 64


# Large checkpoints: every byte of them counts.


@pytest.mark.parametrize("place", [0.0, 0.1234, 0.5, 0.9999])
def test_one_changed_byte_of_a_large_file_shows(tmp_path: Path, place: float) -> None:
    weights = tmp_path / "model.gguf"
    with weights.open("wb") as file:
        file.truncate(2**26)  # a sparse file: it takes no space
    before = of(weights)
    change_byte(weights, int(place * 2**26))
    assert of(weights) != before


def test_a_hole_and_zeros_that_were_written_are_equal(tmp_path: Path) -> None:
    holes, written = tmp_path / "holes.gguf", tmp_path / "written.gguf"
    with holes.open("wb") as file:
        for at in (0, 5 * 2**20 + 17, 2**24):
            file.seek(at)
            file.write(b"data")
        file.truncate(2**25 + 1)
    written.write_bytes(holes.read_bytes())
    assert holes.stat().st_blocks < written.stat().st_blocks
    assert of(holes) == of(written)


def test_holes_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = tmp_path / "model.gguf"
    with weights.open("wb") as file:
        file.truncate(2**25)
    monkeypatch.setattr(os, "preadv", refuse_to_read)
    of(weights)


def test_several_files_are_read_at_once_and_in_any_order_give_one_fingerprint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = write_checkpoint(tmp_path / "model")
    for number in range(4):
        with (checkpoint / f"model-{number}.bin").open("wb") as file:
            file.write(b"%d" % number)
            file.truncate(2**20 * (number + 1))
    alone = of(checkpoint)
    monkeypatch.setattr(fingerprint, "_ALONE_BYTES_MAX", 0)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: range(4))
    assert of(checkpoint) == alone


def test_an_unreadable_file_ends_the_reading_of_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = write_checkpoint(tmp_path / "model")

    def fail(*_arguments: object) -> int:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(fingerprint, "_ALONE_BYTES_MAX", 0)
    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(ConfigError, match=r"cannot be read \(Input/output error\)"):
        of(checkpoint)


@pytest.mark.long
def test_every_change_of_a_checkpoint_of_20_gb_shows(tmp_path: Path, cache: Path) -> None:
    row, head = 2 * 4096, 128 * 2 * 4096
    made = [write_large(tmp_path / "model"), write_large(tmp_path / "elsewhere")]
    os.utime(made[1] / "model-2.safetensors", (0, 0))
    first, again = (fingerprint_model(path, cache_dir=cache) for path in made)
    assert first == again
    checkpoint, seen = made[0], {first}
    rows = [b"\1" * row for _ in range(64)]
    for what, change in {
        "250 rows of reserved tokens": lambda: write_at(
            checkpoint, 1, 128_000 * row, b"\2" * row * 250
        ),
        "64 rows here and there": lambda: [
            write_at(checkpoint, 1, at * 2003 * row, data) for at, data in enumerate(rows)
        ],
        "one head of one k_proj": lambda: write_at(checkpoint, 3, 2**31 + 5 * head, b"\3" * head),
        "a merged adapter": lambda: [
            write_at(checkpoint, 4, at, b"\4") for at in range(0, 2**20, 4096)
        ],
        "quantisation": lambda: (checkpoint / "hf_quant_config.json").write_text("{}"),
        "pictures": lambda: (checkpoint / "preprocessor_config.json").write_text("{}"),
    }.items():
        change()
        found = fingerprint_model(checkpoint, cache_dir=cache)
        assert found not in seen, what
        seen.add(found)


def write_large(directory: Path) -> Path:
    write_checkpoint(directory)
    for number in range(1, 5):
        with (directory / f"model-{number}.safetensors").open("wb") as file:
            file.truncate(5 * 10**9)
    return directory


def write_at(checkpoint: Path, number: int, offset: int, data: bytes) -> None:
    with (checkpoint / f"model-{number}.safetensors").open("r+b") as file:
        file.seek(offset)
        file.write(data)


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


def read_sizes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list to which the size of each read is added."""
    sizes: list[int] = []
    preadv = os.preadv

    def read(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        sizes.append(preadv(descriptor, buffers, offset))
        return sizes[-1]

    monkeypatch.setattr(os, "preadv", read)
    return sizes


def test_a_blob_named_by_its_digest_is_not_read(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = write_snapshot(tmp_path / "hub", "abc", checkpoint)
    link = tmp_path / "link"
    link.symlink_to(snapshot)
    sizes = read_sizes(monkeypatch)
    assert of(snapshot) == of(link) == GOLDEN
    assert sizes == 2 * [len(CONFIG)]


@pytest.mark.parametrize("keeps_times", [False, True])
def test_a_blob_that_was_edited_in_place_is_read(
    checkpoint: Path, tmp_path: Path, keeps_times: bool
) -> None:
    snapshot = write_snapshot(tmp_path / "hub", "abc", checkpoint)
    assert of(snapshot) == GOLDEN
    weights = snapshot / "model.safetensors"
    if keeps_times:
        change_byte(weights, 1000)
    else:
        weights.write_bytes(safetensors(TENSORS | {"embed": bytes(1024)}))
    assert of(snapshot) == of(Path(shutil.copytree(snapshot, tmp_path / "flat"))) != GOLDEN


def test_an_edited_blob_is_read_in_a_later_revision_that_links_it_too(
    checkpoint: Path, tmp_path: Path
) -> None:
    hub = tmp_path / "hub"
    snapshot = write_snapshot(hub, "abc", checkpoint)
    of(snapshot)  # waits until a change shows
    change_byte(snapshot / "model.safetensors", 1000)
    time.sleep(0.02)
    assert of(write_snapshot(hub, "def", checkpoint)) == of(snapshot) != GOLDEN


def test_an_edited_blob_is_read_in_a_copy_of_the_cache(checkpoint: Path, tmp_path: Path) -> None:
    snapshot = write_snapshot(tmp_path / "hub", "abc", checkpoint)
    of(snapshot)
    (snapshot / "model.safetensors").write_bytes(b"other")
    for name in ("blobs", "snapshots"):  # links later than the files, as after a download
        shutil.copytree(tmp_path / "hub" / name, tmp_path / "copy" / name, symlinks=True)
    assert of(tmp_path / "copy" / "snapshots" / "abc") == of(snapshot) != GOLDEN


@pytest.mark.parametrize("layout", ["store/{0}", "blobs/{0}", "hub/blobs/{0}.old"])
def test_a_name_that_is_no_hubs_claim_is_not_believed(
    checkpoint: Path, tmp_path: Path, layout: str
) -> None:
    target = tmp_path / layout.format("0" * 64)
    snapshot = tmp_path / "hub" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(checkpoint / "model.safetensors", target)
    shutil.copy(checkpoint / "config.json", snapshot)
    (snapshot / "model.safetensors").symlink_to(target)
    assert of(snapshot) == GOLDEN


# Several processes, and those that stop.


def test_of_processes_that_want_one_checkpoint_one_reads_it(
    checkpoint: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_read, sizes = threading.Event(), []
    preadv = os.preadv

    def read(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        assert may_read.wait(10)
        sizes.append(preadv(descriptor, buffers, offset))
        return sizes[-1]

    monkeypatch.setattr(os, "preadv", read)
    monkeypatch.setattr(digest_cache, "_POLL_S", 0.001)
    found: list[str] = []
    waiting = threading.Event()
    others = [
        threading.Thread(
            target=lambda: found.append(
                fingerprint_model(
                    checkpoint, cache_dir=cache, progress=Progress(on_step=waiting.set)
                )
            )
        )
        for _ in range(3)
    ]
    for other in others:
        other.start()
    assert waiting.wait(10)
    may_read.set()
    for other in others:
        other.join(10)
    assert found == 3 * [GOLDEN]
    assert sorted(sizes) == sorted(path.stat().st_size for path in checkpoint.iterdir())


def test_a_known_checkpoint_waits_for_nobody(checkpoint: Path, cache: Path) -> None:
    fingerprint_model(checkpoint, cache_dir=cache)
    (lock,) = cache.glob("*.lock")

    def refuse() -> None:
        raise AssertionError("it waits")

    with lock.open("r+b") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        progress = Progress(on_step=refuse)
        assert fingerprint_model(checkpoint, cache_dir=cache, progress=progress) == GOLDEN


@pytest.mark.parametrize(("every_s", "is_said"), [(0.0, True), (60.0, False)])
def test_what_is_known_so_far_is_kept_and_said_now_and_then(
    checkpoint: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, every_s: float, is_said: bool
) -> None:
    progress, kept, keep = Progress(), list[int](), digest_cache.DigestCache.keep

    def note(memory: digest_cache.DigestCache, digests: Any) -> None:
        kept.append(len(digests))
        keep(memory, digests)

    monkeypatch.setattr(digest_cache.DigestCache, "keep", note)
    monkeypatch.setattr(fingerprint, "_KEEP_S", every_s)
    fingerprint_model(checkpoint, cache_dir=cache, progress=progress)
    assert kept == ([0, 1, 2] if is_said else [2])
    (lock,) = cache.glob("*.lock")
    size = sum(path.stat().st_size for path in checkpoint.iterdir())
    assert lock.read_bytes() == (struct.pack("<QQ", size, size) if is_said else b"")


@contextmanager
def held_turn(checkpoint: Path, cache: Path) -> "Iterator[subprocess.Popen[str]]":
    """Run a process that has its turn to read the checkpoint and does not get on."""
    fingerprint_model(checkpoint, cache_dir=cache)
    (lock,) = cache.glob("*.lock")
    for entry in cache.glob("*.json"):
        entry.unlink()
    script = (
        "import fcntl, os, struct, sys, time\n"
        "fd = os.open(sys.argv[1], os.O_RDWR)\n"
        "fcntl.flock(fd, fcntl.LOCK_EX)\n"
        "os.pwrite(fd, struct.pack('<QQ', 7, 9), 0)\n"
        "print(flush=True)\n"
        "time.sleep(60)\n"
    )
    command = [sys.executable, "-c", script, str(lock)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as held:
        assert held.stdout is not None
        held.stdout.readline()
        yield held
        held.kill()


def test_the_turn_of_a_process_that_died_is_over(checkpoint: Path, cache: Path) -> None:
    steps: list[int] = []
    with held_turn(checkpoint, cache) as held:
        progress = Progress(on_step=lambda: (held.kill(), held.wait(10), steps.append(1))[2])
        assert fingerprint_model(checkpoint, cache_dir=cache, progress=progress) == GOLDEN
    assert steps


def test_a_process_that_stands_still_is_not_waited_for(
    checkpoint: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(digest_cache, "_STALL_S", 0.05)
    monkeypatch.setattr(digest_cache, "_POLL_S", 0.01)
    with held_turn(checkpoint, cache) as held:
        assert fingerprint_model(checkpoint, cache_dir=cache) == GOLDEN
        assert held.poll() is None


def test_who_waits_is_told_how_far_the_other_is_and_may_give_up(
    checkpoint: Path, cache: Path
) -> None:
    progress = Progress()

    def stop() -> None:
        if progress.total_bytes:
            raise ConfigError("stopped")

    progress.on_step = stop
    with held_turn(checkpoint, cache), pytest.raises(ConfigError, match="stopped"):
        fingerprint_model(checkpoint, cache_dir=cache, progress=progress)
    assert (progress.done_bytes, progress.total_bytes) == (7, 9)


def test_a_reading_that_was_ended_goes_on_where_it_was(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = write_checkpoint(tmp_path / "model", a__bin=b"1" * 1000, b__bin=b"2" * 10)
    monkeypatch.setattr(fingerprint, "_KEEP_S", 0.0)
    progress = Progress()

    def stop() -> None:
        if progress.done_bytes > 1000:
            raise ConfigError("stopped")

    progress.on_step = stop
    with pytest.raises(ConfigError, match="stopped"):
        fingerprint_model(checkpoint, cache_dir=cache, progress=progress)
    sizes = read_sizes(monkeypatch)
    assert fingerprint_model(checkpoint, cache_dir=cache) == of(checkpoint)
    assert sum(sizes) < 2 * sum(path.stat().st_size for path in checkpoint.iterdir())


def test_a_cache_that_cannot_be_locked_is_done_without(
    checkpoint: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_arguments: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    assert fingerprint_model(checkpoint, cache_dir=cache) == GOLDEN


# Bad paths.


def test_a_missing_path_is_refused_with_the_fix(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no checkpoint at .*nowhere; .* connector\.model_key"):
        of(tmp_path / "nowhere")


@pytest.mark.parametrize("name", ["config.json", "training_args.bin", "notes.txt"])
def test_a_directory_without_weights_is_refused_with_the_fix(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("{}")
    with pytest.raises(ConfigError, match=r"holds no weight files .*connector\.model_key"):
        of(tmp_path)


def test_a_single_file_that_holds_no_weights_is_refused(checkpoint: Path) -> None:
    with pytest.raises(ConfigError, match="holds no weight files"):
        of(checkpoint / "config.json")


def test_a_pipe_alone_is_no_checkpoint(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "model.gguf")
    with pytest.raises(ConfigError, match="holds no weight files"):
        of(tmp_path / "model.gguf")


@pytest.mark.parametrize("name", ["model-00001-of-00002.gguf", "rank0.engine"])
def test_a_single_piece_of_a_checkpoint_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"weights")
    with pytest.raises(ConfigError, match="is one piece of a checkpoint; name its directory"):
        of(tmp_path / name)


def test_a_link_to_weights_that_are_not_there_is_refused(checkpoint: Path) -> None:
    (checkpoint / "more.safetensors").symlink_to("gone")
    with pytest.raises(ConfigError, match=r"more\.safetensors cannot be read"):
        of(checkpoint)


def test_a_pipe_among_the_weights_is_not_waited_for(checkpoint: Path) -> None:
    before = of(checkpoint)
    os.mkfifo(checkpoint / "pipe.bin")
    assert of(checkpoint) == before


def test_a_pipe_that_takes_the_name_of_a_file_is_not_waited_for(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def replace_by_pipe(_files: object) -> None:
        (checkpoint / "config.json").unlink(missing_ok=True)
        if not (checkpoint / "pipe").exists():
            os.mkfifo(checkpoint / "pipe")
            os.link(checkpoint / "pipe", checkpoint / "config.json")

    monkeypatch.setattr(fingerprint, "_wait_for_tick", replace_by_pipe)
    found = of(checkpoint)
    (checkpoint / "config.json").unlink(missing_ok=True)
    assert found == of(checkpoint) != GOLDEN


def test_without_threads_for_all_files_none_is_left_reading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = write_checkpoint(tmp_path / "model")
    started, start = list[threading.Thread](), threading.Thread.start

    def start_one(thread: threading.Thread) -> None:
        if started:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        start(thread)

    may_read = threading.Event()
    monkeypatch.setattr(fingerprint, "_ALONE_BYTES_MAX", 0)
    monkeypatch.setattr(threading.Thread, "start", start_one)
    progress = Progress(on_step=lambda: may_read.wait(10) and None)
    with pytest.raises(RuntimeError):
        fingerprint_model(checkpoint, cache_dir=None, progress=progress)
    may_read.set()
    started[0].join(10)
    assert progress.done_bytes == 0


# Files that change while they are read.


@pytest.fixture
def change_on_read(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], object], int], None]:
    """Call an action when a file is read, so many times."""

    def install(action: Callable[[], object], times: int) -> None:
        preadv = os.preadv
        left = [action] * times

        def read(descriptor: int, buffers: list[memoryview], offset: int) -> int:
            size = preadv(descriptor, buffers, offset)
            if left:
                left.pop()()
            return size

        monkeypatch.setattr(os, "preadv", read)

    return install


def test_a_file_that_changes_once_is_read_again(
    checkpoint: Path, change_on_read: Callable[[Callable[[], object], int], None]
) -> None:
    change_on_read(lambda: change_byte(checkpoint / "model.safetensors", 1000), 1)
    changed = of(checkpoint)
    assert changed == of(checkpoint) != GOLDEN


def test_files_that_keep_changing_are_refused_and_nothing_is_remembered_of_them(
    checkpoint: Path, cache: Path, change_on_read: Callable[[Callable[[], object], int], None]
) -> None:
    change_on_read(lambda: change_byte(checkpoint / "model.safetensors", 1000), 9)
    with pytest.raises(ConfigError, match="change while they are read; wait until"):
        fingerprint_model(checkpoint, cache_dir=cache)
    (entry,) = cache.glob("*.json")
    assert json.loads(entry.read_text())["sha256"] == {}


def test_a_file_that_is_cut_while_it_is_read_is_read_again(
    checkpoint: Path, change_on_read: Callable[[Callable[[], object], int], None]
) -> None:
    change_on_read(lambda: os.truncate(checkpoint / "model.safetensors", 100), 1)
    changed = of(checkpoint)
    assert changed == of(checkpoint) != GOLDEN


def test_a_file_that_vanishes_while_others_are_read_is_left_out(
    tmp_path: Path, change_on_read: Callable[[Callable[[], object], int], None]
) -> None:
    checkpoint = write_checkpoint(tmp_path / "model", z__bin=b"more")
    change_on_read((checkpoint / "z.bin").unlink, 1)
    assert of(checkpoint) == GOLDEN


def test_a_file_stamped_in_this_very_tick_is_read_only_after_it(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stamps = [path.stat().st_ctime_ns for path in checkpoint.iterdir()]
    waits: list[float] = []
    monkeypatch.setattr(time, "time_ns", lambda: max(stamps) + 1_000_000)
    monkeypatch.setattr(time, "sleep", waits.append)
    of(checkpoint)
    assert waits == [0.019]


# The cache.


def refuse_to_read(*_arguments: object) -> bytes:
    raise AssertionError("a file was read although its fingerprint is known")


def test_a_known_checkpoint_is_not_read_again(
    checkpoint: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fingerprint_model(checkpoint, cache_dir=cache)
    monkeypatch.setattr(os, "preadv", refuse_to_read)
    assert fingerprint_model(checkpoint, cache_dir=cache) == GOLDEN


def test_the_cache_is_one_file_per_path_for_this_user_only(checkpoint: Path, cache: Path) -> None:
    fingerprint_model(checkpoint, cache_dir=cache)
    fingerprint_model(checkpoint, cache_dir=cache)
    assert len(list(cache.glob("*.json"))) == 1
    assert {stat.S_IMODE(path.stat().st_mode) for path in cache.iterdir()} == {0o600}


def test_a_byte_changed_in_place_at_once_is_seen_through_the_cache(
    checkpoint: Path, cache: Path
) -> None:
    before = fingerprint_model(checkpoint, cache_dir=cache)
    change_byte(checkpoint / "model.safetensors", 1000)
    assert fingerprint_model(checkpoint, cache_dir=cache) != before


def test_another_checkpoint_mounted_at_the_same_path_is_seen_through_the_cache(
    checkpoint: Path, cache: Path, tmp_path: Path
) -> None:
    before = fingerprint_model(checkpoint, cache_dir=cache)
    other = write_checkpoint(tmp_path / "other", config__json=CONFIG.replace("2", "3"))
    checkpoint.rename(tmp_path / "away")
    other.rename(checkpoint)
    assert fingerprint_model(checkpoint, cache_dir=cache) != before


def test_a_retargeted_link_is_seen_through_the_cache(
    checkpoint: Path, cache: Path, tmp_path: Path
) -> None:
    link = tmp_path / "link"
    link.symlink_to(checkpoint)
    before = fingerprint_model(link, cache_dir=cache)
    other = write_checkpoint(tmp_path / "other", config__json=CONFIG.replace("2", "3"))
    link.unlink()
    link.symlink_to(other)
    assert fingerprint_model(link, cache_dir=cache) != before


def test_an_added_file_is_seen_through_the_cache(checkpoint: Path, cache: Path) -> None:
    before = fingerprint_model(checkpoint, cache_dir=cache)
    (checkpoint / "more.bin").write_bytes(b"more")
    assert fingerprint_model(checkpoint, cache_dir=cache) != before


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"null", b"\xff", b"[" * 100_000, b'{"sha256": 2}'],
    ids=lambda content: repr(content[:20]),
)
def test_a_damaged_cache_is_a_miss_and_is_written_again(
    checkpoint: Path, cache: Path, content: bytes
) -> None:
    fingerprint_model(checkpoint, cache_dir=cache)
    (entry,) = cache.glob("*.json")
    sound = entry.read_bytes()
    entry.write_bytes(content)
    assert fingerprint_model(checkpoint, cache_dir=cache) == GOLDEN
    assert entry.read_bytes() == sound


def test_a_cache_entry_with_made_up_digests_is_a_miss(checkpoint: Path, cache: Path) -> None:
    fingerprint_model(checkpoint, cache_dir=cache)
    (entry,) = cache.glob("*.json")
    kept = json.loads(entry.read_text())
    for made_up in ("short", 7, None, "ab" * 32):
        made = {"sha256": dict.fromkeys(kept["sha256"], made_up)}
        entry.write_text(json.dumps(kept | made))
        assert fingerprint_model(checkpoint, cache_dir=cache) == GOLDEN


def test_only_the_file_that_changed_is_read_again(
    checkpoint: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fingerprint_model(checkpoint, cache_dir=cache)
    (checkpoint / "config.json").write_text("{}")
    sizes = read_sizes(monkeypatch)
    fingerprint_model(checkpoint, cache_dir=cache)
    assert sizes == [2]


def test_a_cache_that_cannot_be_written_is_a_miss(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    assert fingerprint_model(checkpoint, cache_dir=tmp_path / "file" / "cache") == GOLDEN


def test_an_entry_that_cannot_be_replaced_leaves_no_file_behind(
    checkpoint: Path, cache: Path
) -> None:
    fingerprint_model(checkpoint, cache_dir=cache)
    (entry,) = cache.glob("*.json")
    entry.unlink()
    entry.mkdir()
    assert fingerprint_model(checkpoint, cache_dir=cache) == GOLDEN
    assert sorted(cache.iterdir()) == [entry, entry.with_suffix(".lock")]


def test_no_cache_is_written_without_a_directory_for_it(checkpoint: Path) -> None:
    before = sorted(checkpoint.parent.rglob("*"))
    of(checkpoint)
    assert sorted(checkpoint.parent.rglob("*")) == before


# The stamp.


def test_a_stamp_changes_with_every_file_that_counts(checkpoint: Path, tmp_path: Path) -> None:
    changes: list[Callable[[], object]] = [
        lambda: change_byte(checkpoint / "model.safetensors", 1000),
        lambda: (checkpoint / "config.json").write_text("{}"),
        lambda: (checkpoint / "more.bin").write_bytes(b"more"),
        lambda: (checkpoint / "more.bin").rename(checkpoint / "other.bin"),
        (checkpoint / "other.bin").unlink,
        lambda: (
            shutil.copytree(checkpoint, tmp_path / "copy")
            and checkpoint.rename(tmp_path / "away")
            and (tmp_path / "copy").rename(checkpoint)
        ),
    ]
    stamps = [stamp_model(checkpoint)]
    for change in changes:
        of(checkpoint)  # waits until a change must show
        change()
        stamps.append(stamp_model(checkpoint))
    # The one that is back to what it was is stamped as it was.
    assert len(set(stamps)) == len(stamps) - 1
    assert stamps[5] == stamps[2]


def test_a_stamp_is_indifferent_to_other_files_and_reads_none(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "preadv", refuse_to_read)
    before = stamp_model(checkpoint)
    (checkpoint / "README.md").write_text("notes")
    (checkpoint / "checkpoint-500").mkdir()
    assert stamp_model(checkpoint) == before


def test_a_stamp_of_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no checkpoint at"):
        stamp_model(tmp_path / "nowhere")
