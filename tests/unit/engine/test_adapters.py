"""By which bytes an adapter is known, and when nobody can tell which ones the engine has."""

import os
import threading
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import pytest

from kvray.engine import model_name
from kvray.engine.model_name import Adapters
from kvray.errors import ConfigError
from tests.waiting import Gate, wait_for

engine = partial(Adapters, settings="{}", cache_dir=None)


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait longer than an engine does, so that a busy machine makes no miss."""
    monkeypatch.setattr(model_name, "_WAIT_S", 5.0)


def write_adapter(directory: Path, weights: bytes = b"weights") -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "adapter_config.json").write_text('{"r": 8}')
    (directory / "adapter_model.bin").write_bytes(weights)
    return directory


def test_an_adapter_is_known_by_its_bytes_and_how_they_are_read_and_not_by_path_or_number(tmp_path):
    known, other = engine(), engine(settings='{"swap_gate_up_proj_lora_b_weight": false}')
    first = known.fingerprint(1, str(write_adapter(tmp_path / "a")))
    assert first is not None
    assert len(first) == 32
    assert known.fingerprint(2, str(write_adapter(tmp_path / "b"))) == first
    assert engine().fingerprint(3, str(tmp_path / "a")) == first
    assert other.fingerprint(3, str(tmp_path / "a")) != first
    assert known.fingerprint(3, str(write_adapter(tmp_path / "c", b"other"))) != first
    assert known.fingerprint(1, str(tmp_path / "b")) is None, "another path for one task"
    for _ in range(2):
        with pytest.raises(ConfigError, match="nowhere"):
            known.fingerprint(4, str(tmp_path / "nowhere"))


def test_other_bytes_at_the_path_bypass_in_this_engine_and_are_new_to_the_next(tmp_path, caplog):
    known, path = engine(cache_dir=tmp_path / "cache"), str(write_adapter(tmp_path / "a"))
    before = known.fingerprint(1, path)
    write_adapter(tmp_path / "a", b"changed")
    assert known.fingerprint(1, path) is None
    write_adapter(tmp_path / "a")
    assert known.fingerprint(1, path) is None, "the engine may have read the ones between"
    assert [f"adapter 1 at {path}" in one for one in caplog.messages] == [True]
    write_adapter(tmp_path / "a", b"changed")
    after = engine(cache_dir=tmp_path / "cache").fingerprint(1, path)
    assert after not in (None, before)
    assert known.fingerprint(2, path) == after, "another task of the engine reads the new ones"


def test_a_known_adapter_is_looked_at_and_not_read(tmp_path, monkeypatch):
    known, path = engine(), str(write_adapter(tmp_path))
    before = known.fingerprint(1, path)
    read = Mock()
    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", read)
        assert known.fingerprint(1, path) == before is not None
    assert not read.called
    (tmp_path / "README.md").write_text("notes")
    assert known.fingerprint(1, path) == before


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (MemoryError, r"{path} was not read .MemoryError"),
        (SystemExit, r"{path} was not read .SystemExit"),
        (ConfigError("its files change while they are read"), "change while they are read"),
    ],
)
def test_a_reading_of_an_adapter_that_fails_is_tried_again(tmp_path, monkeypatch, error, said):
    known, path = engine(), str(write_adapter(tmp_path))
    with monkeypatch.context() as patch:
        patch.setattr(model_name, "fingerprint_model", Mock(side_effect=error))
        for _ in range(model_name._AT_ONCE_MAX + 1):
            with pytest.raises(ConfigError, match=said.format(path=path)):
                known.fingerprint(1, path)
    assert known.fingerprint(1, path) is not None


def test_an_adapter_that_takes_long_to_read_is_not_waited_for(tmp_path, monkeypatch):
    gate = Gate(monkeypatch, model_name, "fingerprint_model")
    monkeypatch.setattr(model_name, "_AT_ONCE_MAX", 1)
    monkeypatch.setattr(model_name, "_WAIT_S", 0.05)
    known, path = engine(), str(write_adapter(tmp_path / "a"))
    wait_for(lambda: known.fingerprint(1, path) or gate.reached.is_set(), "its reading")
    assert known.fingerprint(1, path) is None
    assert known.fingerprint(2, str(write_adapter(tmp_path / "b"))) is None
    gate.open.set()
    wait_for(lambda: known.fingerprint(1, path) is not None, "reading the adapter")
    wait_for(lambda: known.fingerprint(2, str(tmp_path / "b")) is not None, "reading the other")


def test_a_file_system_that_does_not_answer_holds_up_no_request(tmp_path, monkeypatch):
    known, paths = engine(), [str(write_adapter(tmp_path / str(number))) for number in range(6)]
    for number, path in enumerate(paths):
        assert known.fingerprint(number, path) is not None
    with monkeypatch.context() as patch:
        gate = Gate(patch, model_name, "stamp_model")
        patch.setattr(model_name, "_WAIT_S", 0.0)
        for number, path in enumerate(paths * 3):
            assert known.fingerprint(number % len(paths), path) is None
        assert num_threads() == model_name._AT_ONCE_MAX
    gate.open.set()
    for number, path in enumerate(paths):
        wait_for(lambda one=(number, path): known.fingerprint(*one) is not None, path)


@pytest.mark.parametrize("is_known", [False, True])
def test_what_changes_after_a_late_look_shows_at_the_next(tmp_path, monkeypatch, caplog, is_known):
    known, path = engine(), str(write_adapter(tmp_path))
    if is_known:
        assert known.fingerprint(1, path) is not None
    with monkeypatch.context() as patch:
        gate = Gate(patch, model_name, "stamp_model")
        patch.setattr(model_name, "_WAIT_S", 0.0)
        assert known.fingerprint(1, path) is None
    gate.open.set()
    wait_for(lambda: not num_threads(), "the late look")
    write_adapter(tmp_path, b"changed")
    assert known.fingerprint(1, path) is None
    assert "not those of its first request" in caplog.text


def num_threads() -> int:
    return [thread.name for thread in threading.enumerate()].count("kvray-adapter")


def test_what_is_remembered_is_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(model_name, "_ADAPTERS_MAX", 1)
    known, path = engine(), str(write_adapter(tmp_path))
    assert known.fingerprint(1, path) is not None
    assert known.fingerprint(2, path) is None
    assert known.fingerprint(1, path) is not None
