import hashlib
import json
import os
import shutil
import stat
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvray import fingerprint
from kvray.errors import ConfigError
from kvray.fingerprint import fingerprint_model, stamp_model

CONFIG = '{"num_hidden_layers": 2}'
GOLDEN = "7faa06b47b1adfb831d6ceba50ce9d09ce3797437ddedeb01fdffba5066e281e"


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


@pytest.fixture
def _sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take every checkpoint for too large to be hashed whole, and chunks as small as they get."""
    monkeypatch.setattr(fingerprint, "WHOLE_BYTES_MAX", 0)
    monkeypatch.setattr(fingerprint, "CHUNK_BYTES", 16)
    monkeypatch.setattr(fingerprint, "GGUF_HEAD_BYTES", 64)
    monkeypatch.setattr(fingerprint, "TENSOR_BYTES", 4)
    monkeypatch.setattr(fingerprint, "CHUNKS_MAX", 4)


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

    message = framed(b"kvray.fingerprint.1")
    for name in ("config.json", "model.safetensors"):
        data = (checkpoint / name).read_bytes()
        message += framed(name.encode()) + framed(struct.pack("<QQ", len(data), 1))
        message += struct.pack("<QQ", 0, len(data)) + data
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


@pytest.mark.parametrize("name", ["README.md", "tokenizer.json", "optimizer.pt", "rng_state_0.pth"])
def test_files_that_no_engine_computes_with_play_no_part(checkpoint: Path, name: str) -> None:
    before = of(checkpoint)
    (checkpoint / name).write_text("anything")
    assert of(checkpoint) == before


def test_directories_inside_a_checkpoint_play_no_part(checkpoint: Path) -> None:
    before = of(checkpoint)
    write_checkpoint(checkpoint / "checkpoint-500")
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
    ["config.json", "adapter_config.json", "hf_quant_config.json", "model.safetensors.index.json"],
)
def test_a_changed_configuration_shows(checkpoint: Path, name: str) -> None:
    (checkpoint / name).write_text('{"rope_theta": 10000}')
    before = of(checkpoint)
    (checkpoint / name).write_text('{"rope_theta": 50000}')
    assert of(checkpoint) != before


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


# Checkpoints too large to be hashed whole.


def test_a_checkpoint_of_up_to_the_limit_is_hashed_whole(tmp_path: Path) -> None:
    weights = tmp_path / "model.bin"
    with weights.open("wb") as file:
        file.truncate(2**24)
    before = of(weights)
    change_byte(weights, 2**23 + 12345)
    assert of(weights) != before


def test_a_checkpoint_beyond_the_limit_is_sampled(tmp_path: Path) -> None:
    weights = tmp_path / "model.gguf"
    with weights.open("wb") as file:
        file.truncate(fingerprint.WHOLE_BYTES_MAX + 1)  # a sparse file: it takes no space
    before = of(weights)
    change_byte(weights, fingerprint.WHOLE_BYTES_MAX)
    assert of(weights) != before


@pytest.mark.usefixtures("_sampled")
@pytest.mark.parametrize("name", sorted(TENSORS))
def test_a_changed_tensor_shows_in_a_sample(tmp_path: Path, name: str) -> None:
    checkpoint = write_checkpoint(tmp_path / "model")
    changed = TENSORS | {name: bytes(byte ^ 1 for byte in TENSORS[name])}
    other = write_checkpoint(tmp_path / "other", model__safetensors=safetensors(changed))
    assert of(checkpoint) != of(other)


@pytest.mark.usefixtures("_sampled")
def test_the_middle_of_every_tensor_is_sampled(tmp_path: Path) -> None:
    tensors = {f"layer.{number}": bytes(100) for number in range(50)}
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(safetensors(tensors))
    before = of(weights)
    seen = set()
    for number in range(50):
        offset = weights.stat().st_size - 5000 + 100 * number + 50
        change_byte(weights, offset)
        seen.add(of(weights))
        change_byte(weights, offset)
    assert len(seen - {before}) == 50


@pytest.mark.usefixtures("_sampled")
def test_of_too_many_tensors_evenly_many_are_sampled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fingerprint, "TENSORS_MAX", 5)
    data = safetensors({f"layer.{number}": bytes(1000) for number in range(10)})
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(data)
    before = of(weights)
    shown = []
    for number in range(10):
        offset = len(data) - 10_000 + 1000 * number + 500
        change_byte(weights, offset)
        shown.append(of(weights) != before)
        change_byte(weights, offset)
    assert shown == [True, False] * 5


@pytest.mark.usefixtures("_sampled")
def test_the_header_shows_in_a_sample(tmp_path: Path) -> None:
    note = "x" * 500
    left = write_checkpoint(
        tmp_path / "left", model__safetensors=safetensors(TENSORS, note=note + "1" + note)
    )
    right = write_checkpoint(
        tmp_path / "right", model__safetensors=safetensors(TENSORS, note=note + "2" + note)
    )
    assert of(left) != of(right)


@pytest.mark.usefixtures("_sampled")
@pytest.mark.parametrize("offset", [0, 63, 250, 500, 999])
def test_head_stride_and_end_of_a_gguf_file_are_sampled(tmp_path: Path, offset: int) -> None:
    weights = tmp_path / "model.gguf"
    weights.write_bytes(bytes(1000))
    before = of(weights)
    change_byte(weights, offset)
    assert of(weights) != before


@pytest.mark.usefixtures("_sampled")
def test_a_sample_takes_a_bounded_number_of_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = tmp_path / "model.bin"
    weights.write_bytes(bytes(100_000))
    taken = []
    pread = os.pread

    def read(descriptor: int, size: int, offset: int) -> bytes:
        taken.append(size)
        return pread(descriptor, size, offset)

    monkeypatch.setattr(os, "pread", read)
    of(weights)
    assert sum(taken) == 5 * 16


@pytest.mark.usefixtures("_sampled")
def test_a_small_configuration_is_taken_whole_beside_sampled_weights(tmp_path: Path) -> None:
    config = json.dumps({"notes": "x" * 1000})
    checkpoint = write_checkpoint(tmp_path / "model", config__json=config)
    before = of(checkpoint)
    change_byte(checkpoint / "config.json", 700)
    assert of(checkpoint) != before


@pytest.mark.usefixtures("_sampled")
@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff" * 100,
        struct.pack("<Q", 2) + b"[]",
        struct.pack("<Q", 3) + b"{]}",
        struct.pack("<Q", 2) + b"{",
        struct.pack("<Q", 9) + b'{"a": {}}',
        safetensors({"a": bytes(100)})[:-1],
        safetensors({"a": bytes(100)}).replace(b"[0, 100]", b"[-1, 99]"),
        safetensors({"a": bytes(100)}).replace(b"[0, 100]", b"[0.5, 9]"),
        b"version https://git-lfs.github.com/spec/v1\n",
    ],
)
def test_a_damaged_safetensors_file_is_named(tmp_path: Path, data: bytes) -> None:
    checkpoint = write_checkpoint(tmp_path / "model", model__safetensors=data, more__bin=b"weights")
    with pytest.raises(ConfigError, match=r"model\.safetensors is no complete safetensors file"):
        of(checkpoint)


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


# Files that change while they are read.


@pytest.fixture
def change_on_read(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], object], int], None]:
    """Call an action when a file is read, so many times."""

    def install(action: Callable[[], object], times: int) -> None:
        pread = os.pread
        left = [action] * times

        def read(descriptor: int, size: int, offset: int) -> bytes:
            data = pread(descriptor, size, offset)
            if left:
                left.pop()()
            return data

        monkeypatch.setattr(os, "pread", read)

    return install


def test_a_file_that_changes_once_is_read_again(
    checkpoint: Path, change_on_read: Callable[[Callable[[], object], int], None]
) -> None:
    change_on_read(lambda: change_byte(checkpoint / "model.safetensors", 1000), 1)
    changed = of(checkpoint)
    assert changed == of(checkpoint) != GOLDEN


def test_files_that_keep_changing_are_refused(
    checkpoint: Path, change_on_read: Callable[[Callable[[], object], int], None]
) -> None:
    change_on_read(lambda: change_byte(checkpoint / "model.safetensors", 1000), 9)
    with pytest.raises(ConfigError, match="change while they are read; wait until"):
        of(checkpoint)


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
    monkeypatch.setattr(os, "pread", refuse_to_read)
    assert fingerprint_model(checkpoint, cache_dir=cache) == GOLDEN


def test_the_cache_is_one_file_per_path_for_this_user_only(checkpoint: Path, cache: Path) -> None:
    fingerprint_model(checkpoint, cache_dir=cache)
    fingerprint_model(checkpoint, cache_dir=cache)
    (entry,) = cache.iterdir()
    assert stat.S_IMODE(entry.stat().st_mode) == 0o600


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
    [b"", b"{", b"[]", b"null", b"\xff", b"[" * 100_000, b'{"fingerprint": 2, "identity": 1}'],
    ids=lambda content: repr(content[:20]),
)
def test_a_damaged_cache_is_a_miss_and_is_written_anew(
    checkpoint: Path, cache: Path, content: bytes
) -> None:
    fingerprint_model(checkpoint, cache_dir=cache)
    (entry,) = cache.iterdir()
    sound = entry.read_bytes()
    entry.write_bytes(content)
    assert fingerprint_model(checkpoint, cache_dir=cache) == GOLDEN
    assert entry.read_bytes() == sound


def test_a_cache_entry_with_a_made_up_fingerprint_is_a_miss(checkpoint: Path, cache: Path) -> None:
    fingerprint_model(checkpoint, cache_dir=cache)
    (entry,) = cache.iterdir()
    entry.write_text(json.dumps(json.loads(entry.read_text()) | {"fingerprint": "short"}))
    assert fingerprint_model(checkpoint, cache_dir=cache) == GOLDEN


def test_a_cache_that_cannot_be_written_is_a_miss(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    assert fingerprint_model(checkpoint, cache_dir=tmp_path / "file" / "cache") == GOLDEN


def test_an_entry_that_cannot_be_replaced_leaves_no_file_behind(
    checkpoint: Path, cache: Path
) -> None:
    fingerprint_model(checkpoint, cache_dir=cache)
    (entry,) = cache.iterdir()
    entry.unlink()
    entry.mkdir()
    assert fingerprint_model(checkpoint, cache_dir=cache) == GOLDEN
    assert list(cache.iterdir()) == [entry]


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
    monkeypatch.setattr(os, "pread", refuse_to_read)
    before = stamp_model(checkpoint)
    (checkpoint / "README.md").write_text("notes")
    (checkpoint / "checkpoint-500").mkdir()
    assert stamp_model(checkpoint) == before


def test_a_stamp_of_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no checkpoint at"):
        stamp_model(tmp_path / "nowhere")
