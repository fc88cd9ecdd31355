from pathlib import Path

import pytest

from tests.unit.identity.checkpoints import write_checkpoint


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "model")


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "kvray"
