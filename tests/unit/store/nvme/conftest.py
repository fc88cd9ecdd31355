"""Directories on a real disk: what is under test is not to be had in shared memory."""

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvray.store.nvme import NvmeStore
from tests.unit.store.nvme.small_store import open_store


@pytest.fixture
def directory() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="kvray-nvme-"))
    yield path
    shutil.rmtree(path)


@pytest.fixture
def store(directory: Path) -> Iterator[NvmeStore]:
    """A store of 4 segments of 16 slots."""
    made = open_store(directory)
    yield made
    made.close()
