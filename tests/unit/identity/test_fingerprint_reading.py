import errno
import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kvray.errors import ConfigError
from kvray.identity import fingerprint
from kvray.identity.fingerprint import fingerprint_model
from tests.unit.identity.checkpoints import (
    GOLDEN,
    change_byte,
    of,
    write_checkpoint,
)

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
