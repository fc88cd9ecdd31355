import hashlib
import shutil
import time
from pathlib import Path

import pytest

from tests.unit.identity.checkpoints import (
    CONFIG,
    GOLDEN,
    TENSORS,
    change_byte,
    of,
    read_sizes,
    safetensors,
)

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
