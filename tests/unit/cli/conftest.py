"""A directory in memory for arenas, and what commands print."""

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console, RenderableType


@pytest.fixture
def parent() -> Iterator[Path]:
    """A directory as arena.dir names one."""
    path = Path(tempfile.mkdtemp(dir="/dev/shm", prefix="kvray-test-"))
    yield path
    shutil.rmtree(path)


def shown(*parts: RenderableType, width: int = 200) -> str:
    """Return tables and sentences as a terminal of that width shows them."""
    console = Console(width=width, highlight=False)
    with console.capture() as captured:
        for part in parts:
            console.print(part, soft_wrap=isinstance(part, str))
    return captured.get()


def rows(text: str) -> list[str]:
    """Return the lines with one space between two words."""
    return [" ".join(line.split()) for line in text.splitlines()]
