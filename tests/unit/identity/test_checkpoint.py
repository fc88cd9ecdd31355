import os
import threading
from pathlib import Path

import pytest

from kvray.errors import ConfigError
from kvray.identity import fingerprint
from kvray.identity.fingerprint import Progress, fingerprint_model
from tests.unit.identity.checkpoints import (
    GOLDEN,
    of,
    write_checkpoint,
)
from tests.waiting import HANG_S

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
    monkeypatch.setattr(fingerprint.os, "sched_getaffinity", lambda _: {0, 1})
    progress = Progress(on_step=lambda: may_read.wait(10) and None)
    with pytest.raises(RuntimeError):
        fingerprint_model(checkpoint, cache_dir=None, progress=progress)
    may_read.set()
    started[0].join(HANG_S)
    assert progress.done_bytes == 0
