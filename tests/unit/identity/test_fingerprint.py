import errno
import hashlib
import json
import os
import shutil
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import pytest

from kvray.errors import ConfigError
from kvray.identity import fingerprint
from kvray.identity.fingerprint import Progress, stamp_model
from tests.unit.identity.conftest import (
    GOLDEN,
    change_byte,
    of,
    read_sizes,
    safetensors,
    write_checkpoint,
)
from tests.waiting import HANG_S

Change = Callable[[Path], object]

# The format.


def test_a_fingerprint_is_the_golden_one_and_follows_its_written_format(checkpoint):
    assert of(checkpoint) == GOLDEN
    items = [b"kvray.fingerprint.2"]
    for name in ("config.json", "model.safetensors"):
        items += [name.encode(), hashlib.sha256((checkpoint / name).read_bytes()).digest()]
    message = b"".join(struct.pack("<Q", len(item)) + item for item in items)
    assert of(checkpoint) == hashlib.sha256(message).hexdigest()


# What must not play a part.


def test_the_order_in_which_files_were_made_and_the_name_of_a_single_one_play_no_part(tmp_path):
    parts = {"a__bin": b"1", "b__bin": b"2"}
    there = write_checkpoint(tmp_path / "there", **parts)
    assert of(there) == of(write_checkpoint(tmp_path / "back", **dict(reversed(parts.items()))))
    single = of(there / "a.bin")
    assert single == of(str((there / "a.bin").rename(tmp_path / "x.gguf"))) != of(there / "b.bin")


UNREAD = (
    *("README.md", "tokenizer.json", "tokenizer_config.json", "chat_template.json"),
    *("generation_config.json", "trainer_state.json", "optimizer.pt", "rng_state_0.pth"),
    ".hidden.json",
)
UNREAD_DIRECTORIES = ("checkpoint-500", "global_step12", "original", ".cache", "lost+found")
WITHOUT_PART: dict[str, Change] = {
    "the times of files": lambda path: os.utime(path / "model.safetensors", ns=(0, 0)),
    "its place": lambda path: path.rename(path.with_name("elsewhere")),
    "a directory that has the name of weights": lambda path: (path / "original.bin").mkdir(),
    "a pipe, which is not waited for": lambda path: os.mkfifo(path / "pipe.bin"),
    **{name: lambda path, name=name: (path / name).write_text("any") for name in UNREAD},
    **{name: lambda path, name=name: write_checkpoint(path / name) for name in UNREAD_DIRECTORIES},
}


@pytest.mark.parametrize("name", WITHOUT_PART)
def test_what_no_engine_computes_with_plays_no_part(checkpoint, name):
    before = of(checkpoint)
    WITHOUT_PART[name](checkpoint)
    assert of(next(checkpoint.parent.iterdir())) == before


# What must play a part.


def change_weights(at: int) -> Change:
    """Change a byte at a place, from the file's end if it is negative."""
    return lambda path: change_byte(
        path / "model.safetensors", at % (path / "model.safetensors").stat().st_size
    )


CONFIGURATIONS = (
    *("config.json", "adapter_config.json", "hf_quant_config.json", "preprocessor_config.json"),
    *("model.safetensors.index.json", "processor_config.json", "video_preprocessor_config.json"),
    *("image_processing_custom.py", "model_config.yaml", "settings_of_tomorrow.json"),
)
MORE = ("extra.safetensors", "extra.gguf", "extra.bin", "extra.pt", "rank1.engine")
WITH_PART: dict[str, Change] = {
    **{f"byte {at} of the weights": change_weights(at) for at in (0, 100, 1000, -1)},
    **{
        name: lambda path, name=name: (path / name).write_text('{"rope_theta": 50000}')
        for name in CONFIGURATIONS
    },
    **{name: lambda path, name=name: (path / name).write_bytes(b"") for name in MORE},
    "another name": lambda path: (path / "model.safetensors").rename(path / "x.safetensors"),
    "weights in a directory inside": lambda path: write_checkpoint(path / "vision_tower"),
}


@pytest.mark.parametrize("name", WITH_PART)
def test_what_an_engine_computes_with_shows(checkpoint, name):
    if name in CONFIGURATIONS:  # there, too, before
        (checkpoint / name).write_text('{"rope_theta": 10000}')
    before = of(checkpoint)
    WITH_PART[name](checkpoint)
    assert of(checkpoint) != before


@pytest.mark.parametrize("is_link", [False, True])
def test_changed_bytes_further_inside_show(checkpoint, tmp_path, is_link):
    inside = write_checkpoint(tmp_path / "tower" if is_link else checkpoint / "vision_tower")
    if is_link:
        (checkpoint / "vision_tower").symlink_to(inside)
        (checkpoint / "self").symlink_to(checkpoint)
    before = of(checkpoint)
    change_byte(inside / "model.safetensors", 1000)
    assert GOLDEN != before != of(checkpoint)


@pytest.mark.parametrize(
    ("config", "weights"),
    [("adapter_config.json", "adapter_model.safetensors"), ("config.json", "rank0.engine")],
)
def test_adapters_and_engines_have_fingerprints_of_their_own(tmp_path, config, weights):
    (tmp_path / weights).write_bytes(safetensors({"lora_A": b"1234"}))
    (tmp_path / config).write_text('{"r": 8}')
    before = of(tmp_path)
    (tmp_path / config).write_text('{"r": 16}')
    assert of(tmp_path) != before


# The stamp.


def test_a_stamp_changes_with_every_file_that_counts(checkpoint, tmp_path, monkeypatch):
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
    sizes = read_sizes(monkeypatch)
    (checkpoint / "README.md").write_text("notes")
    (checkpoint / "checkpoint-500").mkdir()
    assert (stamp_model(checkpoint), sizes) == (stamps[-1], [])


# Large checkpoints: every byte of them counts.


@pytest.mark.parametrize("size", [2**26, pytest.param(5 * 10**9, marks=pytest.mark.long)])
@pytest.mark.parametrize("place", [0.0, 0.1234, 0.5, 0.9999])
def test_one_changed_byte_of_a_large_file_shows(tmp_path, size, place):
    weights = tmp_path / "model.gguf"
    with weights.open("wb") as file:
        file.truncate(size)  # a sparse file: it takes no space
    before = of(weights)
    change_byte(weights, int(place * size))
    assert of(weights) != before


def test_a_hole_and_zeros_that_were_written_are_equal(tmp_path):
    holes, written = tmp_path / "holes.gguf", tmp_path / "written.gguf"
    with holes.open("wb") as file:
        for at in (0, 5 * 2**20 + 17, 2**24):
            file.seek(at)
            file.write(b"data")
        file.truncate(2**25 + 1)
    written.write_bytes(holes.read_bytes())
    assert holes.stat().st_blocks < written.stat().st_blocks
    assert of(holes) == of(written)


def test_several_files_read_at_once_in_any_order_give_one_fingerprint(checkpoint, monkeypatch):
    for number in range(4):
        with (checkpoint / f"model-{number}.bin").open("wb") as file:
            file.write(b"%d" % number)
            file.truncate(2**20 * (number + 1))
    alone = of(checkpoint)
    monkeypatch.setattr(fingerprint, "_ALONE_BYTES_MAX", 0)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: range(4))
    assert of(checkpoint) == alone


def test_unreadable_files_end_all_reading(checkpoint, monkeypatch):
    monkeypatch.setattr(fingerprint, "_ALONE_BYTES_MAX", 0)
    monkeypatch.setattr(os, "preadv", Mock(side_effect=OSError(errno.EIO, "a broken disk")))
    with pytest.raises(ConfigError, match=r"cannot be read \(a broken disk\)"):
        of(checkpoint)


# Files that change while they are read.


def change_on_read(patch: pytest.MonkeyPatch, action: Callable[[], object], times: int = 1) -> None:
    """Call an action after a file was read, so many times."""
    left = [action] * times
    read_sizes(patch, after=lambda: left and left.pop()())


@pytest.mark.parametrize(
    "change",
    [change_weights(1000), lambda path: os.truncate(path / "model.safetensors", 100)],
    ids=["changed", "cut"],
)
def test_a_file_that_changes_once_while_it_is_read_is_read_again(checkpoint, monkeypatch, change):
    change_on_read(monkeypatch, lambda: change(checkpoint))
    changed = of(checkpoint)
    assert changed == of(checkpoint) != GOLDEN


def test_files_that_keep_changing_are_refused_and_not_remembered(checkpoint, cache, monkeypatch):
    change_on_read(monkeypatch, lambda: change_byte(checkpoint / "model.safetensors", 1000), 9)
    with pytest.raises(ConfigError, match="change while they are read; wait until"):
        of(checkpoint, cache)
    (entry,) = cache.glob("*.json")
    assert json.loads(entry.read_text())["sha256"] == {}


def test_a_file_that_vanishes_is_left_out(tmp_path, monkeypatch):
    checkpoint = write_checkpoint(tmp_path / "model", z__bin=b"more")
    change_on_read(monkeypatch, (checkpoint / "z.bin").unlink)
    assert of(checkpoint) == GOLDEN


def test_files_of_this_tick_wait_for_it(checkpoint, monkeypatch):
    stamps = [path.stat().st_ctime_ns for path in checkpoint.iterdir()]
    waits: list[float] = []
    monkeypatch.setattr(time, "time_ns", lambda: max(stamps) + 1_000_000)
    monkeypatch.setattr(time, "sleep", waits.append)
    of(checkpoint)
    assert waits == [0.019]


# Bad paths.


NO_WEIGHTS = "holds no weight files"
NAMED = rf"{NO_WEIGHTS} .*connector\.model_key"
PIECE = "is one piece of a checkpoint; name its directory"


@pytest.mark.parametrize(
    ("made", "make", "asked", "said"),
    [
        ("x", Path.touch, "nowhere", r"no checkpoint at .*nowhere; .* connector\.model_key"),
        ("config.json", Path.touch, "", NAMED),
        ("training_args.bin", Path.touch, "", NAMED),
        ("notes.txt", Path.touch, "", NAMED),
        ("config.json", Path.touch, "config.json", NO_WEIGHTS),
        ("model.gguf", os.mkfifo, "model.gguf", NO_WEIGHTS),
        ("model-00001-of-00002.gguf", Path.touch, "model-00001-of-00002.gguf", PIECE),
        ("rank0.engine", Path.touch, "rank0.engine", PIECE),
    ],
)
def test_what_is_no_checkpoint_is_refused_with_the_fix(tmp_path, made, make, asked, said):
    make(tmp_path / made)
    for call in (of, stamp_model):
        with pytest.raises(ConfigError, match=said):
            call(tmp_path / asked)


def test_a_link_to_weights_that_are_not_there_is_refused(checkpoint):
    (checkpoint / "more.safetensors").symlink_to("gone")
    with pytest.raises(ConfigError, match=r"more\.safetensors cannot be read"):
        of(checkpoint)


def test_pipes_for_files_are_not_awaited(checkpoint, monkeypatch):
    def replace_by_pipe(_files: object) -> None:
        (checkpoint / "config.json").unlink(missing_ok=True)
        if not (checkpoint / "pipe").exists():
            os.mkfifo(checkpoint / "pipe")
            os.link(checkpoint / "pipe", checkpoint / "config.json")

    monkeypatch.setattr(fingerprint, "_wait_for_tick", replace_by_pipe)
    found = of(checkpoint)
    (checkpoint / "config.json").unlink(missing_ok=True)
    assert found == of(checkpoint) != GOLDEN


def test_without_enough_threads_none_reads(checkpoint, monkeypatch):
    started, start = list[threading.Thread](), threading.Thread.start

    def start_one(thread: threading.Thread) -> None:
        if started:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        start(thread)

    may_read = threading.Event()
    monkeypatch.setattr(fingerprint, "_ALONE_BYTES_MAX", 0)
    monkeypatch.setattr(threading.Thread, "start", start_one)
    monkeypatch.setattr(fingerprint.os, "sched_getaffinity", lambda _: {0, 1})
    progress = Progress(on_step=lambda: may_read.wait(10) and None)
    with pytest.raises(RuntimeError):
        of(checkpoint, progress=progress)
    may_read.set()
    started[0].join(HANG_S)
    assert progress.done_bytes == 0
