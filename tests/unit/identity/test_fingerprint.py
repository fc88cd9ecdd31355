import hashlib
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from kvray.errors import ConfigError
from kvray.identity.fingerprint import fingerprint_model, stamp_model
from tests.unit.identity.checkpoints import (
    CONFIG,
    GOLDEN,
    change_byte,
    of,
    refuse_to_read,
    safetensors,
    write_checkpoint,
)

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
