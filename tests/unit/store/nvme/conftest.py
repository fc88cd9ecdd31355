"""Directories on a real disk: what is under test is not to be had in shared memory."""

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvray.store.nvme import NvmeSpec, NvmeStore, writer
from tests.unit.store.invariants import check_invariants
from tests.unit.store.nvme.small_store import Reopen, open_store


@pytest.fixture
def directory() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="kvray-nvme-"))
    yield path
    shutil.rmtree(path)


@pytest.fixture
def reopen(directory: Path) -> Iterator[Reopen]:
    """Opens the store in the test's directory, when the one opened before has closed."""
    opened: list[NvmeStore] = []

    def close() -> None:
        for one in opened:
            writer.reopen(one.tables)  # what a full disk has closed
            one.tables.undo.settle()
            check_invariants(one.tables)
            one.close()

    def open_again(asked: NvmeSpec | None = None, **more: Any) -> NvmeStore:
        close()
        opened[:] = [open_store(directory, asked, **more)]
        check_invariants(opened[0].tables)
        return opened[0]

    yield open_again
    close()


@pytest.fixture
def store(reopen: Reopen) -> NvmeStore:
    """A store of 4 segments of 16 slots."""
    return reopen()
